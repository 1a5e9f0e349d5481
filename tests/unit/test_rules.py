"""The catalogue: complete, consistent, and found by id or name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from snapshot import assert_snapshot

from placement_audit.rules import RULES, Rule, UnknownRuleError, get_rule, rule_text, rules_table
from placement_audit.verdicts import Severity

pytestmark = pytest.mark.unit

SEVERITIES = {
    "PA001": ("suppression-without-reason", Severity.WARNING),
    "PA002": ("unused-suppression", Severity.WARNING),
    "PA003": ("expired-suppression", Severity.WARNING),
    "PA101": ("mislabelled-gradient", Severity.WARNING),
    "PA102": ("ranks-disagree", Severity.ERROR),
    "PA103": ("invariant-declared-partial", Severity.WARNING),
    "PA104": ("wrong-grad-placement", Severity.ERROR),
    "PA105": ("reduced-twice-in-forward", Severity.NOTE),
    "PA106": ("varying-loss", Severity.NOTE),
    "PA107": ("counted-per-rank", Severity.ERROR),
    "PA108": ("applied-to-a-term", Severity.WARNING),
    "PA109": ("declared-otherwise", Severity.WARNING),
    "PA110": ("mean-of-unequal-parts", Severity.WARNING),
    "PA111": ("backward-left-out", Severity.ERROR),
    "PA201": ("lost-reduction", Severity.ERROR),
    "PA202": ("double-reduction", Severity.ERROR),
    "PA203": ("wrong-scale", Severity.ERROR),
    "PA204": ("wrong-placement", Severity.ERROR),
    "PA205": ("ranks-disagree-on-parameter", Severity.ERROR),
    "PA206": ("no-gradient", Severity.ERROR),
    "PA207": ("wrong-gradient", Severity.ERROR),
    "PA208": ("wrong-loss", Severity.ERROR),
    "PA209": ("wrong-normalisation", Severity.ERROR),
    "PA401": ("deferred-reduction", Severity.NOTE),
    "PA402": ("wrong-update", Severity.ERROR),
    "PA403": ("replicas-drift", Severity.ERROR),
    "PA404": ("update-of-a-part", Severity.WARNING),
    "PA501": ("reduction-dtype", Severity.NOTE),
    "PA901": ("evidence-disagrees", Severity.ERROR),
}

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)


def test_ids_names_and_severities_are_these() -> None:
    assert {r.id: (r.name, r.severity) for r in RULES} == SEVERITIES


def test_in_order_of_ids() -> None:
    assert [r.id for r in RULES] == sorted(SEVERITIES)


@each_rule
def test_found_by_id_and_name(rule: Rule) -> None:
    for key in (rule.id, rule.id.lower(), rule.name, f" {rule.name} "):
        assert get_rule(key) is rule


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("PA2O1", "There is no rule 'PA2O1'; did you mean PA201 lost-reduction"),
        ("lost-reductoin", "There is no rule 'lost-reductoin'; did you mean PA201 lost-reduction"),
        ("xyz", "There is no rule 'xyz'; `placement-audit rules` lists them."),
        ("", "There is no rule ''; `placement-audit rules` lists them."),
    ],
)
def test_unknown_rule_names_the_near_ones(asked: str, said: str) -> None:
    with pytest.raises(KeyError) as caught:
        get_rule(asked)
    assert str(caught.value).startswith(said)
    assert isinstance(caught.value, UnknownRuleError)
    assert caught.value.message == str(caught.value)


@each_rule
def test_every_text_is_there(rule: Rule) -> None:
    for text in (rule.summary, rule.why, rule.how_judged, rule.bad, rule.good, rule.fix):
        assert text.strip() == text
        assert text
    assert re.fullmatch(r"[^.].*\.|\.grad.*\.", rule.summary)
    assert rule.bad != rule.good


@each_rule
def test_examples_are_python(rule: Rule) -> None:
    if rule.id == "PA901":
        return  # its examples are lines of a report
    ast.parse(rule.bad)
    ast.parse(rule.good)


@each_rule
def test_links_are_threads(rule: Rule) -> None:
    for link in rule.links:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", link.ref)
        assert link.about
    assert len({link.ref for link in rule.links}) == len(rule.links)


@each_rule
def test_text_is_ascii_and_fits(rule: Rule) -> None:
    text = rule_text(rule)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 110
    assert "\n\n\n" not in text
    assert text.startswith(f"{rule.id} {rule.name}   {rule.severity}\n\n{rule.summary[:40]}")


@each_rule
def test_rules_named_in_a_text_exist(rule: Rule) -> None:
    for other in re.findall(r"PA\d{3}", rule_text(rule)):
        assert get_rule(other)


def test_whole_text() -> None:
    assert_snapshot("rule_PA202.txt", rule_text(get_rule("PA202")))


def test_table() -> None:
    assert_snapshot("rules.txt", rules_table())


def test_code_in_running_text_is_not_broken() -> None:
    assert "`p.grad = p.grad.redistribute(placements=p.placements)`" in rule_text(get_rule("PA401"))


LIGHT = """
import sys
import placement_audit.rules, placement_audit.report, placement_audit.report.json_io
import placement_audit.report.way
assert "rich" not in sys.modules, "rich"
import placement_audit.report.text
for heavy in ("torch", "torchtitan", "pytest"):
    assert heavy not in sys.modules, heavy
"""


def test_rules_and_reports_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0

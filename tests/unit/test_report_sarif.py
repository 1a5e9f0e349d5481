"""SARIF 2.1.0: the schema's word, and what GitHub and editors take from it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import formats_shared as shared
import make_report as m
import pytest
from hostile import CODE, NAME, hostile_report
from snapshot import assert_snapshot

from placement_audit.model import CallSite
from placement_audit.report import render
from placement_audit.report.edits import Replacement, replacements
from placement_audit.report.sarif import FINGERPRINT, sarif
from placement_audit.rules import RULES
from placement_audit.verdicts import EditStatus, Means, Report
from tests.releases import Unreachable, sarif_schema

pytestmark = pytest.mark.unit


def run_of(report: Report, **kwargs: Any) -> dict[str, Any]:
    out = json.loads(sarif(report, **kwargs))
    assert out["version"] == "2.1.0"
    (run,) = out["runs"]
    return run


def result(report: Report, rule: str, **kwargs: Any) -> dict[str, Any]:
    return next(r for r in run_of(report, **kwargs)["results"] if r["ruleId"] == rule)


def places(locations: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    found = [x["physicalLocation"] for x in locations]
    return [
        (p["artifactLocation"]["uriBaseId"], p["artifactLocation"]["uri"], p["region"]["startLine"])
        for p in found
    ]


# --------------------------------------------------------------------------- the schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The published schema; skips where it can't be had."""
    try:
        return json.loads(sarif_schema())
    except Unreachable as why:
        pytest.skip(str(why))


REPORTS = {
    "mixed": m.mixed_report,
    "stock": m.stock_report,
    "mended": shared.mended,
    "suppressed": shared.suppressed,
    "incomplete": shared.incomplete,
    "hostile": hostile_report,
}


@pytest.mark.parametrize("name", REPORTS)
def test_valid_against_the_published_schema(name: str, schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(json.loads(sarif(REPORTS[name]())), schema)


ALLOWED = {
    "result": {
        "ruleId",
        "ruleIndex",
        "level",
        "message",
        "locations",
        "partialFingerprints",
        "properties",
        "relatedLocations",
        "codeFlows",
        "fixes",
        "suppressions",
    },
    "region": {"startLine", "startColumn", "endLine", "endColumn", "snippet"},
    "location": {"id", "physicalLocation", "logicalLocations", "message"},
}
"""Words of the standard that we use; the schema forbids any other."""


@pytest.mark.parametrize("name", REPORTS)
def test_only_words_of_the_standard(name: str) -> None:
    run = run_of(REPORTS[name]())
    assert set(run["tool"]["driver"]) <= {"name", "semanticVersion", "rules", "informationUri"}
    for r in run["results"]:
        assert set(r) <= ALLOWED["result"]
        assert run["tool"]["driver"]["rules"][r["ruleIndex"]]["id"] == r["ruleId"]
        assert r["level"] in ("error", "warning", "note")
        flow = [
            x["location"] for f in r.get("codeFlows", []) for t in f["threadFlows"] for x in t["locations"]
        ]
        for location in (*r["locations"], *r.get("relatedLocations", []), *flow):
            assert set(location) <= ALLOWED["location"]
            region = location.get("physicalLocation", {"region": {"startLine": 1}})["region"]
            assert set(region) <= ALLOWED["region"]
            assert region["startLine"] >= 1
            assert region.get("startColumn", 1) >= 1


# --------------------------------------------------------------------------- results


def test_a_result_a_finding_with_our_fingerprint() -> None:
    report = m.mixed_report()
    results = run_of(report)["results"]
    assert [r["partialFingerprints"] for r in results] == [
        {FINGERPRINT: f.fingerprint} for f in report.findings
    ]
    assert [r["level"] for r in results] == ["error"] * 4


def test_the_primary_place_is_the_users_the_others_are_related() -> None:
    report = m.mixed_report()
    finding = shared.lost(report)
    elsewhere = replace(finding.path[0], role="cause", call_site=m.REWRAP)
    report = replace(report, findings=(replace(finding, path=(elsewhere, finding.path[0])),))
    r = result(report, "PA201")
    assert places(r["locations"]) == [("%SRCROOT%", "my_model/norm.py", 31)]
    assert places(r["relatedLocations"]) == [("PYTHONPATH", m.WRAPPER, 214)]


def test_no_place_of_the_user_is_the_cause() -> None:
    r = result(m.mixed_report(), "PA202")
    assert places(r["locations"]) == [("PYTHONPATH", m.WRAPPER, 189)]
    assert places(r["relatedLocations"]) == [("PYTHONPATH", m.WRAPPER, 214)]


def test_what_lies_in_the_checkout_is_told_from_outside() -> None:
    def inside(site: CallSite) -> str | None:
        return f"third party/{site.path}" if site.line == 214 else None

    r = result(m.mixed_report(), "PA202", inside=inside)
    assert places(r["locations"]) == [("%SRCROOT%", f"third%20party/{m.WRAPPER}", 214)]
    assert places(r["relatedLocations"]) == [("PYTHONPATH", m.WRAPPER, 189)]


def test_a_finding_without_a_line_points_at_the_job() -> None:
    report = m.mixed_report()
    report = replace(report, findings=(replace(shared.lost(report), path=()),))
    r = result(report, "PA201")
    assert places(r["locations"]) == [("%SRCROOT%", "configs/fsdp_tp.toml", 1)]
    assert r["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "layers.1.attention_norm.weight"


def test_a_span_counts_columns_from_one() -> None:
    report = m.mixed_report()
    finding = shared.lost(report)
    site = replace(finding.path[0].call_site, span=(31, 15, 32, 0))
    report = replace(report, findings=(replace(finding, path=(replace(finding.path[0], call_site=site),)),))
    region = result(report, "PA201")["locations"][0]["physicalLocation"]["region"]
    assert {k: v for k, v in region.items() if k != "snippet"} == {
        "startLine": 31,
        "startColumn": 16,
        "endLine": 32,
        "endColumn": 1,
    }


def test_the_way_of_the_gradient_is_the_code_flow() -> None:
    (flow,) = result(m.mixed_report(), "PA202")["codeFlows"][0]["threadFlows"]
    told = [(x["importance"], x["location"]["message"]["text"]) for x in flow["locations"]]
    assert [x["executionOrder"] for x in flow["locations"]] == list(range(1, 11))
    assert told[2] == (
        "important",
        "forward of redistribute: fsdp S(0) -> fsdp R; all_gather over fsdp: 128 elements, float32",
    )
    assert told[5] == (
        "essential",
        "backward of from_local: tp P(sum) -> plain; all_reduce(sum) over tp: 256 elements, float32 "
        "(had already reduced it: Partial(sum) to Replicate)",
    )
    assert told[-1] == (
        "essential",
        "backward of to_local: plain -> fsdp S(0)  tp P(sum); FALSE LABEL, really complete and equal on all ranks "
        "(cause: declares Partial(sum) for a complete gradient)",
    )


def test_every_rule_with_its_help() -> None:
    rules = run_of(m.stock_report())["tool"]["driver"]["rules"]
    assert [r["id"] for r in rules] == [r.id for r in RULES]
    by_id = {r["id"]: r for r in rules}
    assert by_id["PA202"]["name"] == "double-reduction"
    assert by_id["PA202"]["defaultConfiguration"] == {"level": "error"}
    for rule in RULES:
        assert by_id[rule.id]["shortDescription"]["text"] == rule.summary
        assert rule.fix.split()[0] in by_id[rule.id]["help"]["text"]


# --------------------------------------------------------------------------- fixes


def test_a_safe_edit_is_a_fix() -> None:
    (fix,) = result(shared.mended(), "PA201")["fixes"]
    (change,) = fix["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "my_model/norm.py", "uriBaseId": "%SRCROOT%"}
    source = (
        "".join(f"{i}\n" for i in range(1, 30)) + "    def forward(self, x):\nold\n# the last line stays\n"
    )
    assert applied(source, change["replacements"]) == source.replace(
        "1\n2\n", "1\nfrom torch.distributed.tensor import Partial\n2\n", 1
    ).replace(
        "old\n",
        "        return F.rms_norm(x.to_local(), self.shape, self.weight.to_local(grad_placements=[Partial()]))\n",
    )


def applied(source: str, changes: list[dict[str, Any]]) -> str:
    """What an editor makes of replacements."""
    lines = source.splitlines(keepends=True)
    for c in reversed(changes):
        region = c["deletedRegion"]
        assert (region["startColumn"], region["endColumn"]) == (1, 1)
        lines[region["startLine"] - 1 : region["endLine"] - 1] = [c["insertedContent"]["text"]]
    return "".join(lines)


@pytest.mark.parametrize(
    ("safe", "status"), [(False, EditStatus.SHOWN), (True, EditStatus.APPLIED), (True, EditStatus.REJECTED)]
)
def test_no_other_edit_is(safe: bool, status: EditStatus) -> None:
    assert "fixes" not in result(shared.mended(safe=safe, status=status), "PA201")


@pytest.mark.parametrize(
    ("diff", "expected"),
    [
        ("", ()),
        ("--- a\n+++ b\n@@ -3 +3 @@\n-x\n+y\n", (Replacement(3, 1, "y\n"),)),
        ("--- a\n+++ b\n@@ -3,2 +3 @@\n-x\n z\n", (Replacement(3, 1, ""),)),
        ("--- a\n+++ b\n@@ -0,0 +1,2 @@\n+x\n+y\n", (Replacement(1, 0, "x\ny\n"),)),
        (
            "--- a\n+++ b\n@@ -3,3 +3,4 @@\n+new\n x\n-y\n+Y\n z\n",
            (Replacement(3, 0, "new\n"), Replacement(4, 1, "Y\n")),
        ),
        ("--- a\n+++ b\n@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+y\n", ()),
        ("--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n--- c\n+++ d\n@@ -1 +1 @@\n-x\n+y\n", ()),
    ],
    ids=["none", "one line", "deletion", "new file", "two changes", "no newline", "two files"],
)
def test_diffs(diff: str, expected: tuple[Replacement, ...]) -> None:
    assert replacements(diff) == expected


# --------------------------------------------------------------------------- marks


@pytest.mark.parametrize(("by", "kind"), [(Means.COMMENT, "inSource"), (Means.CONFIG, "external")])
def test_what_is_suppressed_says_so(by: Means, kind: str) -> None:
    (mark,) = result(shared.suppressed(by), "PA201")["suppressions"]
    assert mark == {"kind": kind, "justification": "known, see <T-12> (until 2027-01-31)"}


def test_an_incomplete_audit_is_no_success() -> None:
    (invocation,) = run_of(shared.incomplete())["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 3)
    (invocation,) = run_of(m.mixed_report())["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (True, 1)


def test_two_jobs_are_two_analyses() -> None:
    assert run_of(m.stock_report())["automationDetails"]["id"] == "placement-audit/configs/fsdp_tp.toml/"


def test_hostile_text_stays_text() -> None:
    r = next(r for r in run_of(hostile_report())["results"] if r["ruleId"] == "PA201")
    (location,) = r["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "my%20model/no%25rm%2C1%3A2.py"
    assert location["physicalLocation"]["region"]["snippet"]["text"] == CODE
    assert location["logicalLocations"][0]["fullyQualifiedName"] == f"layers.1.{NAME}.weight"


def test_whole() -> None:
    text = render(shared.mended(), "sarif")
    run = json.loads(text)["runs"][0]
    run["tool"]["driver"]["rules"] = ["..."]
    run["results"] = [next(r for r in run["results"] if r["ruleId"] == "PA201")]
    for r in run["results"]:
        r["ruleIndex"] = "..."
    assert_snapshot("mended.sarif", json.dumps(run, indent=1) + "\n")

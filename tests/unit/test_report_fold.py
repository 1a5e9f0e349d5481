"""Like parameters fold into rows, findings with one cause into blocks, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import make_report as m
import pytest

from placement_audit.report import fold
from placement_audit.report.names import PARAM, group_names, pattern
from placement_audit.tracing import Phase
from placement_audit.verdicts import Report, Severity, Verdict

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.3.ffn_norm.weight", "layers.*.ffn_norm.weight"),
        ("layers.3.moe.experts.12.w1", "layers.*.moe.experts.*.w1"),
        ("norm.weight", "norm.weight"),
        ("0.weight", "*.weight"),
        ("layers.3a.weight", "layers.3a.weight"),
        ("", ""),
    ],
)
def test_pattern(name: str, expected: str) -> None:
    assert pattern(name) == expected


def layers(*numbers: int) -> list[str]:
    return [f"layers.{i}.w" for i in numbers]


@pytest.mark.parametrize(
    ("names", "universe", "expected"),
    [
        (layers(0, 1, 2), layers(0, 1, 2), ["layers.*.w (3)"]),
        (layers(2), layers(0, 1, 2), ["layers.2.w"]),
        (layers(0), layers(0), ["layers.0.w"]),
        (layers(0, 1, 3), layers(0, 1, 2, 3), ["layers.{0-1,3}.w (3)"]),
        (layers(10, 2), layers(0, 2, 10), ["layers.{2,10}.w (2)"]),
        (["a.0.b.5.w", "a.1.b.5.w"], ["a.0.b.5.w", "a.1.b.5.w", "a.0.b.6.w"], ["a.{0-1}.b.5.w (2)"]),
        # not all combinations of 0-1 and 5-6: braces would say more than is true
        (["a.0.b.5.w", "a.1.b.6.w"], ["a.0.b.5.w", "a.1.b.6.w", "a.0.b.6.w"], ["a.*.b.*.w (2)"]),
        (layers(*range(0, 40, 2)), layers(*range(40)), ["layers.*.w (20)"]),
        (["b.w", *layers(1, 0), "a.w"], ["a.w", "b.w", *layers(0, 1)], ["b.w", "layers.*.w (2)", "a.w"]),
        ([], layers(0), []),
        (["x", "x"], ["x"], ["x"]),
    ],
)
def test_group_names(names: list[str], universe: list[str], expected: list[str]) -> None:
    assert [str(g) for g in group_names(names, universe)] == expected


def rows(report: Report) -> dict[str, tuple[int, str]]:
    return {r.group.name: (len(r.group.fqns), str(r.worst)) for r in fold.fold_rows(report)}


def test_rows_of_a_stock_model() -> None:
    found = fold.fold_rows(m.stock_report(layers=126))
    assert len(found) == 12
    assert sum(len(r.group.fqns) for r in found) == 1137
    assert [r.group.name for r in found][:2] == ["tok_embeddings.weight", "layers.*.attention.wq.weight"]


def test_rows_split_where_verdicts_differ() -> None:
    found = rows(m.mixed_report())
    assert found["layers.{0,2}.attention_norm.weight"] == (2, "ok")
    assert found["layers.1.attention_norm.weight"] == (1, "lost reduction")
    assert found["layers.*.ffn_norm.weight"] == (3, "double reduction")
    assert found["norm.weight"] == (1, "deferred")
    assert found["rope.scale"] == (1, "not judged")


@pytest.mark.parametrize(
    "change",
    [
        {"factor": Fraction(2)},
        {"observed": m.PARTIAL},
        {"expected": m.shard(1)},
        {"placement": None},
        {"verdict": Verdict.NOT_JUDGED},
    ],
    ids=lambda c: next(iter(c)),
)
def test_rows_split_where_one_parameter_differs(change: dict[str, object]) -> None:
    report = m.stock_report(layers=3)
    at = next(i for i, j in enumerate(report.judgements) if j.param_fqn == "layers.1.ffn_norm.weight")
    judgements = list(report.judgements)
    judgements[at] = replace(judgements[at], **change)
    found = rows(replace(report, judgements=tuple(judgements)))
    assert {"layers.{0,2}.ffn_norm.weight", "layers.1.ffn_norm.weight"} <= set(found)


def test_rows_do_not_fold_a_missing_gradient() -> None:
    report = m.stock_report(layers=3)
    params = tuple(
        replace(p, grad=None) if p.fqn == "layers.0.ffn_norm.weight" else p for p in report.trace.params
    )
    found = rows(replace(report, trace=replace(report.trace, params=params)))
    assert "layers.{1-2}.ffn_norm.weight" in found


def test_thirteen_findings_are_one_block_at_one_place() -> None:
    report = m.one_sided_report()
    (block,) = fold.fold_findings(report)
    assert block.count == 13
    assert [str(g) for g in block.groups] == [
        "layers.*.attention_norm.weight (6)",
        "layers.*.ffn_norm.weight (6)",
        "norm.weight",
    ]
    assert block.factor == 2
    assert block.message == f"The gradient of {PARAM} is summed over tp twice."
    assert len(block.evidence) == 1
    assert fold.places(report.findings) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"mesh_dim": "fsdp"},
        {"rule_id": "PA203"},
        {"severity": Severity.WARNING},
        {"path": ()},
        {"expected": "something else"},
        {"observed": "something else"},
        {"next_step": "something else"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_blocks_split_where_one_finding_differs(change: dict[str, object]) -> None:
    # without judgements, so that no differing factor splits them
    report = replace(m.one_sided_report(layers=2), judgements=())
    first, *rest = report.findings
    found = fold.fold_findings(replace(report, findings=(replace(first, **change), *rest)))
    assert sorted(b.count for b in found) == [1, 4]


def test_blocks_split_where_factors_differ() -> None:
    report = m.one_sided_report(layers=2)
    first = report.findings[0].param_fqn
    judgements = tuple(
        replace(j, factor=Fraction(4)) if (j.param_fqn, j.mesh_dim) == (first, "tp") else j
        for j in report.judgements
    )
    found = fold.fold_findings(replace(report, judgements=judgements))
    assert sorted((b.factor, b.count) for b in found) == [(2, 4), (4, 1)]


def test_blocks_keep_together_what_names_its_own_parameter() -> None:
    report = m.one_sided_report(layers=2)
    findings = tuple(replace(f, next_step=f"explain {f.param_fqn}") for f in report.findings)
    (block,) = fold.fold_findings(replace(report, findings=findings))
    assert block.count == 5


def test_blocks_keep_together_where_roles_carry_numbers() -> None:
    report = m.one_sided_report(layers=2)
    findings = tuple(
        replace(f, path=tuple(replace(s, role=f"{s.role}, {i} elements") for s in f.path))
        for i, f in enumerate(report.findings)
    )
    (block,) = fold.fold_findings(replace(report, findings=findings))
    assert block.count == 5


def test_block_without_a_shared_message_has_none() -> None:
    report = m.one_sided_report(layers=2)
    first, *rest = report.findings
    findings = (replace(first, message="Something else."), *rest)
    (block,) = fold.fold_findings(replace(report, findings=findings))
    assert block.message is None


def test_places_are_lines_of_causes() -> None:
    report = m.mixed_report()
    assert fold.places(report.findings) == 2
    assert fold.places([replace(f, path=()) for f in report.findings]) == 0
    first, second = report.findings[1:3]
    below = replace(first.path[0], call_site=replace(first.path[0].call_site, line=190))
    assert fold.places([first, second]) == 1
    assert fold.places([first, replace(second, path=(below,))]) == 2


def test_remarks_join_mesh_dims_of_one_reason() -> None:
    (remark,) = fold.fold_remarks(m.mixed_report(), Verdict.NOT_JUDGED)
    assert (remark.mesh_dims, remark.count, str(remark.groups[0])) == (("fsdp", "tp"), 1, "rope.scale")


def test_remarks_carry_the_shared_label() -> None:
    (remark,) = fold.fold_remarks(m.two_sided_report(), Verdict.DEFERRED)
    assert (str(remark.label), remark.count) == ("Partial(sum)", 5)


def test_relabelled_are_ok_with_another_label() -> None:
    report = m.stock_report(layers=1)
    judgements = tuple(
        replace(j, observed=m.REPLICATE)
        if (j.param_fqn, j.mesh_dim) == ("tok_embeddings.weight", "tp")
        else j
        for j in report.judgements
    )
    (remark,) = fold.fold_relabelled(replace(report, judgements=judgements))
    assert (str(remark.groups[0]), remark.mesh_dims) == ("tok_embeddings.weight", ("tp",))
    assert fold.fold_relabelled(report) == ()


def test_counts() -> None:
    report = m.mixed_report()
    assert fold.verdict_count(report) == {
        Verdict.LOST_REDUCTION: 1,
        Verdict.DOUBLE_REDUCTION: 3,
        Verdict.NOT_JUDGED: 2,
        Verdict.DEFERRED: 1,
        Verdict.OK: 55,
    }
    assert fold.finding_count(report) == {Severity.ERROR: 4, Severity.WARNING: 0, Severity.NOTE: 0}
    assert fold.boundary_count(report.trace) == {"to_local": 61, "from_local": 60, "redistribute": 33}
    assert fold.collective_count(report.trace, Phase.BACKWARD) == {
        "reduce_scatter(sum) over fsdp in float32": 30,
        "all_reduce(sum) over tp in float32": 6,
    }
    assert fold.collective_count(report.trace, Phase.RECOMPUTE) == {}


def test_collective_of_a_foreign_group_is_named_by_its_ranks() -> None:
    trace = m.stock_report(layers=1).trace
    odd = replace(trace.collectives[0], mesh_dims=(), group_ranks=(0, 3))
    trace = replace(trace, collectives=(odd,))
    assert fold.collective_count(trace, Phase.FORWARD) == {"all_gather over a group of 2 ranks in float32": 1}


def test_every_verdict_has_its_place_among_the_worst() -> None:
    assert sorted(fold.WORST_FIRST) == sorted(Verdict)

"""Findings that only numbers give: PA207, PA208, PA402, and PA901 where they contradict the trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from placement_audit.measurement import Measurement
from placement_audit.rules.finding import make_finding
from placement_audit.tracing import Trace
from placement_audit.verdicts import GOOD, Evidence, Finding, Judgement, PathStep, Verdict
from placement_audit.weigh import Contradiction, right


def measured_findings(
    trace: Trace,
    judgements: Sequence[Judgement],
    m: Measurement,
    contradictions: Sequence[Contradiction],
    drifts: Sequence[Finding] = (),
) -> Iterator[Finding]:
    """All findings that come from a measurement alone, and those of ``drifts`` that it does not prove.

    Args:
        trace: of the step.
        judgements: on it.
        m: measured.
        contradictions: between the two.
        drifts: replicas that a trace sees updated apart. One step shows the difference only where it is large
            enough: that a measurement does not see one refutes nothing.
    """
    yield from _wrong_loss(m)
    yield from _wrong_normalisation(trace, judgements, m)
    wrong = list(_wrong_updates(judgements, m, {d.param_fqn: d for d in reversed(drifts)}))
    yield from wrong
    yield from (d for d in drifts if d.param_fqn not in {w.param_fqn for w in wrong})
    yield from _contradictions(trace, contradictions)


def _wrong_loss(m: Measurement) -> Iterator[Finding]:
    if m.loss_error <= m.tolerance:
        return
    yield make_finding(
        "PA208",
        param_fqn=None,
        module_fqn="",
        mesh_dim="",
        message=f"the loss is {m.loss:.6g} on {m.ranks} ranks and {m.reference_loss:.6g} on one device",
        expected=f"{m.reference_loss:.6g}, within {m.tolerance:.0e}",
        observed=f"{m.loss:.6g}, relative error {m.loss_error:.2g}",
        evidence=(
            Evidence(strength="measured", statement=f"{m.ranks} {m.backend} ranks, {m.dtype}, seed {m.seed}"),
        ),
        path=(),
        next_step="mend the forward first: a wrong forward makes every gradient wrong",
    )


def _wrong_normalisation(trace: Trace, judgements: Sequence[Judgement], m: Measurement) -> Iterator[Finding]:
    if any(j.verdict is Verdict.LOST_REDUCTION and j.mesh_dim in trace.batch_dims for j in judgements):
        return  # what was not summed has neither sum nor average
    if m.expected_scale is None or m.grad_scale == m.expected_scale:
        return
    wrong = {j.param_fqn for j in judgements if j.verdict not in (*GOOD, Verdict.NOT_JUDGED)}
    if all(p.fqn in wrong or not right(p, m.allowed(p)) for p in m.params):
        return  # what has the factor has it for a reason of its own
    off = m.grad_scale / m.expected_scale
    yield make_finding(
        "PA209",
        param_fqn=None,
        module_fqn="",
        mesh_dim=" x ".join(trace.batch_dims),
        message=f"every gradient is {off} times what the job's loss calls for",
        expected="the sum of the data-parallel ranks' parts" if m.expected_scale == 1 else "their average",
        observed="their average" if m.grad_scale < 1 else "their sum",
        evidence=(
            Evidence(
                strength="measured",
                statement=f"common factor {m.grad_scale} over the gradient of the sum of the ranks' losses, "
                f"{m.expected_scale} is due; {m.ranks} {m.backend} ranks",
            ),
        ),
        path=(),
        next_step="sum where the loss is divided by the global number of tokens, average where by each rank's own",
    )


def _wrong_updates(
    judgements: Sequence[Judgement], m: Measurement, drifts: Mapping[str | None, Finding]
) -> Iterator[Finding]:
    """Right gradients that a reader spoiled; what a trace knows of it is told with it."""
    if any(j.verdict not in GOOD for j in judgements):
        return  # clipping mixes all gradients: one wrong gradient makes every update wrong
    deferred = {j.param_fqn: j.mesh_dim for j in judgements if j.verdict is Verdict.DEFERRED}
    for p in m.params:
        for what, error, tolerance in (
            ("the job's own optimizer", p.step_error, m.step_tolerance * m.allowed(p) / m.tolerance),
            ("plain SGD", p.sgd_error, m.allowed(p)),
        ):
            if error is None or error <= tolerance:
                continue
            readers = [r for r in m.readers if p.fqn in r.params]
            readers.sort(key=lambda r: r.whole)
            drift = drifts.get(p.fqn)
            yield make_finding(
                "PA402",
                param_fqn=p.fqn,
                module_fqn=p.fqn.rpartition(".")[0],
                mesh_dim=deferred.get(p.fqn, "") if drift is None else drift.mesh_dim,
                message=f"the gradient is right; the parameter is not after clipping and one step of {what}",
                expected=f"one device's parameter, within {tolerance:.0e}",
                observed=f"relative error {error:.2g}",
                evidence=(
                    Evidence(strength="measured", statement=f"{m.ranks} {m.backend} ranks, {m.dtype}"),
                    *(() if drift is None else (Evidence(strength="traced", statement=drift.message),)),
                ),
                path=(drift.path if drift is not None and not readers else ())
                + tuple(
                    PathStep(
                        role="reads one rank's term of it"
                        if not r.whole
                        else f"reads it through {r.through}",
                        kind=r.through,
                        call_site=r.user_site if r.user_site.line else r.call_site,
                        boundary=-1,
                    )
                    for r in readers
                ),
                next_step="a reader takes the local part of an incomplete gradient; give it the full one"
                if drift is None
                else drift.next_step,
            )
            break


def _contradictions(trace: Trace, contradictions: Sequence[Contradiction]) -> Iterator[Finding]:
    for c in contradictions:
        b = trace.boundaries[c.boundary] if c.boundary is not None else None
        path = (
            ()
            if b is None
            else (PathStep(role="cause", kind=b.kind, call_site=b.call_site, boundary=b.index),)
        )
        yield make_finding(
            "PA901",
            param_fqn=c.param_fqn,
            module_fqn=b.module_fqn if b is not None else "",
            mesh_dim=c.mesh_dim,
            message="traced and measured evidence contradict each other: a fault of placement-audit",
            expected=f"traced: {c.traced}",
            observed=f"measured: {c.measured}",
            evidence=(
                Evidence(strength="traced", statement=c.traced),
                Evidence(strength="measured", statement=c.measured),
            ),
            path=path,
            next_step="please report it with the JSON report (--format json); trust the measured verdict",
        )

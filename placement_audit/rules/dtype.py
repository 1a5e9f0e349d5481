"""PA5xx: the dtype that gradients are reduced in."""

from __future__ import annotations

from collections.abc import Iterator

from placement_audit.rules.finding import make_finding
from placement_audit.tracing import Phase, Trace
from placement_audit.verdicts import Evidence, Finding, PathStep


def dtype_findings(trace: Trace) -> Iterator[Finding]:
    """PA501: a parameter's gradient reduced in another dtype than the job asks for."""
    wanted = trace.reduce_dtype
    if wanted is None:
        return
    owner = {i: p.fqn for p in trace.params for i in p.boundaries}
    for c in trace.collectives:
        if c.phase is not Phase.BACKWARD or c.boundary not in owner or c.dtype == wanted:
            continue
        if c.name not in ("all_reduce", "reduce_scatter") or c.reduce_op not in ("sum", "avg"):
            continue
        b = trace.boundaries[c.boundary]
        fqn = owner[c.boundary]
        yield make_finding(
            "PA501",
            param_fqn=fqn,
            module_fqn=b.module_fqn,
            mesh_dim=" x ".join(c.mesh_dims),
            message=f"the gradient is reduced over {' x '.join(c.mesh_dims)} in {c.dtype}, not in {wanted}",
            expected=f"{wanted}, the job's reduce dtype",
            observed=f"{c.name}({c.reduce_op}) of {c.numel} elements in {c.dtype}",
            evidence=(
                Evidence(
                    strength="measured" if "measured" in trace.run.evidence else "traced",
                    statement=f"{c.name} in the backward of {b.kind}, {c.numel} elements",
                ),
            ),
            path=(PathStep(role="cause", kind=b.kind, call_site=b.call_site, boundary=b.index),),
            next_step="reduce after the data-parallel reduce-scatter, whose dtype the job's policy names",
        )

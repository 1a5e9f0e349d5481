"""PA106: what a backward begins at."""

from __future__ import annotations

from collections.abc import Iterator

from placement_audit.model import StateKind
from placement_audit.rules.finding import make_finding
from placement_audit.tracing import Trace
from placement_audit.verdicts import Evidence, Finding, PathStep, Severity


def loss_findings(trace: Trace) -> Iterator[Finding]:
    """A loss that each rank has its own of, along a mesh dim that the batch is not spread over."""
    for loss in trace.losses:
        for name, state in zip(trace.mesh.dim_names, loss.state, strict=True):
            if name in trace.batch_dims or state.kind is not StateKind.VARYING:
                continue
            size = trace.mesh.size(name)
            shard = dict(loss.unsummed).get(name)
            reaches = (
                "" if shard is None else f"; {shard}, sharded on it, reaches the loss with no sum between"
            )
            yield make_finding(
                "PA106",
                param_fqn=None,
                module_fqn="",
                mesh_dim=name,
                message=f'backward begins at a loss of which each of the {size} "{name}" ranks has its own',
                expected=f'a loss equal on the "{name}" ranks, or gradients that are summed over them after',
                observed=f'what goes into it varies along "{name}", and no collective over it came since',
                evidence=(
                    Evidence(
                        strength="traced",
                        statement=f"gradients are then those of the sum of the {size} losses; "
                        f'the batch is not said to vary along "{name}"{reaches}',
                    ),
                ),
                path=(PathStep(role="cause", kind="backward", call_site=loss.call_site, boundary=-1),),
                next_step=f'reduce the loss over "{name}" first; or, where each rank has tokens of its own, '
                f'say that the batch varies along "{name}"',
                # Tokens of its own for each rank are fine; a term that was never summed is hardly meant.
                severity=None if shard is None else Severity.WARNING,
            )

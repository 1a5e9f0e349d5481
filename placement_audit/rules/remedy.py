"""What a boundary call should say, from what really arrived at it: the label that is true there.

One call may serve many tensors. It gets a remedy only where one argument is right for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from placement_audit.model import REPLICATE, CallSite, Placement, PlacementKind, StateKind
from placement_audit.states import belies
from placement_audit.tracing import Boundary, Trace
from placement_audit.verdicts import GOOD, Finding, Judgement, Remedy

_MENDABLE = ("PA101", "PA104", "PA201", "PA202", "PA203", "PA204")
"""Rules whose cause may be a label."""

_ARGUMENT = {
    "to_local": "grad_placements",
    "full_tensor": "grad_placements",
    "from_local": "grad_placements",
    "local_map": "in_grad_placements",
}

Row = tuple[Placement, ...]


def with_remedies(
    trace: Trace, findings: Iterable[Finding], judgements: Sequence[Judgement], *, measured: bool
) -> tuple[Finding, ...]:
    """The findings, each with the remedy of its cause where it has one.

    Args:
        trace: what was judged.
        findings: of it.
        judgements: of it.
        measured: whether real ranks had their say in the judgements.
    """
    found = tuple(findings)
    sites = _Sites(trace, found)
    all_right = measured and all(j.verdict in GOOD for j in judgements)
    out = []
    for f in found:
        index = f.path[0].boundary if f.path else -1
        remedy = None
        if index >= 0 and f.rule_id in _MENDABLE:
            remedy = sites.remedy(trace.boundaries[index], f.mesh_dim)
        elif index >= 0 and f.rule_id == "PA103" and not all_right:
            remedy = sites.whole_value(trace.boundaries[index], f.mesh_dim)
        out.append(f if remedy is None else replace(f, remedy=remedy))
    return tuple(out)


class _Sites:
    """The boundaries of a trace by the call that made them."""

    def __init__(self, trace: Trace, findings: Sequence[Finding]) -> None:
        self._trace = trace
        self._dims = {name: i for i, name in enumerate(trace.mesh.dim_names)}
        self._at: dict[tuple[CallSite, str], list[Boundary]] = {}
        for b in trace.boundaries:
            self._at.setdefault((b.call_site, b.kind), []).append(b)
        self._cancelled = {f.path[0].call_site for f in findings if f.rule_id == "PA101" and f.path}
        self._made: dict[tuple[CallSite, str], Remedy | None] = {}

    def remedy(self, cause: Boundary, mesh_dim: str) -> Remedy | None:
        """What the call that made ``cause`` should say; None where its label is not at fault."""
        if cause.kind not in _ARGUMENT:
            return None
        key = (cause.call_site, cause.kind)
        if key not in self._made:
            self._made[key] = self._remedy(cause)
        made = self._made[key]
        if made is None or not made.safe:
            return made
        dim = self._dims.get(mesh_dim)
        if dim is not None and cause.grad is not None and cause.grad.arrived_state[dim].blame:
            return replace(
                made, safe=False, why="another call has spoiled what arrives here: mend that first"
            )
        return made

    def whole_value(self, cause: Boundary, mesh_dim: str) -> Remedy | None:
        """`from_local` of a value that is equal on all ranks, as Partial: declared whole in its stead."""
        rows = {self._declared_whole(b, mesh_dim) for b in self._at[cause.call_site, cause.kind]}
        row = rows.pop() if len(rows) == 1 else None
        if row is None or cause.kind != "from_local":
            return None
        return Remedy(
            call_site=cause.call_site,
            kind=cause.kind,
            argument="placements",
            placements=(row,),
            safe=False,
            why="right only if the value is whole on every rank, not divided before: values decide",
        )

    # ---- labels of gradients

    def _remedy(self, cause: Boundary) -> Remedy | None:
        kind = cause.kind
        served = [b for b in self._at[cause.call_site, kind] if b.grad is not None]
        rows: list[tuple[Row, ...] | str]
        now: list[tuple[Row, ...] | None]
        if kind == "local_map":
            calls = self._mapped_calls(cause.call_site)
            rows = [self._right_rows(call) for call in calls]
            now = [None if all(b.grad_declared is None for b in c) else self._declared_rows(c) for c in calls]
        else:
            rows = [self._right_rows((b,)) for b in served]
            now = [None if b.grad_declared is None else self._declared_rows((b,)) for b in served]
        if not rows:
            return None
        if cause.src is None and all(n is None for n in now):
            return None  # from_local as torch has it: it is right whatever the value is
        if all(row == said for row, said in zip(rows, now, strict=True)):
            return None
        unknown = next((row for row in rows if isinstance(row, str)), None)
        different = list(dict.fromkeys(row for row in rows if not isinstance(row, str)))
        if unknown is not None:
            right, why = (), unknown
        elif len(different) > 1:
            right, why = (), _disagreement(rows, different)
        elif kind != "local_map" and not self._fits_idle(cause, different[0][0]):
            right, why = (), _MISFIT
        else:
            right, why = different[0], ""
        if right and any(p.kind is PlacementKind.STRIDED_SHARD for row in right for p in row):
            right, why = (), "it would name a strided shard, which torch has no public name for"
        safe = bool(right)
        if safe and cause.call_site in self._cancelled:
            safe, why = False, "another label makes up for this one: right only if that one changes too"
        return Remedy(
            call_site=cause.call_site,
            kind=kind,
            argument=_ARGUMENT[kind],
            placements=right,
            safe=safe,
            why=why or self._why(served, right),
        )

    def _fits_idle(self, cause: Boundary, row: Row) -> bool:
        """Whether a label can stand at the tensors of a call, too, that no gradient came back to."""
        for b in self._at[cause.call_site, cause.kind]:
            own = [p for _, p in self._own(b)] if b.grad is None else []
            if own and (
                len(own) != len(row) or any(p.is_shard and p != r for p, r in zip(own, row, strict=True))
            ):
                return False
        return True

    def _why(self, served: Sequence[Boundary], right: tuple[Row, ...]) -> str:
        labels = ", ".join(str(p) for row in right for p in row)
        times = "the gradient" if len(served) == 1 else f"all {len(served)} gradients"
        return f"{labels} is what {times} that came to this call really had; it holds for this job's mesh and plan"

    def _right_rows(self, call: Sequence[Boundary]) -> tuple[Row, ...] | str:
        rows = []
        for b in call:
            row = self._right(b)
            if isinstance(row, str):
                return row
            rows.append(row)
        return tuple(rows)

    def _declared_rows(self, call: Sequence[Boundary]) -> tuple[Row, ...]:
        return tuple(
            tuple(self._declared(b, spans, forward) for spans, forward in self._own(b)) for b in call
        )

    @staticmethod
    def _declared(b: Boundary, spans: tuple[str, ...], forward: Placement) -> Placement:
        declared = b.grad_declared.on(spans[0]) if spans and b.grad_declared is not None else None
        return declared or forward

    def _right(self, b: Boundary) -> Row | str:
        """The true label, mesh dim by mesh dim of the tensor's own mesh; a sentence where none is."""
        row = []
        for spans, forward in self._own(b):
            labels = {self._right_on(b, name, forward) for name in spans} or {forward}
            if len(labels) > 1:
                return f"what arrives over {' and '.join(spans)} differs, and they are one dim of this mesh"
            label = labels.pop()
            if isinstance(label, str):
                return label
            row.append(label)
        return tuple(row)

    def _right_on(self, b: Boundary, name: str, forward: Placement) -> Placement | str:
        if b.src is None:  # from_local: its label says how the gradient is handed to the value
            declared = b.grad_declared.on(name) if b.grad_declared is not None else None
            return REPLICATE if forward.is_partial or declared is None else declared
        if b.kind == "full_tensor":
            forward = REPLICATE
        dim = self._dims.get(name)
        if forward.is_shard or b.grad is None:  # an input of local_map that no gradient came back to
            return forward
        if b.grad.left is None or dim is None:
            return f'what arrives over "{name}" is not known'
        state = b.grad.arrived_state[dim]
        now = b.grad.left.on(name)
        if state.kind is StateKind.AMBIGUOUS and forward.is_partial:
            return REPLICATE
        if state.kind in (StateKind.AMBIGUOUS, StateKind.MIXED, StateKind.LOST):
            return _NO_LABEL[state.kind].format(name)
        if state.scale is None:
            return f'parts of different scale arrive over "{name}": no label makes up for that'
        if now is not None and not now.is_shard and not belies(now, state):
            return now
        if state.kind is StateKind.VARYING:
            return self._partial(name)
        return REPLICATE

    def _partial(self, name: str) -> Placement:
        """A sum; over the batch's mesh dims what the job's other labels say, an average perhaps."""
        ops = {
            p.reduce_op
            for b in self._trace.boundaries
            if b.grad_declared is not None
            and (p := b.grad_declared.on(name)) is not None
            and p.is_partial
            and name in self._trace.batch_dims
        }
        return Placement(PlacementKind.PARTIAL, reduce_op=ops.pop() if len(ops) == 1 else "sum")

    # ---- tensors and their calls

    @staticmethod
    def _own(b: Boundary) -> list[tuple[tuple[str, ...], Placement]]:
        """(world mesh dims spanned, forward placement) for each dim of the DTensor's own mesh."""
        if b.own_dims:
            return [(d.spans, d.placement) for d in b.own_dims]
        side = b.src if b.src is not None else b.dst
        return [] if side is None else [((d,), p) for d, p in zip(side.dims, side.placements, strict=True)]

    def _declared_whole(self, b: Boundary, mesh_dim: str) -> Row | None:
        own = self._own(b)
        if not any(spans == (mesh_dim,) and p.is_partial for spans, p in own):
            return None
        return tuple(REPLICATE if spans == (mesh_dim,) else p for spans, p in own)

    def _mapped_calls(self, site: CallSite) -> list[list[Boundary]]:
        """The inputs of each call of a mapped function, in their order: its outputs part one from the next."""
        calls: list[list[Boundary]] = []
        begun = False
        for b in self._at[site, "local_map"]:
            if b.src is None or b.dst is not None:
                begun = begun and b.src is not None  # an output ends a call; a redistributed input does not
                continue
            if not begun:
                calls.append([])
                begun = True
            calls[-1].append(b)
        return [call for call in calls if any(b.grad is not None for b in call)]


_MISFIT = (
    "this call serves tensors of other placements too, which no gradient came back to: "
    "no constant is right for all"
)

_NO_LABEL = {
    StateKind.AMBIGUOUS: 'whether what arrives over "{}" is complete is for values to decide',
    StateKind.MIXED: 'a complete part and a per-rank part arrive over "{}" in one: no label is right for both',
    StateKind.LOST: 'terms of what arrives over "{}" are gone already: no label brings them back',
}


def _disagreement(rows: Sequence[tuple[Row, ...] | str], different: Sequence[tuple[Row, ...]]) -> str:
    said = [
        f"{sum(r == one for r in rows)} need " + "; ".join(f"[{', '.join(map(str, row))}]" for row in one)
        for one in different
    ]
    return (
        f"this call serves {len(rows)} tensors whose gradients need different placements "
        f"({', '.join(said[:3])}): no constant is right for all"
    )

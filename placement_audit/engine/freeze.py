"""Freezes what the watchers noted of a step into a `Trace`: plain data, no torch object left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from placement_audit.case import Case
from placement_audit.dtensor_api import dtype_name, local_of
from placement_audit.engine import callsite
from placement_audit.engine.collectives import CollectiveCall
from placement_audit.engine.crossings import RawBoundary, RawCrossing
from placement_audit.engine.doubts import RawDoubt
from placement_audit.engine.flow import PHASES, Flow
from placement_audit.engine.grads import Grads
from placement_audit.engine.updates import Updates
from placement_audit.model import Layout, TensorInfo
from placement_audit.tracing import (
    Boundary,
    Collective,
    GradCrossing,
    GradRecord,
    LossRecord,
    OpCount,
    ParamRecord,
    ParamUse,
    Phase,
    RunRecord,
    Share,
    Trace,
    UpdateRecord,
    ValueDoubt,
)


@dataclass(slots=True)
class RawCollective:
    """A collective while the step runs."""

    call: CollectiveCall
    dims: tuple[int, ...] | None
    phase: Phase
    boundary: int | None
    module_fqn: str
    dtype: str
    numel: int
    equal: tuple[int, ...]
    site: callsite.RawSite | None


@dataclass(slots=True)
class RawUse:
    """A parameter's use while the step runs."""

    op: str
    module_fqn: str
    layout: Layout | None
    result: Layout | None
    site: callsite.RawSite | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Freezer:
    """The notes of one step.

    Attributes:
        case: what ran.
        flow: states, ops and the world mesh.
        params: (FQN, parameter), in the model's order.
        boundaries: in call order.
        collectives: in order.
        uses: FQN -> where it met the activations.
        grads: the parameters' gradients, and where backwards began.
        updates: what became of the parameters after.
    """

    case: Case
    flow: Flow
    params: list[tuple[str, nn.Parameter]]
    boundaries: list[RawBoundary]
    collectives: list[RawCollective]
    uses: dict[str, list[RawUse]]
    grads: Grads
    updates: Updates
    _sites: callsite.SiteTable = field(default_factory=callsite.SiteTable)

    def trace(self, run: RunRecord) -> Trace:
        """All of it."""
        sites = self._sites
        raw_boundaries = self.boundaries
        of_param: dict[str, list[int]] = {}
        for b in raw_boundaries:
            if b.param_fqn is not None and b.phase is not Phase.RECOMPUTE:
                of_param.setdefault(b.param_fqn, []).append(b.index)
        return Trace(
            run=replace(run, notes=(*run.notes, *self._untold(), *self.updates.notes)),
            mesh=self.flow.world.spec(self.case.device_type),
            batch_dims=self.flow.world.within(self.case.batch_dims),
            params=tuple(self._param(fqn, p, of_param, sites) for fqn, p in self.params),
            boundaries=tuple(self._boundary(b, sites) for b in raw_boundaries),
            collectives=tuple(self._frozen_collective(i, c, sites) for i, c in enumerate(self.collectives)),
            ops=self._ops(),
            assumed_invariant=self.flow.ledger.assumed,
            random_ops=self.flow.random_ops,
            reduce_dtype=self.case.reduce_dtype,
            readers=self.updates.followed,
            losses=tuple(
                LossRecord(
                    state=self.flow.ledger.vector(sid),
                    call_site=sites.get(site),
                    unsummed=tuple((self.flow.world.dims[d], fqn) for d, fqn in unsummed.items()),
                )
                for (sid, site), unsummed in self.grads.losses.items()
            ),
            value_doubts=tuple(self._doubt(x, sites) for x in self.flow.carry.doubts.found),
            shares=tuple(
                Share(param_fqn=fqn, mesh_dim=self.flow.world.dims[d], value=n, grad=g)
                for fqn, d, n, g in self.flow.carry.doubts.shares
            ),
            unfollowed=tuple(
                (op, self.flow.world.dims[d], n)
                for (op, d), n in sorted(self.flow.carry.doubts.unfollowed.items())
            ),
        )

    def _doubt(self, x: RawDoubt, sites: callsite.SiteTable) -> ValueDoubt:
        return ValueDoubt(
            kind=x.kind,
            mesh_dim=self.flow.world.dims[x.dim],
            op=x.op,
            call_site=sites.get(x.site),
            summed_at=sites.get(x.summed) if x.summed is not None else None,
            carried=x.carried,
            declared=x.declared,
            counted=x.of,
            after_backward=x.after,
            module_fqn=x.module_fqn,
        )

    def _untold(self) -> list[str]:
        """What cannot be judged of groups that are a part of a mesh dim."""
        world = self.flow.world
        groups = dict.fromkeys(c.call.ranks for c in self.collectives if c.dims is None)
        return [
            f"Collectives ran over ranks {list(ranks)}, a part of mesh dim "
            f"{' and '.join(world.dims[i] for i in d)}: "
            "what they share is not told apart from what they do not. Declare parameters that are replicated over "
            f'a part of a mesh dim so, as on "{world.dims[d[0]]}[0,1]".'
            for ranks in groups
            if (d := tuple(world.parts_of_ranks(ranks)))
        ]

    def _param(
        self, fqn: str, p: nn.Parameter, of_param: dict[str, list[int]], sites: callsite.SiteTable
    ) -> ParamRecord:
        g = self.grads.of(p)
        grad = None
        own = self.flow.world.layout_of(p)
        declared = self.flow.world.declared(self.case.declared.get(fqn)) if own is None else None
        if g is not None:
            # A plain gradient is laid out like its plain parameter.
            grad = GradRecord(
                layout=g.layout or declared, state=self.flow.ledger.vector(g.sid), dtype=g.dtype
            )
        uses = tuple(
            ParamUse(
                op=u.op,
                module_fqn=u.module_fqn,
                layout=u.layout,
                result=u.result,
                call_site=sites.get(u.site),
            )
            for u in self.uses.get(fqn, ())
        )
        return ParamRecord(
            fqn=fqn,
            layout=own or declared,
            tensor=TensorInfo(
                global_shape=tuple(p.shape),
                local_shape=tuple(local_of(p).shape),
                dtype=dtype_name(p),
            ),
            requires_grad=p.requires_grad,
            grad=grad,
            boundaries=tuple(of_param.get(fqn, ())),
            uses=uses,
            update=self._update(p, sites),
        )

    def _update(self, p: nn.Parameter, sites: callsite.SiteTable) -> UpdateRecord | None:
        found, spoilt = self.updates.of(p), self.updates.spoilt(p)
        if found is None and spoilt is None:
            return None
        ledger = self.flow.ledger
        return UpdateRecord(
            state=None if found is None else ledger.vector(found.sid),
            call_site=None if found is None else sites.get(found.site),
            grad_state=None if spoilt is None else ledger.vector(spoilt[0]),
            grad_site=None if spoilt is None else sites.get(spoilt[1]),
        )

    def _boundary(self, b: RawBoundary, sites: callsite.SiteTable) -> Boundary:
        assert b.tensor is not None
        return Boundary(
            index=b.index,
            kind=b.kind,
            phase=b.phase,
            call_site=sites.get(b.site),
            user_site=sites.get(b.user_site),
            module_fqn=b.module_fqn,
            param_fqn=b.param_fqn,
            src=b.src,
            dst=b.dst,
            grad_declared=b.declared,
            value_state=self.flow.ledger.vector(b.value_sid),
            tensor=b.tensor,
            grad=self._crossing(b.grad) if b.grad is not None else None,
            own_dims=b.own_dims,
            name=b.name,
            divided=tuple(self.flow.world.dims[d] for d in b.divided),
        )

    def _crossing(self, c: RawCrossing) -> GradCrossing:
        return GradCrossing(
            order=c.order,
            arrived=c.arrived,
            arrived_state=self.flow.ledger.vector(c.arrived_sid),
            left=c.left,
            left_state=self.flow.ledger.vector(c.left_sid),
            tensor=c.tensor,
        )

    def _frozen_collective(self, order: int, c: RawCollective, sites: callsite.SiteTable) -> Collective:
        names = self.flow.world.dims
        return Collective(
            order=order,
            name=c.call.name,
            reduce_op=c.call.reduce_op,
            mesh_dims=tuple(names[d] for d in c.dims or ()),
            group_ranks=c.call.ranks if c.dims is None else (),
            phase=c.phase,
            boundary=c.boundary,
            op=None,
            module_fqn=c.module_fqn,
            dtype=c.dtype,
            numel=c.numel,
            already_equal=tuple(names[d] for d in c.equal),
            call_site=sites.get(c.site) if c.site is not None else None,
        )

    def _ops(self) -> tuple[OpCount, ...]:
        """Counts with the placements spelled out; ops that spell the same are one."""
        counts: dict[tuple[str, Phase, tuple[str, ...], tuple[str, ...]], int] = {}
        layouts = self.flow.layouts
        for (func, phase, ins, outs), n in self.flow.ops.items():
            key = (
                str(func),
                PHASES[phase],
                tuple(_short(layouts[i]) for i in ins),
                tuple(_short(layouts[i]) for i in outs),
            )
            counts[key] = counts.get(key, 0) + n
        return tuple(
            OpCount(op=op, phase=phase, inputs=ins, outputs=outs, count=n)
            for (op, phase, ins, outs), n in sorted(counts.items())
        )


def _short(layout: Layout) -> str:
    return " ".join(f"{d} {p.short()}" for d, p in zip(layout.dims, layout.placements, strict=True))

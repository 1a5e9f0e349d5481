"""Runs one step under the watchers and freezes what they saw into a `Trace`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from placement_audit.case import Case
from placement_audit.dtensor_api import (
    clean_fqn,
    dtype_name,
    in_backward,
    local_of,
    rank_map_of,
    relabelling,
    replaced_everywhere,
    spec_of,
    storage_key,
)
from placement_audit.engine import callsite
from placement_audit.engine.apart import Stream
from placement_audit.engine.collectives import CollectiveCall
from placement_audit.engine.flow import Flow
from placement_audit.engine.freeze import Freezer, RawCollective, RawUse
from placement_audit.engine.functions import Functions
from placement_audit.engine.grads import Grads
from placement_audit.engine.intercept import Interceptor
from placement_audit.engine.ledger import Ledger
from placement_audit.engine.reducer import Reducers
from placement_audit.engine.scaling import Scaling
from placement_audit.engine.updates import Updates
from placement_audit.engine.world import World
from placement_audit.fsdp_api import dividing_locally
from placement_audit.model import State, StateKind
from placement_audit.tracing import Phase, RunRecord, Trace

_VARYING = State(StateKind.VARYING)
_INVARIANT = State(StateKind.INVARIANT)
_USES_KEPT = 4


class Tracer:
    """One step's watchers and their notes."""

    def __init__(
        self,
        case: Case,
        on_progress: Callable[[str], None] | None = None,
        fingerprint: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        """Prepare; nothing is watched yet.

        Args:
            case: what to run.
            on_progress: called with a few words at each collective (for naming a hung rank).
            fingerprint: of a local tensor's values; see `Interceptor`.
        """
        self._case = case
        self._progress = on_progress
        self.world = World.of(case)
        self.ledger = Ledger(self.world.dims, keep_alive=case.device_type == "meta")
        self.flow = Flow(self.ledger, self.world, on_collective=self._collective, on_use=self._use)
        self._modules: list[str] = []
        self.interceptor = Interceptor(self.flow, self._module_fqn, fingerprint)
        self._collectives: list[RawCollective] = []
        self._uses: dict[str, list[RawUse]] = {}
        self._params: list[tuple[str, nn.Parameter]] = [
            (clean_fqn(n), p) for n, p in case.model.named_parameters(remove_duplicate=False)
        ]
        self.flow.carry.doubts.module_fqn = self._module_fqn
        self.flow.carry.doubts.batch = frozenset(
            d for d, m in enumerate(self.world.parents) if m in case.batch_dims
        )
        self.functions = Functions(self.interceptor)
        self.grads = Grads(self.interceptor, self._params, case.batch_dims, case.model)
        self.updates = Updates(self.flow, self._params, self.grads)
        self._reducers = Reducers(self.flow)
        self.flow.traffic.on_reduced = self._reduced
        self.flow.on_written = self._written
        self._scaling = Scaling(self.interceptor, case.batch_dims)
        self.flow.on_scaled = self._scaling.scaled

    @property
    def stream(self) -> Stream | None:
        """The plain ops that ran, where they are wanted."""
        return self.flow.stream

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self.flow.stream = stream

    # ---- running

    def run(self) -> object:
        """Run the step once, watched; returns what the step returned, this rank's loss."""
        for _, p in self._params:
            p.grad = None
        with self.watching():
            return self._case.step()

    def follow_readers(self) -> None:
        """Run the job's own clipping and optimizer, where it has any, on the gradients that are there now."""
        update = self._case.update
        if self._case.own_readers and update is not None and self.grads.there:
            self.updates.follow(lambda: update(self._case.model, "job"), self._case.name)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Watch what runs while this is open."""
        self._annotate()
        with ExitStack() as stack:
            if self._case.catching is not None:
                stack.enter_context(self._case.catching(self.take_batch))
            stack.enter_context(self._module_hooks())
            stack.enter_context(
                replaced_everywhere(relabelling(self.flow.labelled.relabelled) | self.interceptor.functions())
            )
            stack.enter_context(self.interceptor.installed())
            stack.enter_context(self.functions.installed())
            stack.enter_context(self._reducers.installed())
            stack.enter_context(dividing_locally())
            stack.enter_context(self.grads.installed())
            stack.enter_context(self.flow)
            yield

    def _annotate(self) -> None:
        """Write down what comes from outside: parameters, buffers and the batch."""
        ledger, world = self.ledger, self.world
        for fqn, p in self._params:
            declared = world.declared(self._case.declared.get(fqn))
            vector = [_INVARIANT] * len(world.dims)
            if declared is not None and not isinstance(p, DTensor):
                vector = [_INVARIANT if x.is_replicate else _VARYING for x in declared.placements]
            if isinstance(p, DTensor):
                for d in world.dims_apart(spec_of(p).mesh, spec_of(p).placements):
                    vector[d] = _VARYING
            ledger.put(p, ledger.sid(tuple(vector), grad=False))
            if declared is not None and not isinstance(p, DTensor):
                self.flow.carry.localised(p, declared)
            if self.stream is not None:
                self.stream.named(p, "parameter", fqn)
            self.flow.params.setdefault(storage_key(local_of(p)), fqn)
        ledger.put(rank_map_of(self._case.mesh), ledger.invariant)
        for fqn, b in self._case.model.named_buffers():
            ledger.put(b, ledger.invariant)
            if self.stream is not None:
                self.stream.named(b, "buffer", fqn)
        for i, x in enumerate(self._case.inputs):
            self.take_batch(x)
            if self.stream is not None:
                self.stream.named(x, "input", i)
        self.grads.begin()

    def take_batch(self, x: torch.Tensor) -> None:
        """Write down a tensor of the batch; a DTensor's own mesh dims are as its placements say."""
        vector = [_VARYING if d in self._case.batch_dims else _INVARIANT for d in self.world.parents]
        if isinstance(x, DTensor):
            spec = spec_of(x)
            for span, placement in zip(self.world.dims_of_mesh(spec.mesh), spec.placements, strict=True):
                for d in span or ():
                    vector[d] = _INVARIANT if placement.is_replicate() else _VARYING
        self.ledger.put(x, self.ledger.sid(tuple(vector), grad=False))

    @contextmanager
    def _module_hooks(self) -> Generator[None]:
        """Keep a stack of the modules whose forward is running."""
        stack = self._modules
        handles = []

        def enter(fqn: str) -> Any:
            return lambda _module, _args: stack.append(fqn)

        def leave(_module: Any, _args: Any, _out: Any) -> None:
            if stack:
                stack.pop()

        for name, module in self._case.model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(clean_fqn(name))))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for h in handles:
                h.remove()

    def fingerprints(self) -> list[tuple[int, Any, Any, Any]]:
        """(boundary, of its value, of the gradient that arrived, of the one that left), in call order."""
        found = []
        for b in self.interceptor.boundaries:
            if b.phase is Phase.BACKWARD:
                continue  # a collective on a gradient: while it runs there is nothing to take a print of
            arrived, left = (b.grad.arrived_print, b.grad.left_print) if b.grad is not None else (None, None)
            found.append((b.index, b.value_print, arrived, left))
        return found

    # ---- notes

    def _module_fqn(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _collective(
        self,
        call: CollectiveCall,
        dims: tuple[int, ...] | None,
        sent: torch.Tensor | None,
        equal: tuple[int, ...],
    ) -> None:
        owner, phase = self.interceptor.running()
        if phase is Phase.FORWARD and not self.flow.inside_dtensor_op and not self.interceptor.busy:
            self.flow.carry.collective(call, dims, sent)
        if owner is not None:
            owner.spanned.update(dims or ())
            if phase is not Phase.BACKWARD:
                owner.summed.append((sent.numel() if sent is not None else 0, equal))
        elif phase is Phase.FORWARD and sent is not None and self.ledger.is_grad(self.ledger.get(sent)):
            phase = Phase.BACKWARD  # by hand, after it
        raw = RawCollective(
            call=call,
            dims=dims,
            phase=phase,
            boundary=owner.index if owner is not None else None,
            module_fqn=owner.module_fqn if owner is not None else self._module_fqn(),
            dtype=dtype_name(sent) if sent is not None else "",
            numel=sent.numel() if sent is not None else 0,
            equal=equal,
            site=None if owner is not None else callsite.take(2)[0],
        )
        if self._progress is not None:
            where = "x".join(self.world.dims[d] for d in dims) if dims else f"ranks {list(call.ranks)}"
            self._progress(f"{call.name} #{len(self._collectives)} over {where} in {raw.phase}")
        self._collectives.append(raw)

    def _reduced(
        self, call: CollectiveCall, sent: torch.Tensor, before: int, after: int
    ) -> tuple[int, Callable[[int, int], int]]:
        after = self._scaling.reduced(sent, before, after)
        told, raw = self.grads.reduced(call, sent, before, after)
        if raw is not None:
            self._collectives[-1].boundary = raw.index
        return told(before, after), told

    def _written(self, xs: Sequence[torch.Tensor]) -> None:
        if self.grads.there and not in_backward():
            self.grads.written(xs)
            self.updates.written(xs)

    def _use(self, op: str, fqn: str, x: torch.Tensor, out: Any) -> None:
        uses = self._uses.setdefault(fqn, [])
        if len(uses) >= _USES_KEPT:
            return
        module = self._module_fqn()
        if any(u.op == op and u.module_fqn == module for u in uses):
            return
        first = out[0] if isinstance(out, tuple | list) and out else out
        uses.append(
            RawUse(op, module, self.world.layout_of(x), self.world.layout_of(first), callsite.take(2)[1])
        )

    def freeze(self, run: RunRecord) -> Trace:
        """What was seen, as plain data."""
        return Freezer(
            case=self._case,
            flow=self.flow,
            params=self._params,
            boundaries=self.interceptor.boundaries,
            collectives=self._collectives,
            uses=self._uses,
            grads=self.grads,
            updates=self.updates,
        ).trace(run)


def trace_step(case: Case, run: RunRecord, on_progress: Callable[[str], None] | None = None) -> Trace:
    """Run one forward and backward of ``case``, watched, and return what was seen."""
    tracer = Tracer(case, on_progress)
    tracer.run()
    tracer.follow_readers()
    return tracer.freeze(run)

"""What becomes of the parameters once the gradients are read, by clipping and optimizers: do replicas stay equal?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from placement_audit.dtensor_api import (
    kernels_on_meta,
    local_of,
    relabelling,
    replaced_everywhere,
    storage_key,
    unwatched,
)
from placement_audit.engine import callsite
from placement_audit.engine.flow import Flow
from placement_audit.engine.grads import Grads, spoils
from placement_audit.engine.opargs import covers
from placement_audit.engine.singly import Singly
from placement_audit.errors import AuditError
from placement_audit.failure import Failure
from placement_audit.model import State, StateKind
from placement_audit.states import as_value

TERM = State(StateKind.TERM)


@dataclass(frozen=True, slots=True)
class RawUpdate:
    """What a parameter is after it was written.

    Attributes:
        sid: its state.
        site: the first frame outside torch that wrote it last, or that first made the ranks' values differ.
    """

    sid: int
    site: callsite.RawSite | None


class Updates:
    """The parameters after backward.

    Attributes:
        followed: whether some were written, or the job's own readers ran while this watched.
        notes: why readers were not followed, a whole sentence each.
    """

    def __init__(self, flow: Flow, params: Sequence[tuple[str, nn.Parameter]], grads: Grads) -> None:
        """See the class.

        Args:
            flow: knows the states.
            params: (FQN, parameter), in the model's order.
            grads: their gradients.
        """
        self.notes: tuple[str, ...] = ()
        self.followed = False
        self._flow = flow
        self._grads = grads
        self._params = [p for _, p in params]
        self._names = [fqn for fqn, _ in params]
        self._by_storage: dict[int, list[nn.Parameter]] = {}
        self._sites: dict[int, tuple[bool, callsite.RawSite | None]] = {}
        self._ended: dict[int, tuple[RawUpdate | None, tuple[int, callsite.RawSite | None] | None]] = {}

    def of(self, p: nn.Parameter) -> RawUpdate | None:
        """What became of a parameter; None where nothing wrote it after a backward."""
        return self._ended[id(p)][0] if id(p) in self._ended else self._now(p)

    def spoilt(self, p: nn.Parameter) -> tuple[int, callsite.RawSite | None] | None:
        """What became of its gradient; see `Grads.spoilt`."""
        return self._ended[id(p)][1] if id(p) in self._ended else self._grads.spoilt(p)

    def _now(self, p: nn.Parameter) -> RawUpdate | None:
        now = self._flow.ledger.get(p)
        if id(p) not in self._sites and now == self._grads.before.get(id(p), now):
            return None
        return RawUpdate(now, self._sites.get(id(p), (False, None))[1])

    def written(self, xs: Sequence[torch.Tensor]) -> None:
        """Tensors were written in place, after a backward."""
        if not self._by_storage:
            for p in self._params:
                self._by_storage.setdefault(storage_key(local_of(p)), []).append(p)
        for x in xs:
            for p in self._by_storage.get(storage_key(local_of(x)), ()):
                self._written(p)

    def _written(self, p: nn.Parameter) -> None:
        ledger = self._flow.ledger
        self.followed = True
        apart = self._apart(p)
        if not self._sites.get(id(p), (False, None))[0]:
            self._sites[id(p)] = apart, callsite.take(3)[1]
        if covers(local_of(p)):  # a weight again, whatever went into it
            ledger.put(p, ledger.as_value(ledger.get(p)))

    def _apart(self, p: nn.Parameter) -> bool:
        ledger = self._flow.ledger
        before = self._grads.before.get(id(p))
        if before is None:
            return False
        pairs = zip(ledger.vector(before), ledger.vector(ledger.get(p)), strict=True)
        return any(spoils(was, now) for was, now in pairs)

    # ---- the job's own readers

    def follow(self, readers: Callable[[], object], name: str) -> None:
        """Run the job's clipping and optimizer, after its step; weights and gradients stay what they are.

        They leave nothing else in the trace. Numbers are not compared with those of other ranks: on a fake
        process group every sum over ranks is this rank's own, and each number that comes of one differs.

        Args:
            readers: runs them.
            name: of the job.
        """
        self._grads.read()
        for p in self._params:
            self._as_numbers(p)
        flow = self._flow
        params, ops, random_ops, assumed = flow.params, flow.ops, flow.random_ops, flow.ledger.assumed
        carry, stream, scaled, traffic = flow.carry, flow.stream, flow.on_scaled, flow.traffic
        collective, reduced = traffic.on_collective, traffic.on_reduced
        flow.params, flow.ops, flow.stream, flow.on_scaled = {}, Counter(), None, None
        flow.carry = carry.of_readers(
            (fqn, p, flow.world.layout_of(p.grad)) for fqn, p in zip(self._names, self._params, strict=True)
        )
        traffic.on_collective = lambda call, dims, sent, _equal: flow.carry.collective(call, dims, sent)
        traffic.on_reduced = None
        self.followed = True
        try:
            with (
                _kept(self._params),
                replaced_everywhere(relabelling(flow.labelled.relabelled) | kernels_on_meta()),
                flow,
                Singly(),
            ):
                readers()
                self._ended = {id(p): (self._now(p), self._grads.spoilt(p)) for p in self._params}
        except AuditError:
            raise
        except Exception as error:
            failure = Failure(error, {})
            if failure.ours and not isinstance(error, RuntimeError | NotImplementedError):
                raise  # not torch that says what it cannot do, in an op that we handed on
            self._sites, self.followed = {}, False
            self.notes = (
                f"The optimizer of {name} was not followed, for it failed on what a trace has: {failure.what} "
                f"({failure.place}).",
            )
        finally:
            flow.params, flow.ops, flow.random_ops, flow.ledger.assumed = params, ops, random_ops, assumed
            flow.carry, flow.stream, flow.on_scaled = carry, stream, scaled
            traffic.on_collective, traffic.on_reduced = collective, reduced

    def _as_numbers(self, p: nn.Parameter) -> None:
        """Take a gradient for what its readers do: for numbers, of which some are terms of a sum, as its label says."""
        if p.grad is None:
            return
        layout, ledger = self._flow.world.layout_of(p.grad), self._flow.ledger
        labels = dict(zip(layout.dims, layout.placements, strict=True)) if layout is not None else {}

        def number(d: int, state: State) -> State:
            label = labels.get(self._flow.world.dims[d])
            term = label is not None and label.is_partial and state.kind is StateKind.VARYING
            return TERM if term else as_value(state)

        new = ledger.changed(ledger.get(p.grad), number, grad=False)
        ledger.written(p.grad, new, lambda _inside, _was: new)


@contextmanager
def _kept(params: Sequence[nn.Parameter]) -> Generator[None]:
    """Put back the values of parameters and gradients, and which gradients there are."""
    with unwatched():
        before = [
            (
                p,
                p.data,
                local_of(p.detach()).clone(),
                p.grad,
                None if p.grad is None else local_of(p.grad).clone(),
            )
            for p in dict.fromkeys(params)
        ]
    try:
        yield
    finally:
        with unwatched():
            for p, data, value, grad, grad_value in before:
                p.data = data
                local_of(p.detach()).copy_(value)
                p.grad = grad
                if grad is not None and grad_value is not None:
                    local_of(grad).copy_(grad_value)

"""Notes plain values that one device would hardly have, where they are summed, labelled or computed with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch

from placement_audit.engine import callsite, forms
from placement_audit.engine.forms import Made
from placement_audit.engine.world import World
from placement_audit.model import Placement


@dataclass(frozen=True, slots=True)
class Carried:
    """What a plain tensor is along one mesh dim.

    Attributes:
        placement: its own.
        uneven: it is a part, and other ranks' parts are of other sizes.
        scale: numbers that it was multiplied by.
        terms: complete values that each rank added to its term.
        at: where the first of them was.
        op: which op that was.
        broken: the op that this was made with, and where: of terms it is not additive, of parts it needs the whole.
    """

    placement: Placement
    uneven: bool = False
    scale: Fraction = Fraction(1)
    terms: Made = forms.EMPTY
    at: callsite.RawSite | None = None
    op: str = ""
    broken: tuple[str, callsite.RawSite | None] | None = None


Vector = tuple[Carried | None, ...]
"""By world mesh dim; None for what is not known, or is the same on all ranks."""


@dataclass(frozen=True, slots=True)
class RawDoubt:
    """A value that one device would hardly have; `placement_audit.engine.freeze` makes a `ValueDoubt` of it."""

    kind: str
    dim: int
    op: str
    site: callsite.RawSite | None
    summed: callsite.RawSite | None
    carried: Placement
    declared: Placement | None
    of: tuple[tuple[str, Fraction], ...]
    after: bool
    module_fqn: str


class Doubts:
    """The notes of one step.

    Attributes:
        found: in the order in which they came up, each once.
        shares: (FQN, index of the mesh dim, how often each rank adds it to its term, how often by autograd's account)
            of parameters that are added to terms of a sum.
        unfollowed: (op, index of the mesh dim) -> results that were not followed.
        batch: indices of mesh dims over which sums and averages are the job's own affair.
        module_fqn: tells whose forward is running.
        of_readers: what runs are the gradients' readers, after backward.
    """

    def __init__(self, world: World, names: Mapping[int, str]) -> None:
        """See the class.

        Args:
            world: the world mesh.
            names: of the values that a `Made` speaks of.
        """
        self._world = world
        self._names = names
        self.found: dict[RawDoubt, None] = {}
        self.shares: dict[tuple[str, int, Fraction, Fraction], None] = {}
        self.unfollowed: Counter[tuple[str, int]] = Counter()
        self.batch: frozenset[int] = frozenset()
        self.module_fqn: Callable[[], str] = str
        self.of_readers = False

    def applied(self, d: int, op: str, carried: Placement) -> Carried:
        """An op that is not additive is applied to a term; gives what comes of it."""
        site = callsite.take(1)[1]
        self._note("applied", d, op, carried, site, after=not torch.is_grad_enabled())
        return Carried(carried, broken=(op, site))

    def averaged(self, d: int, op: str, carried: Placement) -> None:
        """A mean is taken over parts of different sizes."""
        self._note("averaged", d, op, carried, callsite.take(1)[1], after=not torch.is_grad_enabled())

    def updated(self, c: Carried, d: int, fqn: str) -> None:
        """A part of a weight is updated with what was made of parts alone, by an op that needs the whole."""
        if c.broken is not None:
            op, at = c.broken
            written = callsite.take(1)[1]
            self._note(
                "updated", d, op, c.placement, at, of=((fqn, Fraction(1)),), summed=written, after=True
            )

    def left_out(self, d: int, carried: Placement, site: callsite.RawSite | None, module_fqn: str) -> None:
        """The backward of log_softmax on parts of the classes handed on a gradient that needed it."""
        self._note("left_out", d, "log_softmax", carried, site, module_fqn=module_fqn)

    def labelled(self, c: Carried, d: int, label: Placement) -> None:
        """`from_local` gives a value a label."""
        if label == c.placement:
            self.summed(c, d, after=False)
        elif not (label.is_replicate or _averages(label) or _averages(c.placement)):
            site = callsite.take(1)[1]
            self._note("declared", d, "from_local", c.placement, site, declared=label)

    def summed(self, c: Carried, d: int, *, after: bool) -> None:
        """The ranks' terms are added up."""
        if not c.placement.is_partial or (d in self.batch and not after):
            return
        if c.broken is not None:
            op, at = c.broken
            self._note("applied", d, op, c.placement, at, summed=callsite.take(1)[1], after=after)
            return
        # What was added before a scaling was scaled as well; what was added after it may have been made to fit.
        own = c.terms.times(1 / c.scale)
        self.divided(own, d)
        wrong = dict(forms.miscounted(c.terms.value, self._world.sizes[d]))
        miscounted = forms.miscounted(own.value, self._world.sizes[d])
        of = tuple((self._names[v], n) for v, n in miscounted if v in wrong)
        if of:
            site = callsite.take(1)[1]
            self._note("added", d, c.op, c.placement, c.at, summed=site, of=of, after=after)

    def divided(self, made: Made, d: int) -> bool:
        """Note what of a sum's terms was divided by the ranks that add it; whether all of it was."""
        grad = dict(made.grad)
        for v, n in made.value:
            if self._names[v] and v != forms.NUMBER:
                self.shares[self._names[v], d, n, grad.get(v, Fraction(0))] = None
        return not forms.miscounted(made.value, self._world.sizes[d])

    def _note(
        self,
        kind: str,
        d: int,
        op: str,
        carried: Placement,
        site: callsite.RawSite | None,
        *,
        summed: callsite.RawSite | None = None,
        declared: Placement | None = None,
        of: tuple[tuple[str, Fraction], ...] = (),
        after: bool = False,
        module_fqn: str | None = None,
    ) -> None:
        after = after or self.of_readers
        if summed is not None:  # that is worse than what was known of it
            less = [
                x for x in self.found if (x.kind, x.dim, x.op, x.site, x.summed) == (kind, d, op, site, None)
            ]
            for x in less:
                after = after or x.after
                del self.found[x]
        if module_fqn is None:
            module_fqn = self.module_fqn()
        doubt = RawDoubt(kind, d, op, site, summed, carried, declared, of, after, module_fqn)
        self.found[doubt] = None


def _averages(p: Placement) -> bool:
    return p.is_partial and p.reduce_op != "sum"

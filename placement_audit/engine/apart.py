"""Numbers that differ between ranks without being tensors: an offset, a chunk's index, a mask's limit.

One rank's trace cannot see them. The ops that another rank ran can be set beside its own: where a number
among the arguments differs, the result differs. `placement_audit.engine.second_rank` has the other rank run.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement_audit.dtensor_api import local_of, storage_key, unwatched
from placement_audit.engine import callsite

_ALIGNED = 4000
"""Ops between the first and the last that part; more are not set side by side one by one."""
_CONSTANT = 64
"""Elements of a tensor that was made of Python numbers, at most, for its values to be looked at."""


Source = tuple[Hashable, ...]
"""Where a tensor came from: ("op", position, which result), ("met", position, which argument) or a name."""

NUMBERS = -1
"""Stands for the numbers of an op where others stand for its tensors, by position: another piece of the same one."""


def another(position: int) -> int:
    """Stands for a tensor of an op that the other rank has from elsewhere."""
    return NUMBERS - 1 - position


def argument(which: int) -> tuple[int, bool]:
    """(Position of the tensor that it stands for, whether it is another piece of the same one)."""
    return (which, True) if which >= 0 else (NUMBERS - 1 - which, False)


@dataclass(frozen=True, slots=True)
class Met:
    """One plain op of a step.

    Attributes:
        op: its name.
        numbers: hash of the numbers among its arguments.
        tensors: of each tensor among them, where it came from and at which offset of its storage it begins.
        site: first frame outside torch.
    """

    op: str
    numbers: int
    tensors: tuple[tuple[Source, int], ...]
    site: callsite.RawSite | None

    @property
    def token(self) -> Hashable:
        """What the same op of another rank has in common with it."""
        return self.op, self.site


Varying = Mapping[tuple[Hashable, int], tuple[tuple[int, int], ...]]
"""(an op and its place, how many times it had run there) -> (mesh dim, which argument) that differs along it."""


Numbers = dict[tuple[Hashable, int], Any]
"""(an op and its place, how many times it had run there) -> the number that it took out of a tensor."""


class Stream:
    """The plain ops of one step, in order.

    Attributes:
        met: all so far.
    """

    def __init__(self, varying: Varying | None = None, numbers: Numbers | None = None) -> None:
        """See the class.

        Args:
            varying: what differs between ranks, as `difference` found it.
            numbers: that the first rank took out of tensors, for one that is played after it; filled by the first.
        """
        self.met: list[Met] = []
        self._varying = varying or {}
        self._sources: dict[int, Source] = {}
        self._times: Counter[Hashable] = Counter()
        self._times_read: Counter[Hashable] = Counter()
        self._heard: set[int] = set()
        self._held: dict[int, StorageWeakRef] = {}
        self._numbers = {} if numbers is None else numbers

    def named(self, x: torch.Tensor, *name: Hashable) -> None:
        """Say what a tensor is that no op made: a parameter, a part of the batch."""
        self._sources[self._hold(x)] = name

    def _hold(self, x: torch.Tensor) -> int:
        """The key of a tensor's storage, which no other storage can get from now on.

        Where the memory of a dead one goes is chance: gloo's own buffers, which no op makes, would be taken for
        whatever lay there before, on one rank and not on the next.
        """
        x = local_of(x)
        key = storage_key(x)
        if key not in self._held:
            self._held[key] = StorageWeakRef(x.untyped_storage())
        return key

    def take(
        self, op: str, ins: Sequence[torch.Tensor], numbers: Hashable = 0
    ) -> tuple[tuple[int, int], ...]:
        """Note an op that is about to run; gives what of it differs, as in `Varying`."""
        at = len(self.met)
        tensors: list[tuple[Source, int]] = []
        for i, x in enumerate(ins):
            local = local_of(x)
            key = storage_key(local)
            source = self._sources.get(key, ("met", at, i))
            if local.dim():
                # A number that C++ made a tensor of is gone after the op, and its address another one's.
                self._sources.setdefault(self._hold(local), source)
            tensors.append((source, int(local.storage_offset())))
        met = Met(op, hash(numbers), tuple(tensors), callsite.take(3)[1])
        self.met.append(met)
        if not self._varying:
            return ()
        times = self._times[met.token]
        self._times[met.token] += 1
        return self._varying.get((met.token, times), ())

    def read(self, x: torch.Tensor, number: Any) -> Any:
        """A number that was taken out of a tensor which is equal on all ranks: what the first rank played had.

        On a fake process group no rank has what the others sent, so that numbers that come of a collective differ
        where they would not.
        """
        if storage_key(local_of(x)) not in self._heard:
            return number
        key = self.met[-1].token, self._times_read[self.met[-1].token]
        self._times_read[self.met[-1].token] += 1
        return self._numbers.setdefault(key, number)

    def made(
        self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], *, talks: bool, anew: bool
    ) -> None:
        """Note the results of the op that was taken last.

        Args:
            outs: its results.
            ins: its tensors.
            talks: it is a collective.
            anew: what it made of its own tensors' memory comes from it, and no more from where that came from.
        """
        old = {storage_key(local_of(x)) for x in ins}
        made = [self._hold(x) for x in outs]
        written = set(made) or old
        if talks or not self._heard.isdisjoint(old):
            self._heard |= written | (old if talks else set())
        else:
            self._heard -= written
        for i, key in enumerate(made):
            if anew or key not in old:
                self._sources[key] = ("op", len(self.met) - 1, i)


def numbers_of(func: Any, args: Any, kwargs: Any) -> Hashable:
    """The numbers that an op is given, those that a tensor was made of included."""
    return (*_numbers(args), *_numbers(kwargs.values()), *_constant(func, args))


def _numbers(args: Any) -> Iterator[Hashable]:
    for a in args:
        if isinstance(a, bool | int | float | complex):
            yield a
        elif isinstance(a, list | tuple):
            yield from _numbers(a)


def _constant(func: Any, args: Any) -> tuple[Hashable, ...]:
    """The values of a tensor that was made of Python numbers."""
    if func._opname != "lift_fresh" or not isinstance(args[0], torch.Tensor):
        return ()
    x = args[0]
    if x.is_meta or x.numel() > _CONSTANT:
        return ()
    with unwatched():
        return tuple(x.reshape(-1).tolist())


@dataclass(frozen=True, slots=True)
class Difference:
    """How another rank's ops differ.

    Attributes:
        at: (position, which argument) of what differs; of an op that the other rank did not run, its numbers.
        parted: where the two ranks ran different ops: (this rank's op, the other's), None for none.
    """

    at: frozenset[tuple[int, int]]
    parted: tuple[tuple[Met | None, Met | None], ...]


def difference(mine: Sequence[Met], other: Sequence[Met]) -> Difference:
    """Set two ranks' ops side by side."""
    a, b = [m.token for m in mine], [m.token for m in other]
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest = min(len(a), len(b)) - head
    tail = next((i for i in range(rest) if a[-1 - i] != b[-1 - i]), rest)
    ends = len(a) - tail, len(b) - tail
    same = [(i, i) for i in range(head)]
    at: set[tuple[int, int]] = set()
    parted: list[tuple[Met | None, Met | None]] = []
    for tag, i1, i2, j1, j2 in _blocks(a[head : ends[0]], b[head : ends[1]]):
        here, there = range(head + i1, head + i2), range(head + j1, head + j2)
        if tag == "equal":
            same += zip(here, there, strict=True)
        else:
            at |= {(i, NUMBERS) for i in here}
            parted.append((mine[here[0]] if here else None, other[there[0]] if there else None))
    same += zip(range(ends[0], len(a)), range(ends[1], len(b)), strict=True)
    place = {j: i for i, j in same}
    for i, j in same:
        x, y = mine[i], other[j]
        if x.numbers != y.numbers:
            at.add((i, NUMBERS))
        if x.tensors != y.tensors:
            at |= {
                (i, k if p[0] == _as_mine(q[0], place) else another(k))
                for k, (p, q) in enumerate(zip(x.tensors, y.tensors, strict=False))
                if p[1] != q[1] or p[0] != _as_mine(q[0], place)
            }
    return Difference(frozenset(at), tuple(parted))


def varying(mine: Sequence[Met], at: Mapping[int, frozenset[tuple[int, int]]]) -> Varying:
    """What differs, in a form that finds its op again in another run of the same rank.

    Args:
        mine: the ops of the rank.
        at: mesh dim -> what differs along it.
    """
    times: Counter[Hashable] = Counter()
    keys = []
    for met in mine:
        keys.append((met.token, times[met.token]))
        times[met.token] += 1
    found: dict[tuple[Hashable, int], tuple[tuple[int, int], ...]] = {}
    for d, differ in at.items():
        for i, which in sorted(differ):
            found[keys[i]] = (*found.get(keys[i], ()), (d, which))
    return found


def _as_mine(source: Source, place: Mapping[int, int]) -> Source:
    """Another rank's source, its position turned into this rank's."""
    if source[0] in ("op", "met"):
        return (source[0], place.get(source[1], -1), source[2])  # type: ignore[arg-type]
    return source


def _blocks(a: list[Hashable], b: list[Hashable]) -> list[tuple[str, int, int, int, int]]:
    if not a and not b:
        return []
    if len(a) > _ALIGNED or len(b) > _ALIGNED:
        return [("replace", 0, len(a), 0, len(b))]
    return list(difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes())

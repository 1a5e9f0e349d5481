"""Programs made by chance: a few layers on plain tensors and DTensors, whose forwards are one device's by design.

What each gradient is labelled, and which backward a hand-written boundary has, is left to chance, so that about half
of the programs are wrong. Numbers say which (`tests/faults/truth.py`); `tests/faults/chance_run.py` runs them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tests.faults.family import P, R

D = 8
ROWS, COLUMNS = Shard(1), Shard(2)
"""Of an activation, [batch, rows, D]; the batch is what dp is spread over, where the mesh has it."""

Op = tuple[Any, ...]
Labels = tuple[Placement, ...] | None

FROM: dict[Placement, dict[str, Placement]] = {
    R: {"copy, sum back": R, "cut, gather back": ROWS, "cut": ROWS},
    P: {"sum, copy back": R, "sum, sum back": R, "torch's sum": R, "scatter, gather back": ROWS},
    ROWS: {"gather, scatter back": R, "gather, cut back": R},
}
"""What each makes of a value that is so on tp."""


class Program:
    """One program.

    Attributes:
        ops: what it does, in order.
        values: of the parameters, whole.
        laid: their placements on (dp, tp).
        plain: those that are plain tensors, the same on all ranks.
        reduced: (parameter, mesh dim) whose gradient is all-reduced by hand.
        micro_batches: forwards and backwards before the gradients are read.
        early: the gradients are all-reduced by hand after each of them, not in the end.
        again: the forward is checkpointed.
    """

    def __init__(self, seed: int, mesh_dims: tuple[str, ...]) -> None:
        """Make it up."""
        self._chance = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self._dp = "dp" in mesh_dims
        self.values: dict[str, torch.Tensor] = {}
        self.laid: dict[str, tuple[Placement, Placement]] = {}
        self.plain: set[str] = set()
        self.ops: list[Op] = []
        self._kept: tuple[Placement, bool] | None = None
        self._make()
        likely = self._chance.random
        self.micro_batches = 2 if likely() < 0.2 else 1
        self.early = likely() < 0.3
        self.again = likely() < 0.2
        self.reduced = [(n, "tp") for n in self.values if likely() < 0.06]
        self.reduced += [(n, "dp") for n in self.values if n in self.plain and self._dp and likely() < 0.85]

    def _make(self) -> None:
        pick = self._chance.choice
        at, local = pick([R, ROWS]), False
        self.ops.append(("input", at))
        for _ in range(self._chance.randint(3, 8)):
            some = ("label", "scale", "scale", "matmul", "act", "cross", "cross", "add", "join")
            kind = pick(some if local else ("take", "take", "move", "scale", "matmul", "act", "join"))
            at, local = getattr(self, f"_{kind}")(at, local)
        if local and self._chance.random() < 0.6:
            at, local = self._label(at, local)
        self.ops.append(("loss", at, pick(["whole", "local"])))

    def _param(self, shape: tuple[int, ...], on_tp: Placement, *, plain: bool = False) -> str:
        alike = [
            n
            for n, v in self.values.items()
            if tuple(v.shape) == shape and self.laid[n][1] == on_tp and (n in self.plain) is plain
        ]
        if alike and self._chance.random() < 0.25:
            return self._chance.choice(alike)
        name = f"p{len(self.values)}"
        drawn = torch.randn(*shape, generator=self._numbers)
        self.values[name] = 0.4 * drawn if len(shape) > 1 else 1 + 0.3 * drawn
        on_dp = self._chance.choice([R, Shard(0)]) if self._dp and not plain else R
        self.laid[name] = on_dp, on_tp
        if plain:
            self.plain.add(name)
        return name

    def _labels(self, *on_tp: Placement | None) -> Labels:
        """What a `to_local` of a parameter says of its gradient."""
        label = self._chance.choice(on_tp)
        return None if label is None else (self._chance.choice([P, P, P, R]), label)

    # ---- what may come next; each gives what the value is on tp then, and whether it is a plain tensor

    def _act(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        if at != P:
            self.ops.append((self._chance.choice(["tanh", "tanh" if at == COLUMNS else "norm"]),))
        return at, local

    def _join(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        """A residual connection: what was kept is added, where it is like what there is; then this is kept."""
        if self._kept == (at, local):
            self.ops.append(("join",))
        self.ops.append(("keep",))
        self._kept = at, local
        return at, local

    def _move(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        at = self._chance.choice([R, ROWS, COLUMNS])
        self.ops.append(("move", at))
        return at, local

    def _take(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        self.ops.append(("take", self._chance.choice([None, None, R if at == P else at, R, P])))
        return at, True

    def _label(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        # A label of its gradient that cannot fit might undo one that a `to_local` before gave.
        self.ops.append(("label", at, self._chance.choice([None, R, P] if at == R else [None])))
        return at, False

    def _cross(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        last = self.ops[-1][-1]
        # What was gathered and is cut again is as it was, whatever the backward: there is nothing to find.
        found = [n for n in FROM.get(at, {}) if not (n.startswith("cut") and str(last).startswith("gather"))]
        if not found:
            return at, local
        name = self._chance.choice(found)
        self.ops.append(("cross", name))
        return FROM[at][name], local

    def _scale(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        if not local:
            name = self._param((D,), R if at == P else self._chance.choice([R, Shard(0)]))
            self.ops += [("scale", name, None), ("move", R if at == P else at)]
            return (R if at == P else at), local
        part = at == COLUMNS
        name = self._param((D,), Shard(0) if part else R, plain=not part and self._chance.random() < 0.3)
        self.ops.append(("scale", name, self._labels(*([Shard(0)] if part else [None, R, P]))))
        return at, local

    def _add(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        if at in (R, ROWS):
            name = self._param((D,), R, plain=self._chance.random() < 0.3)
            self.ops.append(("add", name, self._labels(None, R, P)))
        return at, local

    def _matmul(self, at: Placement, local: bool) -> tuple[Placement, bool]:
        by_columns, by_rows = Shard(0), Shard(1)
        if not local:
            may: dict[Placement, list[Placement]] = {
                R: [R, by_columns, by_rows],
                ROWS: [R, by_columns],
                COLUMNS: [by_rows, R],
                P: [R],
            }
            name, at = (
                self._param((D, D), self._chance.choice(may[at])),
                self._chance.choice([R, ROWS, COLUMNS]),
            )
            self.ops += [("matmul", name, None), ("move", at)]
            return at, local
        laid = self._chance.choice({R: [R, by_columns], COLUMNS: [by_rows]}.get(at, [R]))
        name = self._param((D, D), laid, plain=laid == R and self._chance.random() < 0.3)
        self.ops.append(("matmul", name, self._labels(*([None, R, P] if laid == R else [laid]))))
        return {R: at, by_columns: COLUMNS, by_rows: P}[laid], local

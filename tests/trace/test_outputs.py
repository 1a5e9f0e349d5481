"""What modules put out is noted once, however often activation checkpointing runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from placement_audit.measure.graph import ways
from placement_audit.measure.outputs import Notes, noted

pytestmark = pytest.mark.trace


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2 * g


def test_a_second_forward_is_no_second_call() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), nn.Linear(4, 1))
    notes = Notes(lambda x, _key, _run, _value: tuple(x.shape))
    with noted(model, notes):
        model(torch.ones(2, 3)).sum().backward()
    assert notes.runs == 1
    assert [(o.key, o.value, o.grad) for o in notes.found] == [
        (("0.0", 0, 0), (2, 4), (2, 4)),
        (("0.1", 0, 0), (2, 4), (2, 4)),
        (("0", 0, 0), (2, 4), (2, 4)),
        (("1", 0, 0), (2, 1), (2, 1)),
        (("", 0, 0), (2, 1), (2, 1)),
    ]


def test_calls_of_one_module_are_told_apart_and_begin_anew_in_each_pass() -> None:
    inner = nn.Linear(3, 3)
    model = nn.Sequential(inner, inner)
    notes = Notes(lambda x, _key, _run, _value: x.shape[0])
    with noted(model, notes):
        model(torch.ones(2, 3))
        model(torch.ones(5, 3))
    found = [(o.key, o.run, o.value) for o in notes.found if o.key[0]]
    assert found == [(("0", n, 0), run, size) for run, size in ((0, 2), (1, 5)) for n in (0, 1)]


def test_what_is_passed_on_is_known() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3))
    notes = Notes(lambda *_: None)
    with noted(model, notes):
        model(torch.ones(2, 3))
    assert [o.passed_on for o in notes.found] == [True, False, False]


def test_a_way_has_the_own_backward_and_the_hook_that_a_gradient_meets() -> None:
    weight = nn.Parameter(torch.ones(3))
    first = weight * 2
    hooked = first.sin()
    last = Doubled.apply(hooked)
    loss = last.sum()

    def hook(g: torch.Tensor) -> torch.Tensor:
        return g

    cuts = {(id(first.grad_fn), 0): 0, (id(last.grad_fn), 0): 1}
    found = ways([loss.grad_fn], cuts, {id(weight): 2}, {}, [(hooked.grad_fn, hook), (weight, hook)])
    passed = {(w.frm, w.to): [(p.kind, p.own_backward) for p in w.passed] for w in found}
    assert passed == {
        (-1, 1): [("SumBackward0", False)],
        (1, 0): [("Doubled", True), ("SinBackward0", False), ("hook", True)],
        (0, 2): [("MulBackward0", False), ("hook", True)],
    }
    backward = next(p for w in found for p in w.passed if p.kind == "Doubled")
    assert backward.site is not None
    assert backward.site[0] is Doubled.backward.__code__
    assert backward.site[1] > Doubled.backward.__code__.co_firstlineno

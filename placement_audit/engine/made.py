"""What complete values are made of, kept by storage; see `placement_audit.engine.forms`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch

from placement_audit.dtensor_api import local_of, storage_key
from placement_audit.engine import forms
from placement_audit.engine.forms import Made
from placement_audit.engine.optraits import OpTraits


class Makings:
    """What the tensors of one step are made of, as far as numbers and sums tell.

    Attributes:
        names: value -> FQN; "" for one that is no parameter, "1" for numbers.
    """

    def __init__(self, params: Mapping[int, str]) -> None:
        """See the class.

        Args:
            params: storage key -> FQN.
        """
        self._params = params
        self._made: dict[int, Made] = {}
        self._values: dict[int, int] = {}
        self.names: dict[int, str] = {forms.NUMBER: "1"}

    @property
    def any(self) -> bool:
        """Whether anything is known of any tensor."""
        return bool(self._made)

    def by(self, traits: OpTraits, args: Any, kwargs: Any, ins: list[torch.Tensor]) -> Made | None:
        """What an op makes of its inputs; None for a value of its own."""
        if traits.scales and len(ins) == 1 and factor(traits, args) is not None:
            return self.of(ins[0]).times(share(traits, args, kwargs, 0))
        known = [self._made.get(storage_key(local_of(x))) for x in ins] if self._made else []
        if traits.adds and len(ins) == 2 and any(m is not None for m in known):
            a, b = (self.of(x).times(share(traits, args, kwargs, i)) for i, x in enumerate(ins))
            total = a.plus(b)
            return None if forms.too_long(total.value) else total
        return known[0] if traits.passes_on and len(known) == 1 else None

    def of(self, x: torch.Tensor) -> Made:
        """What a tensor is made of: itself, where nothing else is known."""
        key = storage_key(local_of(x))
        made = self._made.get(key)
        if made is None:
            value = self._values.setdefault(key, len(self._values) + 1)
            self.names.setdefault(value, self._params.get(key, ""))
            made = Made(forms.one(value), forms.one(value))
        return made if x.requires_grad and torch.is_grad_enabled() else Made(made.value)

    def put(self, x: torch.Tensor, made: Made) -> None:
        """Write down what a tensor is made of."""
        self._made[storage_key(local_of(x))] = made

    def forget(self, key: int) -> None:
        """A storage was written over: it holds another value from now on."""
        self._made.pop(key, None)
        if key in self._values:
            self._values[key] = -len(self.names) - 1
            self.names[self._values[key]] = ""


def number_added(traits: OpTraits, args: Any, kwargs: Any) -> Fraction | None:
    """The number that an op adds to its first input; None where it adds none."""
    by = args[1] if traits.adds and len(args) > 1 else None
    if not isinstance(by, int | float) or not math.isfinite(by):
        return None
    return forms.number(by) * share(traits, args, kwargs, 1)


def factor(traits: OpTraits, args: Any) -> Fraction | None:
    """The number that an op multiplies by; None where it is none."""
    by = args[1] if len(args) > 1 else None
    if not isinstance(by, int | float) or not by or not math.isfinite(by):
        return None
    return 1 / forms.number(by) if traits.divides else forms.number(by)


def share(traits: OpTraits, args: Any, kwargs: Any, i: int) -> Fraction:
    """How often an op takes its input ``i``, as far as its numbers tell."""
    if traits.scales:
        return factor(traits, args) or Fraction(1)
    if traits.adds and i == 1:
        by = forms.number(kwargs.get("alpha", 1))
        return -by if traits.subtracts else by
    return forms.number(kwargs.get("beta", 1)) if i == 0 else Fraction(1)

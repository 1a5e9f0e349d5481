"""The mend of the class cache: run, not only read. A second model gathers with its own object."""

from __future__ import annotations

from typing import Any

import pytest
from gather_source import SOURCE, edited

from placement_audit.mend import cache
from placement_audit.mend.result import State

pytestmark = pytest.mark.unit

KEY = "    entry = (target.__class__, frozenset(names))\n"


class Layer:
    """A module with one parameter."""

    def __init__(self) -> None:
        self._parameters = {"w": "weight"}


class Teller:
    """Gathers by telling who gathers; what it is made of is what the class in the text reads."""

    def __init__(self, mesh: object, dtype: str | None = None) -> None:
        self.mesh, self.layout, self.full, self.sums = mesh, ["S"], ["R"], ["P"]
        self.param_dtype, self.sum_dtype = dtype, None

    def __call__(self, weight: str) -> Teller:
        return self


def wrap_of(text: str) -> Any:
    """The function that gives classes, of a text without its imports."""
    tree = text[text.index("STORE") : text.index("class Gatherer")]
    space: dict[str, Any] = {}
    exec(tree, space)
    return space["wrap"]


def wrapped(wrap: Any, gatherer: Teller) -> Layer:
    layer = Layer()
    wrap(layer, ["w"], gatherer)
    return layer


def test_the_fault_is_real_and_mended():
    part = cache.mend(SOURCE)
    assert part.state is State.NOT_APPLIED
    assert SOURCE.splitlines()[part.line - 1] == KEY.rstrip("\n")
    assert "STORE leaves out gatherer" in part.reason
    mesh = object()
    for text, right in ((SOURCE, False), (part.text, True)):
        wrap = wrap_of(text)
        first, second, third = Teller(mesh), Teller(object()), Teller(mesh, "bf16")
        models = [wrapped(wrap, one) for one in (first, second, third)]
        assert models[0].w is first  # type: ignore[attr-defined]
        assert (models[1].w is second) is right  # type: ignore[attr-defined]
        assert (models[2].w is third) is right  # type: ignore[attr-defined]


def test_one_model_still_shares_its_classes():
    wrap, mesh = wrap_of(cache.mend(SOURCE).text), object()
    assert type(wrapped(wrap, Teller(mesh))) is type(wrapped(wrap, Teller(mesh)))


def test_an_equal_mesh_of_another_life_is_another():
    class Mesh:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Mesh)

        def __hash__(self) -> int:
            return 1

    wrap = wrap_of(cache.mend(SOURCE).text)
    second = Teller(Mesh())
    wrapped(wrap, Teller(Mesh()))
    assert wrapped(wrap, second).w is second  # type: ignore[attr-defined]


def test_twice_is_once():
    once = cache.mend(SOURCE).text
    again = cache.mend(once)
    assert again.state is State.APPLIED
    assert again.text == once
    assert "STORE: dict[tuple[object, ...], type] = {}" in once


@pytest.mark.parametrize(
    "edits",
    [
        [
            (
                "    if entry in STORE:\n        cls = STORE[entry]\n",
                "    cls = STORE.get(entry)\n    if cls:\n        pass\n",
            )
        ],
        [("STORE: dict[tuple[type, frozenset], type] = {}", "STORE = dict()")],
        [(KEY, "    entry = target.__class__\n")],
    ],
    ids=["get", "dict", "no tuple"],
)
def test_other_ways_to_keep(edits):
    part = cache.mend(edited(*edits))
    assert part.state is State.NOT_APPLIED
    wrap, second = wrap_of(part.text), Teller(object())
    wrapped(wrap, Teller(object()))
    assert wrapped(wrap, second).w is second  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "edits",
    [
        [
            ("STORE: dict", "OTHER: dict"),
            (
                "    if entry in STORE:\n        cls = STORE[entry]\n    else:\n        cls",
                "    if True:\n        cls",
            ),
            ("        STORE[entry] = cls\n", ""),
        ],
        [("gatherer(self._parameters[key])", "self.gather(key)")],
    ],
    ids=["no cache", "closes over nothing"],
)
def test_absent(edits):
    text = edited(*edits)
    part = cache.mend(text)
    assert (part.state, part.text) == (State.ABSENT, text)


def test_any_key_with_the_object_in_it_is_left_alone():
    text = edited((KEY, "    entry = (target.__class__, frozenset(names), id(gatherer))\n"))
    part = cache.mend(text)
    assert (part.state, part.text) == (State.APPLIED, text)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            ('["w"], Gatherer(mesh, (Replicate(),), None, None))', '["w"], made(mesh))'),
            "is not seen to be a Gatherer",
        ),
        (("def replicate_compute(self, weight)", "def other(self, weight)"), "no class here has a method"),
    ],
)
def test_refused(edit, why):
    text = edited(edit)
    part = cache.mend(text)
    assert part.state is State.REFUSED
    assert why in part.reason
    assert part.text == text

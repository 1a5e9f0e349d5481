"""The autograd graph between watched tensors: what a gradient passes on its way from one to the next."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from placement_audit.dtensor_api import TORCH_DIR, mark_of
from placement_audit.engine import callsite

OWN_DIR = str(Path(__file__).parents[1]) + "/"

Cut = tuple[int, int]
"""Id of an autograd node, and which of its results the gradient is of."""


@dataclass(frozen=True, slots=True)
class Passed:
    """An autograd node on the way.

    Attributes:
        order: its number: later ops have higher ones, and backward runs the highest first.
        kind: the boundary's kind, or the node's name.
        boundary: what `mark_node` tied to it; None for nothing.
        site: of an op, where it was called; of a Function, its backward.
        own_backward: a Function outside torch, or a hook: nothing in forward shows it.
    """

    order: int
    kind: str
    boundary: Any
    site: callsite.RawSite | None
    own_backward: bool


@dataclass(frozen=True, slots=True)
class Way:
    """From one watched tensor back to another.

    Attributes:
        frm: nearer to the loss; an index.
        to: nearer to the inputs; an index.
        passed: the nodes between them, in backward order.
    """

    frm: int
    to: int
    passed: tuple[Passed, ...]


def ways(
    roots: Iterable[Any],
    cuts: Mapping[Cut, int],
    leaves: Mapping[int, int],
    sites: Mapping[int, callsite.RawSite | None],
    hooks: Iterable[tuple[Any, Any]] = (),
) -> list[Way]:
    """All ways between watched tensors that meet no third one.

    Args:
        roots: the loss's nodes; the loss has index -1.
        cuts: watched tensors, their nodes held by the caller; index of each.
        leaves: id of a parameter -> index.
        sites: number of a node -> where its op was called.
        hooks: a node or a parameter, and what is called with its gradient.
    """
    hooked: dict[int, list[Any]] = {}
    for on, hook in hooks:
        hooked.setdefault(id(on), []).append(hook)
    found: list[Way] = []
    starts: dict[int, list[Any]] = {-1: list(roots)}
    done: set[int] = set()
    kept: list[Any] = []  # nodes whose ids are in use
    nodes = {}
    while starts:
        frm, first = starts.popitem()
        if frm in done:
            continue
        done.add(frm)
        into: dict[int, list[int]] = {}
        ends: dict[int, tuple[Any, list[int]]] = {}
        stack = list(first)
        nodes = {id(n): n for n in stack}
        while stack:
            node = stack.pop()
            kept.append(node)
            for nxt, nr in node.next_functions:
                if nxt is None:
                    continue
                kept.append(nxt)
                end = cuts.get((id(nxt), nr))
                if end is None:
                    variable = getattr(nxt, "variable", None)
                    end = leaves.get(id(variable)) if variable is not None else None
                if end is not None:
                    at = nxt if (id(nxt), nr) in cuts else nxt.variable
                    ends.setdefault(end, (at, []))[1].append(id(node))
                    if (id(nxt), nr) in cuts:
                        starts.setdefault(end, [nxt])
                    continue
                into.setdefault(id(nxt), []).append(id(node))
                if id(nxt) not in nodes:
                    nodes[id(nxt)] = nxt
                    stack.append(nxt)
        for end, (at, last) in ends.items():
            passed = _between(last, into, nodes, sites, hooked)
            # Hooks on the watched tensor itself were there before it was watched.
            found.append(Way(frm, end, (*passed, *_hooks_on(at, -1, hooked))))
    return found


def _between(
    last: list[int],
    into: dict[int, list[int]],
    nodes: dict[int, Any],
    sites: Mapping[int, callsite.RawSite | None],
    hooked: Mapping[int, list[Any]],
) -> tuple[Passed, ...]:
    on_it: set[int] = set()
    stack = list(last)
    while stack:
        n = stack.pop()
        if n not in on_it:
            on_it.add(n)
            stack += into.get(n, [])
    passed = [_passed(nodes[n], sites) for n in on_it]
    passed += [h for n in on_it for h in _hooks_on(nodes[n], nodes[n]._sequence_nr(), hooked)]
    return tuple(sorted(passed, key=lambda p: -p.order))


def _passed(node: Any, sites: Mapping[int, callsite.RawSite | None]) -> Passed:
    order = node._sequence_nr()
    raw = mark_of(node)
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        function: Any = getattr(type(node), "_forward_cls", None)
        code = getattr(inspect.unwrap(getattr(function, "backward", None)), "__code__", None)
        if code is not None and not code.co_filename.startswith(TORCH_DIR):
            return Passed(order, function.__name__, raw, (code, _first_line(code), -1), True)
    if raw is not None:
        return Passed(order, raw.kind, raw, None, False)
    return Passed(order, node.name(), None, sites.get(order), False)


def _hooks_on(at: Any, order: int, hooked: Mapping[int, list[Any]]) -> list[Passed]:
    """Hooks from outside torch; they run before the node that they are on."""
    found = []
    for hook in hooked.get(id(at), []):
        code = getattr(inspect.unwrap(getattr(hook, "func", hook)), "__code__", None)
        if code is not None and not code.co_filename.startswith((TORCH_DIR, OWN_DIR)):
            found.append(Passed(order, "hook", None, (code, _first_line(code), -1), True))
    return found


def _first_line(code: Any) -> int:
    """Of the body: a function with decorators begins at the first of them."""
    after = [line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno]
    return min(after, default=code.co_firstlineno)

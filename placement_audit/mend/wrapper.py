"""Finds the function that gives a module a class whose properties gather its parameters, by what it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from placement_audit.mend.flow import dotted, nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """The function.

    Attributes:
        function: at the top of the file.
        module: the argument whose class it sets.
        closed: the argument that the properties call: the object that gathers.
        first: its first statement after the docstring.
    """

    function: cst.FunctionDef
    module: str
    closed: str
    first: cst.CSTNode


def find_wrapper(module: cst.Module) -> Wrapper | None:
    """The first such function of a file; None where there is none."""
    for function in module.body:
        if not isinstance(function, cst.FunctionDef):
            continue
        params = {p.name.value for p in (*function.params.params, *function.params.kwonly_params)}
        closed = next((name for name in _called_in_properties(function) if name in params), None)
        target = next((name for name in _classes_set(function) if name in params), None)
        if closed is None or target is None:
            continue
        body = function.body.body
        docstring = function.get_docstring() is not None
        if len(body) > docstring:
            return Wrapper(function=function, module=target, closed=closed, first=body[docstring])
    return None


def _called_in_properties(function: cst.FunctionDef) -> Iterator[str]:
    """Names called inside the getters that are given to ``property``."""
    for node in nodes(function):
        match node:
            case cst.Call(func=cst.Name(value="property"), args=[cst.Arg(value=cst.Lambda(body=body)), *_]):
                yield from (dotted(one.func) for one in nodes(body) if isinstance(one, cst.Call))


def _classes_set(function: cst.FunctionDef) -> Iterator[str]:
    """Names whose ``__class__`` is assigned."""
    for node in nodes(function):
        match node:
            case cst.AssignTarget(
                target=cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value="__class__"))
            ):
                yield name

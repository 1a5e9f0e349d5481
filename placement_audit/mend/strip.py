"""Takes out what a method says about the gradients of its ends, ours or someone else's, and what served only that."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from placement_audit.mend import pattern
from placement_audit.mend.edit import Edits, without
from placement_audit.mend.flow import Statement, bound, dotted, names, nodes
from placement_audit.mend.helpers import GATHERED, JOIN, NAMES
from placement_audit.mend.insert import KEYWORD, OURS
from placement_audit.mend.pattern import Gather, NotFound


def stripped(module: cst.Module, gather: Gather) -> cst.Module:
    """The file as if nobody had mended it.

    Args:
        module: the file.
        gather: the method in it.

    Raises:
        NotFound: the method gives its parameter's name to something else.
    """
    edits = Edits(ours=OURS)
    used: list[str] = []
    for call in (gather.leave, gather.wrap):
        given = next((arg for arg in call.args if arg.keyword and arg.keyword.value == KEYWORD), None)
        if given is not None:
            used += names(given.value)
            edits.change[id(call)] = lambda new: without(new, KEYWORD)
    for statement in _before(gather):
        if _returns_early(statement):
            edits.drop.add(id(statement))
            used += names(statement)
            edits.drop |= {id(one) for one in module.body if _is_helper(one)}
            edits.drop |= {id(one) for one in nodes(module) if _is_join(one)}
    if gather.param in bound(gather.method.body):
        raise NotFound(
            f"{gather.owner.name.value}.{pattern.METHOD} gives its parameter's name to something else"
        )
    return _without_unused(edits.apply(module, gather.flow), used)


def _without_unused(module: cst.Module, used: list[str]) -> cst.Module:
    """Drop assignments of the method to names that only what is gone had used."""
    while used:
        gather = pattern.find(module)
        before = list(_before(gather))
        edits = Edits(ours=OURS)
        for name in set(used):
            holding = [one for one in _lines(gather) if name in names(one)]
            if holding and all(one in before and _only_target(one) == name for one in holding):
                edits.drop |= {id(one) for one in holding}
                used += [other for one in holding for other in names(one)]
        if not edits.drop:
            break
        module = edits.apply(module, gather.flow)
    return module


def _lines(gather: Gather) -> list[cst.CSTNode]:
    """The simple statements of the method, and the tests, headers and definitions of the others."""
    found: list[cst.CSTNode] = []
    todo: list[cst.CSTNode] = [gather.method.body]
    while todo:
        for child in todo.pop().children:
            if isinstance(child, cst.BaseCompoundStatement | cst.BaseSuite | cst.Else):
                todo.append(child)
            else:
                found.append(child)
    return found


def _before(gather: Gather) -> Iterator[cst.CSTNode]:
    """The statements before the first call, in its block and the blocks around it."""
    at: Statement | None = gather.first
    while at is not None:
        place = gather.flow.places[id(at)]
        yield from reversed(place.siblings[: place.index])
        at = place.parent


def _returns_early(statement: cst.CSTNode) -> bool:
    """Ours: ``if ...: ...; return _off_data_parallel(...)``."""
    match statement:
        case cst.If(
            body=cst.IndentedBlock(body=[*_, cst.SimpleStatementLine(body=[cst.Return(value=value)])])
        ):
            return isinstance(value, cst.Call) and dotted(value.func) == GATHERED
    return False


def _is_helper(statement: cst.CSTNode) -> bool:
    match statement:
        case cst.FunctionDef(name=cst.Name(value=name)) | cst.ClassDef(name=cst.Name(value=name)):
            return name in NAMES
    return False


def _is_join(statement: cst.CSTNode) -> bool:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call(func=cst.Name(value=name)))]):
            return name == JOIN
    return False


def _only_target(statement: cst.CSTNode) -> str | None:
    match statement:
        case cst.SimpleStatementLine(
            body=[cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])]
        ):
            return name
    return None

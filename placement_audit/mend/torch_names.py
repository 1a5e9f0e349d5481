"""What torch's classes are called in a file, and whether an expression comes to speak of ``Partial``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from placement_audit.mend.flow import bound, dotted, names, nodes
from placement_audit.mend.pattern import Gather, NotFound

_HOME = "torch.distributed"


def torch_name(module: cst.Module) -> str:
    """How to write ``torch`` in this file.

    Raises:
        NotFound: it is not imported as a whole.
    """
    for small in _imports(module):
        if isinstance(small, cst.Import):
            for alias in small.names:
                if alias.asname is None and dotted(alias.name).partition(".")[0] == "torch":
                    return "torch"
                if alias.asname is not None and dotted(alias.name) == "torch":
                    return dotted(alias.asname.name)
    raise NotFound("torch is not imported at the top of this file")


def class_name(module: cst.Module, name: str) -> str:
    """How to write one of DTensor's classes in this file.

    Raises:
        NotFound: nothing that is imported leads to it.
    """
    for small in _imports(module):
        match small:
            case cst.ImportFrom(names=[*aliases], module=home) if home and dotted(home).startswith(_HOME):
                for alias in aliases:
                    if dotted(alias.name) == name:
                        return dotted(alias.asname.name) if alias.asname else name
    return f"{torch_name(module)}.distributed.tensor.{name}"


def mentions_partial(module: cst.Module, gather: Gather, node: cst.BaseExpression) -> bool:
    """Whether an expression, or anything that it was made from in this file, names a Partial."""
    aliases = {"Partial", class_name(module, "Partial").rpartition(".")[2]}
    seen: set[int] = set()
    todo: list[cst.CSTNode] = [node]
    while todo:
        at = todo.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        for one in nodes(at):
            called = dotted(one.func).rpartition(".")[2] if isinstance(one, cst.Call) else ""
            if "Partial" in called or dotted(one).rpartition(".")[2] in aliases:
                return True
            if called:
                todo += _defined(module, called)
            if isinstance(one, cst.Attribute) and dotted(one.value) == "self":
                todo += _kept(gather.owner, one.attr.value)
            if isinstance(one, cst.Name):
                todo += _makers(gather, one.value)
    return False


def _imports(module: cst.Module) -> Iterator[cst.BaseSmallStatement]:
    for statement in module.body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body


def _defined(module: cst.Module, name: str) -> list[cst.CSTNode]:
    """Functions of that name in the file."""
    return [one for one in nodes(module) if isinstance(one, cst.FunctionDef) and one.name.value == name]


def _kept(owner: cst.ClassDef, name: str) -> list[cst.CSTNode]:
    """What the class assigns to ``self.name``."""
    found: list[cst.CSTNode] = []
    for node in nodes(owner):
        match node:
            case cst.Assign(targets=targets, value=value):
                if any(dotted(target.target) == f"self.{name}" for target in targets):
                    found.append(value)
            case cst.AnnAssign(target=target, value=value) if value is not None:
                if dotted(target) == f"self.{name}":
                    found.append(value)
    return found


def _makers(gather: Gather, name: str) -> list[cst.CSTNode]:
    """Statements of the method that bind a name, or fill what it is bound to."""
    if name in (gather.param, "self"):
        return []
    statements = {
        id(one): one for one in gather.flow.owner.values() if isinstance(one, cst.SimpleStatementLine)
    }
    return [one for one in statements.values() if name in bound(one) or _fills(one, name)]


def _fills(statement: cst.SimpleStatementLine, name: str) -> bool:
    """``name.append(...)`` and the like."""
    return any(
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and dotted(node.func.value) == name
        and node.func.attr.value in ("append", "extend", "insert")
        for node in nodes(statement)
    ) and name in names(statement)

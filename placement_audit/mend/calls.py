"""Calls in a source text: their arguments, and where a function that `local_map` made was made."""

from __future__ import annotations

from collections.abc import Collection

import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedName, QualifiedNameProvider, ScopeProvider

from placement_audit.mend.imports import Refused, without_comments


def argument(call: cst.Call, keyword: str, position: int | None) -> cst.Arg | None:
    """The argument that a call gives by this keyword, or at this position; None where it gives none.

    Raises:
        Refused: it may be among those that are passed on with a star.
    """
    shift = 1 if _is_partial(call) else 0
    at = 0
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg
        if arg.star == "*" and position is not None:
            raise Refused(f"the call passes arguments on with a star; {keyword} may be among them")
        if arg.star == "" and arg.keyword is None:
            if position is not None and at == position + shift:
                return arg
            at += 1
    if any(arg.star == "**" for arg in call.args):
        raise Refused(f"the call passes arguments on with two stars; {keyword} may be among them")
    return None


def added(call: cst.Call, keyword: str, value: cst.BaseExpression) -> cst.Call:
    """The call with one more argument, laid out like those before it."""
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(value, keyword=cst.Name(keyword), equal=tight)
    if not call.args:
        return call.with_changes(args=[new])
    *rest, last = call.args
    first_comma = call.args[0].comma
    if rest and isinstance(first_comma, cst.Comma):
        between = without_comments(first_comma.whitespace_after)
    elif "\n" in cst.Module([]).code_for_node(call.whitespace_before_args):
        between = without_comments(call.whitespace_before_args)
    else:
        between = cst.SimpleWhitespace(" ")
    trailing = last.comma
    if not isinstance(trailing, cst.Comma):
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(
            comma=cst.Comma(whitespace_after=between), whitespace_after_arg=cst.SimpleWhitespace("")
        )
        return call.with_changes(args=[*rest, last, new])
    end = trailing.whitespace_after
    new = new.with_changes(comma=cst.Comma(whitespace_after=without_comments(end)))
    if isinstance(end, cst.ParenthesizedWhitespace) and isinstance(between, cst.ParenthesizedWhitespace):
        # a comment after the last argument stays with it
        between = end.with_changes(indent=between.indent, last_line=between.last_line)
    return call.with_changes(args=[*rest, last.with_changes(comma=cst.Comma(whitespace_after=between)), new])


# --------------------------------------------------------------------------- local_map


def find_local_map(wrapper: MetadataWrapper, ran: cst.Call) -> cst.Call:
    """The ``local_map(...)`` that made what ``ran`` calls: called at once, bound to its name, or decorating it.

    Raises:
        Refused: none in this file, or more than one thing bears the name.
    """
    qualified = wrapper.resolve(QualifiedNameProvider)

    def names_of(node: cst.CSTNode) -> Collection[QualifiedName]:
        found = qualified.get(node, ())
        return found() if callable(found) else found

    def makes(node: cst.CSTNode) -> bool:
        if not isinstance(node, cst.Call):
            return False
        callee = node.args[0].value if _is_partial(node) and node.args else node.func
        return any(q.name.endswith(".local_map") for q in names_of(callee))

    if isinstance(ran.func, cst.Call) and makes(ran.func):
        return ran.func
    name = _last_name(ran.func)
    bound = [] if name is None else _bound(wrapper, ran, name)
    made = [node for node in bound if makes(node)]
    if not made:
        raise Refused("the local_map that made this function is not in this file")
    if len(bound) > 1:
        raise Refused(f"more than one thing in this file is named {name}")
    (call,) = made
    assert isinstance(call, cst.Call)
    return call


def _bound(wrapper: MetadataWrapper, ran: cst.Call, name: str) -> list[cst.CSTNode]:
    """What the name of a called function is bound to: in its scope; for an attribute, anywhere in the module."""
    bindings = _Bindings(name)
    wrapper.module.visit(bindings)
    if isinstance(ran.func, cst.Attribute):
        return [value for target, value in bindings.found if not isinstance(target, cst.Name)]
    scope = wrapper.resolve(ScopeProvider).get(ran)
    seen = {getattr(a, "node", None) for a in scope[name]} if scope is not None else set()
    return [value for target, value in bindings.found if target in seen]


class _Bindings(cst.CSTVisitor):
    """Everything in a module that a name, or an attribute of that name, is bound to.

    Attributes:
        found: (what is bound, the value): a name, an attribute, or the function itself.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []
        self._name = name

    def visit_Assign(self, node: cst.Assign) -> None:
        self.found += [(t.target, node.value) for t in node.targets if _last_name(t.target) == self._name]

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if node.value is not None and _last_name(node.target) == self._name:
            self.found.append((node.target, node.value))

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        if _last_name(node.target) == self._name:
            self.found.append((node.target, node.value))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if node.name.value == self._name:
            # the outermost decorator is what is called
            self.found.append((node, node.decorators[0].decorator if node.decorators else node))


def _last_name(node: cst.BaseExpression) -> str | None:
    """``scale`` of ``scale``, ``self.scale`` and ``module.scale``."""
    name = node.attr if isinstance(node, cst.Attribute) else node
    return name.value if isinstance(name, cst.Name) else None


def _is_partial(call: cst.Call) -> bool:
    """Whether it is ``functools.partial(...)``."""
    return _last_name(call.func) == "partial"

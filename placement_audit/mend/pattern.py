"""Finds the method that gathers a data-parallel parameter, by what it does.

The parameter leaves DTensor (``to_local``), comes back on the data-parallel mesh (``from_local``), is gathered there
(``redistribute``), leaves again (``to_local`` that says how its gradient is to be reduced) and ends as a DTensor on
the other mesh dims (``from_local``), with mesh and placements taken from the end of the parameter's own. Names of
variables, comments and line numbers say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from placement_audit.mend.flow import Flow, Statement, code, dotted, nodes
from placement_audit.mend.unfold import TooLate, unfolded

METHOD = "replicate_compute"


class NotFound(Exception):
    """There is no such method here, or it does something else; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """The method and its five calls.

    Attributes:
        owner: the class.
        method: of that class.
        flow: its statements.
        param: the name of the parameter that is gathered.
        leave: ``to_local`` of the parameter.
        rewrap: ``from_local`` onto the data-parallel mesh.
        gather: ``redistribute`` on that mesh.
        local: ``to_local`` of what was gathered.
        wrap: ``from_local`` onto the other mesh dims.
        dp_mesh: the expression for the data-parallel mesh, good at the first call.
        mesh: for the other mesh dims' mesh, good at the first call.
        placements: for the parameter's placements there, good at the first call.
    """

    owner: cst.ClassDef
    method: cst.FunctionDef
    flow: Flow
    param: str
    leave: cst.Call
    rewrap: cst.Call
    gather: cst.Call
    local: cst.Call
    wrap: cst.Call
    dp_mesh: cst.BaseExpression
    mesh: cst.BaseExpression
    placements: cst.BaseExpression

    @property
    def mesh_attribute(self) -> str | None:
        """The attribute of the object with the data-parallel mesh; None where it is none."""
        head, _, name = dotted(self.flow.value(self.dp_mesh, self.first)[0]).rpartition(".")
        return name if head == "self" else None

    @property
    def first(self) -> Statement:
        """The statement of the first call."""
        return self.flow.owner[id(self.leave)]


def find(module: cst.Module) -> Gather:
    """Find the method.

    Raises:
        NotFound: none, more than one, or one that does something else.
    """
    methods = _methods(module)
    if not methods:
        raise NotFound(f"no class here has a method {METHOD}(self, parameter)")
    if len(methods) > 1:
        raise NotFound(f"{len(methods)} classes here have a method {METHOD}: {_listed(methods)}")
    owner, method = methods[0]
    who = f"{owner.name.value}.{METHOD}"
    params = method.params.params
    if len(params) != 2 or method.params.kwonly_params or method.params.star_kwarg:
        raise NotFound(f"{who} takes other arguments than self and one parameter")
    flow = Flow(method)
    wraps = [call for call in flow.calls() if _is(call, "from_local")]
    found: list[Gather] = []
    reasons: list[tuple[int, int, str]] = []
    for at, wrap in enumerate(wraps):
        try:
            found.append(_back(owner, method, flow, params[1].name.value, wrap))
        except _Broken as broken:
            reasons.append((broken.links, at, broken.why))
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"{who} gathers its parameter in {len(found)} places")
    why = max(reasons)[2] if reasons else "it calls no DTensor.from_local"
    raise NotFound(f"{who} does not gather its parameter in the way that is known: {why}")


def argument(call: cst.Call, name: str, position: int | None = None) -> cst.BaseExpression | None:
    """One argument of a call, by keyword or position; None where it is not given or is None."""
    for index, arg in enumerate(call.args):
        by_name = arg.keyword is not None and arg.keyword.value == name
        if by_name or (arg.keyword is None and not arg.star and index == position):
            return None if dotted(arg.value) == "None" else arg.value
    return None


# --------------------------------------------------------------------------- the chain, from its end


class _Broken(Exception):
    def __init__(self, links: int, why: str) -> None:
        super().__init__(why)
        self.links = links
        self.why = why


def _back(owner: cst.ClassDef, method: cst.FunctionDef, flow: Flow, param: str, wrap: cst.Call) -> Gather:
    """Follow a ``from_local`` back to the parameter."""
    local, at = _source(flow, wrap, argument(wrap, "local_tensor", 0), "to_local", 0)
    if dotted(_receiver(local)) == param:
        raise _Broken(0, f"what comes of '{_short(wrap)}' does not end as a DTensor on the other mesh dims")
    if argument(local, "grad_placements", 0) is None:
        raise _Broken(
            1, f"'{_short(local)}' does not say grad_placements, so nothing reduces over data parallel"
        )
    gather, at = _source(flow, at, _receiver(local), "redistribute", 1)
    rewrap, at = _source(flow, at, _receiver(gather), "from_local", 2)
    leave, at = _source(flow, at, argument(rewrap, "local_tensor", 0), "to_local", 3)
    if dotted(_receiver(leave)) != param:
        raise _Broken(4, f"'{_short(leave)}' is not a call on the parameter {param} itself")
    first = flow.owner[id(leave)]
    if not isinstance(first, cst.SimpleStatementLine):
        raise _Broken(4, f"'{_short(leave)}' is part of a compound statement")
    _check_end(flow, param, wrap)
    dp_mesh, mesh = argument(rewrap, "device_mesh", 1), argument(wrap, "device_mesh", 1)
    placements = argument(wrap, "placements", 2)
    if dp_mesh is None or mesh is None or placements is None:
        raise _Broken(4, f"'{_short(rewrap)}' or '{_short(wrap)}' names no mesh")
    return Gather(
        owner=owner,
        method=method,
        flow=flow,
        param=param,
        leave=leave,
        rewrap=rewrap,
        gather=gather,
        local=local,
        wrap=wrap,
        dp_mesh=_early(flow, dp_mesh, rewrap, first),
        mesh=_early(flow, mesh, wrap, first),
        placements=_early(flow, placements, wrap, first),
    )


def _source(
    flow: Flow, at: cst.CSTNode, node: cst.BaseExpression | None, wanted: str, links: int
) -> tuple[cst.Call, Statement]:
    """The call that an expression's value comes from."""
    if node is None:
        raise _Broken(links, f"'{_short(at)}' is given no tensor by position")
    value, where = flow.value(node, flow.owner[id(at)])
    if not (isinstance(value, cst.Call) and _is(value, wanted)):
        raise _Broken(links, f"'{_short(value)}' stands where a {wanted} is expected")
    return value, where


def _check_end(flow: Flow, param: str, wrap: cst.Call) -> None:
    """The last call takes its placements from the end of the parameter's: data parallel comes first."""
    given = argument(wrap, "placements", 2)
    if given is None:
        raise _Broken(4, f"'{_short(wrap)}' names no placements")
    if any(_is_end(node, param) for node in _expanded(flow, given, flow.owner[id(wrap)])):
        return
    raise _Broken(4, f"the placements of '{_short(wrap)}' are not seen to be the last of {param}'s own")


def _is_end(node: cst.CSTNode, param: str) -> bool:
    match node:
        case cst.Subscript(value=value, slice=[cst.SubscriptElement(slice=part)]) if is_placements(
            value, param
        ):
            if isinstance(part, cst.Slice):
                return part.lower is not None and part.upper is None and part.step is None
            return isinstance(part, cst.Index) and isinstance(part.value, cst.UnaryOperation)
    return False


def is_placements(node: cst.BaseExpression, param: str) -> bool:
    """Whether an expression is the parameter's own placements, all of them."""
    match node:
        case cst.Call(func=cst.Name(value="tuple" | "list"), args=[cst.Arg(value=value)]):
            return is_placements(value, param)
    return dotted(node) in (f"{param}.placements", f"{param}._spec.placements")


def _expanded(flow: Flow, node: cst.BaseExpression, at: Statement) -> list[cst.CSTNode]:
    """All nodes of an expression and of what its names stand for."""
    found: list[cst.CSTNode] = []
    todo = [(node, at)]
    seen: set[int] = set()
    while todo:
        node, at = todo.pop()
        for one in nodes(node):
            found.append(one)
            binding = flow.binding(one.value, at) if isinstance(one, cst.Name) else None
            if binding and binding.value and id(binding.value) not in seen:
                seen.add(id(binding.value))
                todo.append((binding.value, binding.statement))
    return found


def _early(flow: Flow, node: cst.BaseExpression, call: cst.Call, first: Statement) -> cst.BaseExpression:
    try:
        return unfolded(flow, node, flow.owner[id(call)], first)
    except TooLate as name:
        raise _Broken(4, f"'{name}' is only known after the parameter has left DTensor") from None


def _methods(module: cst.Module) -> list[tuple[cst.ClassDef, cst.FunctionDef]]:
    return [
        (owner, method)
        for owner in nodes(module)
        if isinstance(owner, cst.ClassDef)
        for method in owner.body.body
        if isinstance(method, cst.FunctionDef) and method.name.value == METHOD
    ]


def _listed(methods: list[tuple[cst.ClassDef, cst.FunctionDef]]) -> str:
    return ", ".join(owner.name.value for owner, _ in methods)


def _is(call: cst.Call, name: str) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == name


def _receiver(call: cst.Call) -> cst.BaseExpression:
    assert isinstance(call.func, cst.Attribute)
    return call.func.value


def _short(node: cst.CSTNode) -> str:
    text = " ".join(code(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."

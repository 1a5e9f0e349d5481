"""The mend of the class cache: a class that closes over something is shared only where that is the same.

The function that turns parameters into properties makes one class per module class, and keeps it for the life of the
process. The properties call the object that gathers parameters, which is not part of the cache's key: a second model
in the process, on another mesh or with other dtypes, gathers with the first one's. Mended, the key holds all that
the gathering method reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from placement_audit.mend import pattern
from placement_audit.mend.edit import Edits
from placement_audit.mend.flow import Flow, bound, code, dotted, names, nodes
from placement_audit.mend.pattern import Gather, NotFound, argument
from placement_audit.mend.result import Part, State
from placement_audit.mend.wrapper import Wrapper, find_wrapper

NAME = "class cache"

_COMMENT = "# placement-audit: the class that is kept calls {}, so the key says what that does."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """A kept class.

    Attributes:
        wrapper: the function that makes it.
        flow: its statements.
        name: of the cache.
        keys: expressions that the cache is asked with, names followed.
    """

    wrapper: Wrapper
    flow: Flow
    name: str
    keys: tuple[cst.BaseExpression, ...]

    @property
    def closed(self) -> str:
        return self.wrapper.closed


def mend(text: str) -> Part:
    """Look at a file, and write the mend into it.

    Args:
        text: of the file.

    Returns:
        What was found, and the new text.
    """
    module = cst.parse_module(text)

    def part(state: State, reason: str, node: cst.CSTNode | None = None, new: str = text) -> Part:
        return Part(name=NAME, state=state, line=_line(module, node) if node else 0, reason=reason, text=new)

    cache = _find(module)
    if cache is None:
        return part(State.ABSENT, "no class that closes over an argument is kept here.")
    first = cache.keys[0]
    bare = [key for key in cache.keys if cache.closed not in names(key)]
    if not bare:
        return part(State.APPLIED, f"the key of {cache.name} depends on {cache.closed}.", first)
    try:
        gather = pattern.find(module)
    except NotFound as why:
        return part(State.REFUSED, f"{cache.name} leaves {cache.closed} out of its key, and {why}.", first)
    if not _made_of(module, cache, gather):
        why = f"{cache.closed} is not seen to be a {gather.owner.name.value}"
        return part(State.REFUSED, f"{cache.name} leaves {cache.closed} out of its key, and {why}.", first)
    reason = f"the key of {cache.name} leaves out {cache.closed}: a second model in the process gets the first one's."
    return part(State.NOT_APPLIED, reason, first, _keyed(module, cache, gather, bare))


# --------------------------------------------------------------------------- what is there


def _find(module: cst.Module) -> _Cache | None:
    wrapper = find_wrapper(module)
    if wrapper is None:
        return None
    flow = Flow(wrapper.function)
    stores = {name for statement in module.body for name in _dict_name(statement)}
    for store in sorted(stores & set(names(wrapper.function.body))):
        keys = {id(key): key for key in _keys(flow, store)}
        if keys:
            return _Cache(wrapper=wrapper, flow=flow, name=store, keys=tuple(keys.values()))
    return None


def _dict_name(statement: cst.CSTNode) -> Iterator[str]:
    """The name that a statement of a module gives to an empty dict."""
    for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
        match small:
            case (
                cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value)
                | cst.AnnAssign(target=cst.Name(value=name), value=value)
            ) if value is not None:
                match value:
                    case cst.Dict(elements=[]) | cst.Call(args=[]):
                        yield name


def _keys(flow: Flow, store: str) -> Iterator[cst.BaseExpression]:
    for node in nodes(flow.function.body):
        match node:
            case cst.Subscript(
                value=cst.Name(value=name), slice=[cst.SubscriptElement(slice=cst.Index(value=key))]
            ):
                pass
            case cst.Call(func=cst.Attribute(value=cst.Name(value=name)), args=[cst.Arg(value=key), *_]):
                pass
            case cst.Comparison(
                left=key,
                comparisons=[
                    cst.ComparisonTarget(operator=cst.In() | cst.NotIn(), comparator=cst.Name(value=name))
                ],
            ):
                pass
            case _:
                continue
        if name == store:
            yield flow.value(key, flow.owner[id(node)])[0]


def _made_of(module: cst.Module, cache: _Cache, gather: Gather) -> bool:
    """Whether the function is somewhere given a new object of the gathering class."""
    order = [param.name.value for param in cache.wrapper.function.params.params]
    at = order.index(cache.closed) if cache.closed in order else None
    for node in nodes(module):
        if isinstance(node, cst.Call) and dotted(node.func) == cache.wrapper.function.name.value:
            given = argument(node, cache.closed, at)
            if isinstance(given, cst.Call) and dotted(given.func) == gather.owner.name.value:
                return True
    return False


# --------------------------------------------------------------------------- the key


def _keyed(module: cst.Module, cache: _Cache, gather: Gather, keys: list[cst.BaseExpression]) -> str:
    around = dict.fromkeys(_sequences(gather), "tuple")
    if gather.mesh_attribute is not None:
        # Equal meshes may stand on process groups of which one is gone.
        around[gather.mesh_attribute] = "id"
    read = [(around.get(one), f"{cache.closed}.{one}") for one in _read(gather)]
    more = [f"{call}({one})" if call else one for call, one in read]
    indent = module.default_indent
    edits = Edits()
    for key in keys:
        own = [code(element) for element in key.elements] if isinstance(key, cst.Tuple) else [code(key)]
        own = [text.strip().rstrip(",") for text in own]
        lines = "".join(f"{indent}{text},\n" for text in [*own, *more])
        edits.replace[id(key)] = cst.parse_expression(f"(\n{lines})")
    statement = cache.flow.owner[id(keys[0])]
    comment = cst.EmptyLine(comment=cst.Comment(_COMMENT.format(cache.closed)))
    edits.above[id(statement)] = [comment]
    for statement in module.body:
        if cache.name in bound(statement):
            edits.replace |= _annotation(statement)
    return edits.apply(module, cache.flow).code


def _annotation(statement: cst.CSTNode) -> dict[int, cst.CSTNode]:
    """``dict[tuple[...], V]`` says how long a key is; any length will do."""
    for node in nodes(statement):
        match node:
            case cst.AnnAssign(
                annotation=cst.Annotation(
                    annotation=cst.Subscript(slice=[cst.SubscriptElement(slice=cst.Index(value=key)), _])
                )
            ):
                match key:
                    case cst.Subscript(value=cst.Name(value="tuple")):
                        return {id(key): cst.parse_expression("tuple[object, ...]")}
    return {}


def _read(gather: Gather) -> list[str]:
    """Attributes that the gathering method reads."""
    methods = {one.name.value for one in gather.owner.body.body if isinstance(one, cst.FunctionDef)}
    found: dict[str, None] = {}
    for node in nodes(gather.method.body):
        if (
            isinstance(node, cst.Attribute)
            and dotted(node.value) == "self"
            and node.attr.value not in methods
        ):
            found[node.attr.value] = None
    return list(found)


def _sequences(gather: Gather) -> set[str]:
    """Attributes given as placements: they may be lists, which are no keys."""
    given = (
        argument(gather.rewrap, "placements", 2),
        argument(gather.gather, "placements", 1),
        argument(gather.local, "grad_placements", 0),
    )
    return {dotted(one).removeprefix("self.") for one in given if one is not None}


def _line(module: cst.Module, node: cst.CSTNode) -> int:
    return MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)[node].start.line

"""Gives one boundary call of a source text the placements that a `Remedy` asks for. Text in, text out."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from placement_audit.mend.calls import added, argument, find_local_map
from placement_audit.mend.imports import Names, Refused, add_imports
from placement_audit.model import CallSite, Placement, PlacementKind
from placement_audit.verdicts import Remedy

_POSITION = {"in_grad_placements": 3, "placements": 2, "grad_placements": None}
"""Where an argument may stand without its name: in local_map, in from_local, nowhere."""

_CLASSES = ("Shard", "Replicate", "Partial")

Row = tuple[Placement, ...]


def edited(text: str, remedies: Sequence[Remedy]) -> str:
    """The text with every remedy in its place.

    Args:
        text: of the file that all remedies' call sites are in.
        remedies: what each call should say.

    Raises:
        Refused: a call cannot be found without doubt, or what it says now would have to be thrown away.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as error:
        raise Refused(f"the file cannot be parsed: {error.message}") from None
    names = Names(wrapper)
    edits: dict[cst.Call, cst.Call] = {}
    for remedy in remedies:
        call, at_call = _target(wrapper, remedy)
        new = _given(edits.get(call, call), call, at_call, remedy, names)
        if call in edits and not edits[call].deep_equals(new):
            raise Refused("two findings ask for different placements at this call")
        edits[call] = new
    module = wrapper.module.visit(_Swap(edits))
    assert isinstance(module, cst.Module)
    return add_imports(module, names.missing).code


class _Swap(cst.CSTTransformer):
    """Gives calls new arguments; calls inside them, and what they are called on, may change as well."""

    def __init__(self, edits: dict[cst.Call, cst.Call]) -> None:
        super().__init__()
        self._edits = edits

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        new = self._edits.get(original_node)
        if new is None:
            return updated_node
        if any(
            inner is not original_node and inner in self._edits for inner in _calls_in(original_node.args)
        ):
            raise Refused("a call inside this one's arguments is to be changed as well")
        return new.with_changes(func=updated_node.func)


def _calls_in(nodes: Sequence[cst.CSTNode]) -> list[cst.Call]:
    found: list[cst.Call] = []

    class Collect(cst.CSTVisitor):
        def visit_Call(self, node: cst.Call) -> None:
            found.append(node)

    for node in nodes:
        node.visit(Collect())
    return found


# --------------------------------------------------------------------------- the call


def _target(wrapper: MetadataWrapper, remedy: Remedy) -> tuple[cst.Call, cst.Call]:
    """(the call to change, the call that ran), the same unless local_map made what was called."""
    ran = _call_at(wrapper, remedy.call_site)
    if remedy.kind == "local_map":
        return find_local_map(wrapper, ran), ran
    name = ran.func.attr if isinstance(ran.func, cst.Attribute) else ran.func
    if not isinstance(name, cst.Name) or name.value != remedy.kind:
        raise Refused(f"{remedy.kind} is not called by its name here")
    return ran, ran


def _call_at(wrapper: MetadataWrapper, site: CallSite) -> cst.Call:
    """The call that ends where the site ends: no two calls share their closing bracket."""
    if site.span is None:
        raise Refused("the call's position in its line is not known")
    positions = wrapper.resolve(PositionProvider)
    end = site.span[2:]
    for node in _calls_in([wrapper.module]):
        where = positions[node]
        if (where.end.line, where.end.column) == end and where.start.line <= site.span[0] <= where.end.line:
            return node
    raise Refused("no call ends where the trace saw one: the file is not the one that ran")


# --------------------------------------------------------------------------- what it says


def _given(call: cst.Call, original: cst.Call, ran: cst.Call, remedy: Remedy, names: Names) -> cst.Call:
    """The call with the remedy's argument. ``original`` stands in the tree that scopes are known of."""
    found = argument(call, remedy.argument, _POSITION[remedy.argument])
    nested = remedy.argument == "in_grad_placements"
    rows: tuple[Row | None, ...] = _by_argument(original, ran, remedy) if nested else remedy.placements
    if found is None or _is_none(found.value):
        rows_new = [cst.Name("None") if row is None else _row(row, original, names) for row in rows]
        value = cst.Tuple(_elements(rows_new)) if nested else rows_new[0]
        if found is None:
            return added(call, remedy.argument, value)
        return call.with_deep_changes(found, value=value)
    value = found.value
    if not nested:
        return call.with_deep_changes(found, value=_changed_row(value, rows[0], original, names))
    if not isinstance(value, cst.Tuple | cst.List) or len(value.elements) != len(rows):
        raise Refused(f"{remedy.argument} is computed; it says more than the placements to put in its stead")
    elements = [
        e if row is None else e.with_changes(value=_changed_row(e.value, row, original, names))
        for e, row in zip(value.elements, rows, strict=True)
    ]
    return call.with_deep_changes(found, value=value.with_changes(elements=elements))


def _by_argument(call: cst.Call, ran: cst.Call, remedy: Remedy) -> tuple[Row | None, ...]:
    """A row for each argument of the mapped function; None for one that is no DTensor."""
    declared = argument(call, "in_placements", 2)
    if declared is not None and isinstance(declared.value, cst.Tuple | cst.List):
        present = [not _is_none(e.value) for e in declared.value.elements]
    elif any(a.star or a.keyword for a in ran.args):
        raise Refused("which of the arguments are DTensors cannot be told from the code")
    else:
        present = [True] * len(ran.args)
    if sum(present) != len(remedy.placements):
        raise Refused("which of the arguments are DTensors cannot be told from the code")
    rows = iter(remedy.placements)
    return tuple(next(rows) if here else None for here in present)


def _changed_row(
    value: cst.BaseExpression, row: Row | None, at: cst.Call, names: Names
) -> cst.BaseExpression:
    """A list of placements with those that differ put right; the rest stays as it is written."""
    assert row is not None
    if _is_none(value):
        return _row(row, at, names)
    if not isinstance(value, cst.Tuple | cst.List) or len(value.elements) != len(row):
        raise Refused("the placements given now are computed; other calls of this line may need them")
    elements = []
    for element, placement in zip(value.elements, row, strict=True):
        written = _read(element.value)
        if written is None:
            raise Refused("the placements given now are computed; other calls of this line may need them")
        same = written == placement
        elements.append(element if same else element.with_changes(value=_spelled(placement, at, names)))
    return value.with_changes(elements=elements)


def _read(value: cst.BaseExpression) -> Placement | None:
    """The placement that ``Shard(0)``, ``Replicate()`` or ``Partial("sum")`` spells; None for anything else."""
    if not isinstance(value, cst.Call) or len(value.args) > 1:
        return None
    name = value.func.attr if isinstance(value.func, cst.Attribute) else value.func
    if not isinstance(name, cst.Name) or name.value not in _CLASSES:
        return None
    given = value.args[0].value if value.args else None
    match name.value, given:
        case "Shard", cst.Integer():
            return Placement(PlacementKind.SHARD, tensor_dim=int(given.value))
        case "Replicate", None:
            return Placement(PlacementKind.REPLICATE)
        case "Partial", None:
            return Placement(PlacementKind.PARTIAL, reduce_op="sum")
        case "Partial", cst.SimpleString():
            return Placement(PlacementKind.PARTIAL, reduce_op=str(given.evaluated_value))
    return None


def _row(row: Row, at: cst.Call, names: Names) -> cst.List:
    return cst.List(_elements([_spelled(p, at, names) for p in row]))


def _elements(values: Sequence[cst.BaseExpression]) -> list[cst.Element]:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = len(values) - 1
    return [cst.Element(v) if i == last else cst.Element(v, comma=comma) for i, v in enumerate(values)]


def _spelled(placement: Placement, at: cst.Call, names: Names) -> cst.BaseExpression:
    match placement.kind:
        case PlacementKind.SHARD:
            code = f"{names.spell('Shard', at)}({placement.tensor_dim})"
        case PlacementKind.REPLICATE:
            code = f"{names.spell('Replicate', at)}()"
        case PlacementKind.PARTIAL:
            op = "" if placement.reduce_op == "sum" else f'"{placement.reduce_op}"'
            code = f"{names.spell('Partial', at)}({op})"
        case _:
            raise Refused("one of the placements is a strided shard, which torch has no public name for")
    return cst.parse_expression(code)


def _is_none(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Name) and value.value == "None"

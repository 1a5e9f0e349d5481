"""The mend of ``replicate_compute``: when, and in which dtype, a replicated weight's gradient is summed.

Between the parameter and the gathered tensor DTensor sees the data-parallel mesh alone. As released, the last
``from_local`` sums the other mesh dims' terms of the gradient early: before the data-parallel reduction, on the whole
weight, in the compute dtype. `placement_audit.mend.insert` says what the mended method does. Said at one end only, as
torchtitan's PR 2532 has it, the sum is made twice or never.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from placement_audit.mend import pattern
from placement_audit.mend.flow import code, nodes, same
from placement_audit.mend.insert import KEYWORD, inserted
from placement_audit.mend.pattern import Gather, NotFound, argument, is_placements
from placement_audit.mend.result import Form, Part, State
from placement_audit.mend.strip import stripped
from placement_audit.mend.torch_names import mentions_partial

NAME = pattern.METHOD

_AUDIT = "Audit it to learn whether it is right; --force puts placement-audit's form in its place."


def mend(text: str, form: Form, *, force: bool = False) -> Part:
    """Look at a file, and write the mend into it.

    Args:
        text: of the file.
        form: of the mend.
        force: replace, too, what says something at both ends in a way that is not ours.

    Returns:
        What was found, and the new text.
    """
    module = cst.parse_module(text)
    try:
        gather = pattern.find(module)
        base = stripped(module, gather)
        made = {one: inserted(base, one) for one in Form}
        state, reason = _state(module, gather, made, form)
    except NotFound as why:
        return Part(name=NAME, state=State.REFUSED, line=_method_line(module), reason=f"{why}.", text=text)
    keep = state is State.APPLIED or (state is State.REFUSED and not force)
    return Part(
        name=NAME,
        state=state,
        line=_line(module, gather.leave),
        reason=reason,
        text=text if keep else made[form].code,
    )


def _state(module: cst.Module, gather: Gather, made: dict[Form, cst.Module], form: Form) -> tuple[State, str]:
    for one, mended in made.items():
        if _same(mended, module):
            if one is form:
                return State.APPLIED, f"in the {one} form."
            return State.OTHER_FORM, f"in the {one} form, not the {form} one."
    first, last = _ends(module, gather)
    calls = f"the first call ('{_short(gather.leave)}')", f"the last ('{_short(gather.wrap)}')"
    match first, last:
        case "unread", _:
            return State.REFUSED, f"what {calls[0]} says about the gradient cannot be read. {_AUDIT}"
        case _, "unread":
            return State.REFUSED, f"what {calls[1]} says about the gradient cannot be read. {_AUDIT}"
        case "partial", "nothing":
            return State.WRONG, (
                f"only {calls[0]} says that the gradient is Partial, as in torchtitan's PR 2532. {_up(calls[1])} has "
                "summed it by then, and it is summed again: too large by the mesh dim's size."
            )
        case "nothing", "partial":
            return State.WRONG, (
                f"only {calls[1]} says that the gradient is Partial. {_up(calls[0])} calls it complete, and it is "
                "never summed."
            )
        case "partial", "partial":
            return State.REFUSED, f"both ends say Partial, in a way that is not placement-audit's. {_AUDIT}"
    return State.NOT_APPLIED, (
        "a replicated weight's gradient is summed before the data-parallel reduction, in the compute dtype, by "
        f"'{_short(gather.wrap)}'."
    )


def _ends(module: cst.Module, gather: Gather) -> tuple[str, str]:
    """What each end says of the gradient: "nothing" but its default, "partial", or "unread"."""
    default = argument(gather.wrap, "placements", 2)
    return (
        _says(module, gather, gather.leave, 0, lambda node: is_placements(node, gather.param)),
        _says(module, gather, gather.wrap, None, lambda node: default is not None and same(node, default)),
    )


def _says(
    module: cst.Module,
    gather: Gather,
    call: cst.Call,
    position: int | None,
    is_default: Callable[[cst.BaseExpression], bool],
) -> str:
    given = argument(call, KEYWORD, position)
    if given is None:
        return "nothing"
    value, _ = gather.flow.value(given, gather.flow.owner[id(call)])
    if is_default(given) or is_default(value):
        return "nothing"
    return "partial" if mentions_partial(module, gather, given) else "unread"


def _same(one: cst.Module, other: cst.Module) -> bool:
    """Whether two files are the same program, however they are laid out."""
    try:
        return ast.dump(ast.parse(one.code)) == ast.dump(ast.parse(other.code))
    except SyntaxError:  # of a Python newer than the one that runs
        return one.code == other.code


def _line(module: cst.Module, node: cst.CSTNode) -> int:
    return MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)[node].start.line


def _method_line(module: cst.Module) -> int:
    for node in nodes(module):
        if isinstance(node, cst.FunctionDef) and node.name.value == pattern.METHOD:
            return _line(module, node.name)
    return 0


def _short(node: cst.CSTNode) -> str:
    return " ".join(code(node).split()).replace("( ", "(").replace(" )", ")")


def _up(text: str) -> str:
    return text[:1].upper() + text[1:]

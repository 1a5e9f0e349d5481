"""Writes the mend of ``replicate_compute`` into a file that has none, in either form.

A weight that all other mesh dims replicate takes one ``redistribute`` from its own placements to the gathered ones;
all other weights go as released. A function of ours takes the data-parallel mesh dims off the gathered tensor.
Backward it puts them on again and leaves what arrives Partial as it is, so nothing is assumed about what arrives.
Then, reduced, comes one reduction over data parallel and one over the rest, on one rank's part and in the reduce
dtype; deferred, the first of them, and ``.grad`` is left Partial.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from placement_audit.mend import pattern
from placement_audit.mend.edit import Edits, statements
from placement_audit.mend.flow import Statement, code, dotted, names, nodes
from placement_audit.mend.helpers import GATHERED, JOIN, NAMES, helpers
from placement_audit.mend.pattern import Gather, NotFound, argument
from placement_audit.mend.result import Form
from placement_audit.mend.wrapper import find_wrapper

KEYWORD = "grad_placements"

_ABOUT = {
    Form.REDUCED: (
        "# placement-audit: a weight that the other mesh dims replicate is gathered in one",
        "# redistribute, whose backward sums over data parallel first and over the rest",
        "# after, on one rank's part and in the reduce dtype.",
    ),
    Form.DEFERRED: (
        "# placement-audit: the gradient of a weight that the other mesh dims replicate is",
        "# summed over data parallel here; the sum over the rest is left to its readers.",
    ),
}
OURS = frozenset(line for lines in _ABOUT.values() for line in lines)


def inserted(base: cst.Module, form: Form) -> cst.Module:
    """Write the mend.

    Args:
        base: a file with the method as released.
        form: of the mend.

    Raises:
        NotFound: it cannot be written here.
    """
    gather = pattern.find(base)
    for name in NAMES:
        if any(isinstance(node, cst.Name) and node.value == name for node in nodes(base)):
            raise NotFound(f"the name {name} is taken in this file")
    if not _ends_there(gather):
        raise NotFound(f"{gather.owner.name.value}.{pattern.METHOD} does more with what it has gathered")
    edits = Edits()
    edits.insert[id(gather.first)] = statements(_branch(gather, form), base.default_indent)
    if form is Form.REDUCED and (join := _joined(base, gather, edits)):
        mesh, dp_grads = join
        extra = {"device_mesh": mesh, "grad_placements": dp_grads}
    else:
        extra = None
    edits.insert[id(_top(base, gather))] = helpers(base, form, extra)
    return edits.apply(base, gather.flow)


def _branch(gather: Gather, form: Form) -> list[str]:
    """What the method does with a replicated weight."""
    x = gather.param
    given = {arg.keyword.value: code(arg.value) for arg in gather.gather.args if arg.keyword}
    compute, dp_grads = argument(gather.gather, "placements", 1), argument(gather.local, KEYWORD, 0)
    if compute is None or dp_grads is None:
        raise NotFound(f"'{code(gather.gather)}' names no placements")
    backward = given.get("backward_dtype", "None")
    dtypes = ("forward_dtype", "backward_dtype") if form is Form.REDUCED else ("forward_dtype",)
    non_dp, whole = _fresh("non_dp", gather), _fresh("whole", gather)
    source = x if form is Form.REDUCED else f"{x}.detach()"
    to = [f"placements=[*{code(compute)}, *{non_dp}]"]
    to += [f"{name}={given[name]}" for name in dtypes if name in given]
    passed = [whole, _flat(gather.mesh), f"tuple({code(dp_grads)})"]
    if form is Form.DEFERRED:
        passed = [x, *passed, backward]
    return [
        "".join(f"{line}\n" for line in _ABOUT[form]) + f"{non_dp} = {_flat(gather.placements)}\n",
        f"if all(placement.is_replicate() for placement in {non_dp}):\n"
        f"\t{whole} = {source}.redistribute({_lines(to)})\n"
        f"\treturn {GATHERED}({_lines(passed)})\n",
    ]


def _lines(args: list[str]) -> str:
    return "\n" + "".join(f"\t\t{arg},\n" for arg in args) + "\t"


def _flat(node: cst.BaseExpression) -> str:
    """An expression on one line; one of names and slices has no strings or comments that could suffer."""
    return " ".join(code(node).split()).replace("( ", "(").replace(" )", ")").replace(",)]", ")]")


def _joined(base: cst.Module, gather: Gather, edits: Edits) -> tuple[str, str] | None:
    """Let the function that makes the wrapper classes see to one group for both reductions.

    Returns:
        The attributes of the gathering object with the data-parallel mesh and gradient placements; None where
        there is no such function.
    """
    held = argument(gather.local, KEYWORD, 0)
    head, _, dp_grads = dotted(held).rpartition(".") if held else ("", "", "")
    wrapper = find_wrapper(base)
    if wrapper is None or head != "self" or gather.mesh_attribute is None:
        return None
    call = f"{JOIN}({wrapper.module}, {wrapper.closed})\n"
    edits.insert[id(wrapper.first)] = statements([call], base.default_indent)
    return gather.mesh_attribute, dp_grads


def _ends_there(gather: Gather) -> bool:
    """Whether nothing comes after the last call but the return of what it gave."""
    at: Statement | None = gather.flow.owner[id(gather.wrap)]
    match at:
        case cst.SimpleStatementLine(body=[cst.Return(value=value)]) if value is gather.wrap:
            return True
        case cst.SimpleStatementLine(
            body=[cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]) as one]
        ):
            if one.value is not gather.wrap:
                return False
        case _:
            return False
    while at is not None:
        place = gather.flow.places[id(at)]
        for after in place.siblings[place.index + 1 :]:
            match after:
                case cst.SimpleStatementLine(body=[cst.Return(value=value)]) if value is not None:
                    return dotted(value) == name
                case _:
                    return False
        at = place.parent
    return False


def _top(base: cst.Module, gather: Gather) -> Statement:
    """The statement of the file that the class is in."""
    for statement in base.body:
        if any(node is gather.owner for node in nodes(statement)):
            return statement
    raise NotFound(f"{gather.owner.name.value} is not at the top of the file")


def _fresh(name: str, gather: Gather) -> str:
    taken = {*names(gather.method.body), *names(gather.method.params)}
    return next(one for one in _numbered(name) if one not in taken)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1

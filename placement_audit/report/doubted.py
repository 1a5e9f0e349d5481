"""What becomes of a value that one device would hardly have, from op to op, as edges of a way. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from placement_audit.report.route import CARRIED, FAULT, Edge, labels_of
from placement_audit.rules.values import how_often
from placement_audit.tracing import ParamRecord, ValueDoubt

KINDS = {
    "PA107": "added",
    "PA108": "applied",
    "PA109": "declared",
    "PA110": "averaged",
    "PA111": "left_out",
    "PA404": "updated",
}
"""The kind of doubt that a rule's findings are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an op does to the value.

    Attributes:
        into: before it.
        out: after it.
        notes: what it does.
        back: it is done to the gradient that comes back.
        sums: it sums the ranks' terms.
        labels: it may be a call that gives the value a label.
        labelled: what the value then really is.
        mark: of the edge out of such a call.
        own: a parameter meets the activations in it.
    """

    into: Edge | None
    out: Edge
    notes: tuple[str, ...]
    back: bool = False
    sums: bool = False
    labels: bool = False
    labelled: str = ""
    mark: str = ""
    own: bool = False


def doubt_steps(x: ValueDoubt, size: int, param: ParamRecord | None) -> list[Step]:
    """The steps of a doubt, the cause first, as many as it has places.

    Args:
        x: the doubt.
        size: ranks along its mesh dim.
        param: that the finding is about; None for none.
    """
    match x.kind:
        case "added":
            return list(_added(x, size, param))
        case "applied":
            return list(_applied(x))
        case "updated":
            return list(_updated(x, param))
        case "averaged":
            return [
                Step(
                    into=_plain(f"{_at(x)}, in parts of different sizes", far=True),
                    out=_plain(f"{x.op} of each rank's part", FAULT),
                    notes=("an element of a small part weighs more",),
                )
            ]
        case "left_out":
            labels = ((x.mesh_dim, x.carried.short()),)
            return [
                Step(
                    into=Edge(labels=labels, far=True),
                    out=Edge(labels=None, mark=FAULT, really="handed on as it came"),
                    notes=(
                        "its backward is left to nll_loss's",
                        "the gradient that comes is not nll_loss's",
                    ),
                    back=True,
                )
            ]
        case _:
            label = ((x.mesh_dim, x.declared.short()),) if x.declared is not None else None
            return [
                Step(
                    into=_plain(_at(x), far=True),
                    out=Edge(labels=label, mark=FAULT, really=_at(x)),
                    notes=("the label is not what the value is",),
                    labels=True,
                    labelled=_at(x),
                    mark=FAULT,
                )
            ]


def _added(x: ValueDoubt, size: int, param: ParamRecord | None) -> Iterator[Step]:
    """A parameter's own way leads into the op; else it is the term's."""
    names = _names(x)
    into, own = _plain(_at(x), far=True), False
    if param is not None:
        use = next((u for u in param.uses if (u.op, u.call_site) == (x.op, x.call_site)), None)
        own = use is not None
        into = Edge(labels=(), far=True) if use is None else Edge(labels=labels_of(use.layout))
    inside = f"{names} in each of the {size} terms"
    yield Step(
        into=into,
        out=_plain(f"{_at(x)}, {inside}", FAULT),
        notes=(f"adds {names} to each rank's term of a sum over {x.mesh_dim}",),
        own=own,
    )
    yield Step(
        into=_plain(f"{_at(x)}, {inside}", CARRIED),
        out=Edge(labels=None, mark=CARRIED, really=f"with {names} in it {how_often(x, size)}"),
        notes=(f"the terms are summed over {x.mesh_dim}",),
        sums=True,
        labels=True,
        labelled=inside,
        mark=CARRIED,
    )


def _applied(x: ValueDoubt) -> Iterator[Step]:
    of = f"{x.op} of each rank's term"
    yield Step(
        into=_plain(_at(x), far=True),
        out=_plain(of, FAULT),
        notes=(f"each rank of {x.mesh_dim} holds one term: the sum comes first",),
    )
    yield Step(
        into=_plain(of, CARRIED),
        out=Edge(labels=None, mark=CARRIED, really=f"a sum of {of}"),
        notes=(f"the ranks' results are summed over {x.mesh_dim}",),
        sums=True,
        labels=True,
        labelled=of,
        mark=CARRIED,
    )


def _updated(x: ValueDoubt, param: ParamRecord | None) -> Iterator[Step]:
    of = f"{x.op} of each rank's part"
    layout = labels_of(param.layout) if param is not None else None
    yield Step(
        into=_plain(_at(x), far=True),
        out=_plain(of, FAULT),
        notes=("needs the whole, and gets each rank's part",),
    )
    yield Step(
        into=_plain(of, CARRIED),
        out=Edge(labels=layout, mark=CARRIED, really=f"updated with {of}"),
        notes=("updates the parameter",),
    )


def _plain(really: str, mark: str = "", *, far: bool = False) -> Edge:
    return Edge(labels=(), really=really, mark=mark, far=far)


def _at(x: ValueDoubt) -> str:
    return f"{x.carried.short()} on {x.mesh_dim}"


def _names(x: ValueDoubt) -> str:
    """The complete values, with how often each goes in on a rank where that is not once."""
    named = []
    for fqn, n in x.counted:
        if fqn == "1":
            named.append(f"the number {float(n):g}")
        elif fqn:
            named.append(fqn if n == 1 else f"{n} x {fqn}")
    return ", ".join(named) or "a complete value"

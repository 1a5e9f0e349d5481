"""One boundary call in a source text is given placements: many spellings of it, and those that are left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement_audit.mend.boundary import edited
from placement_audit.mend.imports import Refused
from placement_audit.model import REPLICATE, CallSite, Placement, PlacementKind
from placement_audit.verdicts import Remedy

pytestmark = pytest.mark.unit

PARTIAL = Placement(PlacementKind.PARTIAL, reduce_op="sum")
AVERAGE = Placement(PlacementKind.PARTIAL, reduce_op="avg")
ROWS = Placement(PlacementKind.SHARD, tensor_dim=0)
STRIDED = Placement(PlacementKind.STRIDED_SHARD, tensor_dim=0, split_factor=2)

HERE = "\N{BLACK RIGHT-POINTING TRIANGLE}"
"""Stands right after the call that ran, where the trace says that it ends."""

IMPORTED = "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard\n\n"
MAPPED = (
    "from torch.distributed.tensor import Partial, Replicate, Shard\n"
    "from torch.distributed.tensor.experimental import local_map\n\n"
)


def remedy(marked: str, kind: str, argument: str, *rows: tuple[Placement, ...]) -> tuple[str, Remedy]:
    """The text without its mark, and what is to be said at the call before it."""
    before, mark, after = marked.partition(HERE)
    assert mark
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1)
    site = CallSite(path="f.py", line=line, function="f", span=(line, 0, line, column))
    return before + after, Remedy(
        call_site=site, kind=kind, argument=argument, placements=rows, safe=True, why=""
    )


def given(
    marked: str, kind: str = "to_local", argument: str = "grad_placements", *rows: tuple[Placement, ...]
) -> str:
    """The text after the edit."""
    text, what = remedy(marked, kind, argument, *(rows or ((PARTIAL,),)))
    return edited(text, [what])


@pytest.mark.parametrize(
    ("marked", "after"),
    [
        pytest.param(
            f"y = w.to_local(){HERE}\n", "y = w.to_local(grad_placements=[Partial()])\n", id="no argument"
        ),
        pytest.param(
            f"y = f(x.to_local(), w.to_local(){HERE}, 1)\n",
            "y = f(x.to_local(), w.to_local(grad_placements=[Partial()]), 1)\n",
            id="one of two on a line",
        ),
        pytest.param(
            f"y = f(x.to_local(){HERE}, w.to_local(), 1)\n",
            "y = f(x.to_local(grad_placements=[Partial()]), w.to_local(), 1)\n",
            id="the other of two",
        ),
        pytest.param(
            f"y = w.to_local(){HERE}.float().sum()\n",
            "y = w.to_local(grad_placements=[Partial()]).float().sum()\n",
            id="chained on",
        ),
        pytest.param(
            f"y = (\n    w.float()\n    .to_local(){HERE}\n    .sum()\n)\n",
            "y = (\n    w.float()\n    .to_local(grad_placements=[Partial()])\n    .sum()\n)\n",
            id="a chain over lines",
        ),
        pytest.param(
            f"y = w.full_tensor(){HERE}\n",
            "y = w.full_tensor(grad_placements=[Partial()])\n",
            id="full_tensor",
        ),
        pytest.param(
            f"y = w.to_local(grad_placements=None){HERE}\n",
            "y = w.to_local(grad_placements=[Partial()])\n",
            id="in place of None",
        ),
        pytest.param(
            f"y = w.to_local(grad_placements=[ Replicate() ]){HERE}\n",
            "y = w.to_local(grad_placements=[ Partial() ])\n",
            id="in place of a literal",
        ),
        pytest.param(
            f"y = w.to_local(grad_placements=(Replicate(),)){HERE}\n",
            "y = w.to_local(grad_placements=(Partial(),))\n",
            id="a tuple stays one",
        ),
        pytest.param(
            f"y = DTensor.to_local(w){HERE}\n",
            "y = DTensor.to_local(w, grad_placements=[Partial()])\n",
            id="as a function",
        ),
        pytest.param(
            f"y = w.to_local(\n    # as it is\n){HERE}\n",
            "y = w.to_local(\n    # as it is\ngrad_placements=[Partial()])\n",
            id="a comment inside",
        ),
        pytest.param(
            f"s = 'h\N{LATIN SMALL LETTER E WITH ACUTE}'; y = w.to_local(){HERE}; z = 1\n",
            "s = 'h\N{LATIN SMALL LETTER E WITH ACUTE}'; y = w.to_local(grad_placements=[Partial()]); z = 1\n",
            id="after letters of two bytes",
        ),
    ],
)
def test_a_gradient_s_placements(marked: str, after: str) -> None:
    kind = "full_tensor" if "full_tensor" in marked else "to_local"
    assert given(IMPORTED + marked, kind) == IMPORTED + after


def test_only_what_differs_is_rewritten() -> None:
    marked = f"y = w.to_local(grad_placements=[Shard( 0 ), Replicate()]){HERE}\n"
    after = "y = w.to_local(grad_placements=[Shard( 0 ), Partial()])\n"
    assert given(IMPORTED + marked, "to_local", "grad_placements", (ROWS, PARTIAL)) == IMPORTED + after


def test_an_average_is_spelled_out() -> None:
    marked = f"y = w.to_local(){HERE}\n"
    after = 'y = w.to_local(grad_placements=[Partial("avg"), Replicate()])\n'
    assert given(IMPORTED + marked, "to_local", "grad_placements", (AVERAGE, REPLICATE)) == IMPORTED + after


@pytest.mark.parametrize(
    ("marked", "after"),
    [
        pytest.param(
            "y = DTensor.from_local(\n    w,\n    mesh,\n    [Partial()],  # bias\n"
            f"    run_check=False,  # no\n){HERE}\n",
            "y = DTensor.from_local(\n    w,\n    mesh,\n    [Partial()],  # bias\n    run_check=False,  # no\n"
            "    grad_placements=[Replicate()],\n)\n",
            id="a line each, comma at the end, comments",
        ),
        pytest.param(
            f"y = DTensor.from_local(\n    w, mesh, p\n){HERE}\n",
            "y = DTensor.from_local(\n    w, mesh, p, grad_placements=[Replicate()]\n)\n",
            id="all on a line of their own",
        ),
        pytest.param(
            f"y = DTensor.from_local(\n    w,\n    mesh,\n    p\n){HERE}\n",
            "y = DTensor.from_local(\n    w,\n    mesh,\n    p,\n    grad_placements=[Replicate()]\n)\n",
            id="a line each, no comma at the end",
        ),
        pytest.param(
            f"y = DTensor.from_local(w, mesh, p,){HERE}\n",
            "y = DTensor.from_local(w, mesh, p, grad_placements=[Replicate()],)\n",
            id="a comma at the end of a line",
        ),
        pytest.param(
            f"y = DTensor.from_local(w){HERE}\n",
            "y = DTensor.from_local(w, grad_placements=[Replicate()])\n",
            id="one argument",
        ),
    ],
)
def test_a_new_argument_is_laid_out_like_the_others(marked: str, after: str) -> None:
    text = given(IMPORTED + marked, "from_local", "grad_placements", (REPLICATE,))
    assert text == IMPORTED + after


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("from_local(b, mesh, [Partial()])", "from_local(b, mesh, [Replicate()])"),
        ("from_local(b, mesh, placements=[Partial()])", "from_local(b, mesh, placements=[Replicate()])"),
    ],
    ids=["by position", "by keyword"],
)
def test_placements_of_from_local(call: str, after: str) -> None:
    text = given(f"{IMPORTED}y = DTensor.{call}{HERE}\n", "from_local", "placements", (REPLICATE,))
    assert text == f"{IMPORTED}y = DTensor.{after}\n"


@pytest.mark.parametrize(
    ("marked", "after"),
    [
        pytest.param(
            f"f = local_map(g, [Shard(0)], ([Shard(0)], [Replicate()]), device_mesh=m)\ny = f(a, b){HERE}\n",
            "f = local_map(g, [Shard(0)], ([Shard(0)], [Replicate()]), device_mesh=m, "
            "in_grad_placements=([Shard(0)], [Partial()]))\ny = f(a, b)\n",
            id="bound to a name",
        ),
        pytest.param(
            f"f = local_map(g, out, (row, None, [Replicate()]))\ny = f(a, 3, b){HERE}\n",
            "f = local_map(g, out, (row, None, [Replicate()]), "
            "in_grad_placements=([Shard(0)], None, [Partial()]))\ny = f(a, 3, b)\n",
            id="an argument that is no DTensor",
        ),
        pytest.param(
            f"f = local_map(g, out, None, ([Shard(0)], [Replicate()]))\ny = f(a, b){HERE}\n",
            "f = local_map(g, out, None, ([Shard(0)], [Partial()]))\ny = f(a, b)\n",
            id="there already, by position",
        ),
        pytest.param(
            f"y = local_map(g, out)(a, b){HERE}\n",
            "y = local_map(g, out, in_grad_placements=([Shard(0)], [Partial()]))(a, b)\n",
            id="called at once",
        ),
        pytest.param(
            f"@local_map(\n    out_placements=out,\n)\ndef f(a, b):\n    return a * b\n\ny = f(a, b){HERE}\n",
            "@local_map(\n    out_placements=out,\n    in_grad_placements=([Shard(0)], [Partial()]),\n)\n"
            "def f(a, b):\n    return a * b\n\ny = f(a, b)\n",
            id="a decorator",
        ),
        pytest.param(
            f"@partial(local_map, out_placements=out)\ndef f(a, b):\n    return a * b\n\ny = f(a, b){HERE}\n",
            "@partial(local_map, out_placements=out, in_grad_placements=([Shard(0)], [Partial()]))\n"
            "def f(a, b):\n    return a * b\n\ny = f(a, b)\n",
            id="a decorator through functools.partial",
        ),
        pytest.param(
            f"f = partial(local_map, g, out, None, ([Shard(0)], [Replicate()]))()\n"
            f"h = partial(local_map, g, out, None, ([Shard(0)], [Replicate()]))\ny = h(a, b){HERE}\n",
            "f = partial(local_map, g, out, None, ([Shard(0)], [Replicate()]))()\n"
            "h = partial(local_map, g, out, None, ([Shard(0)], [Partial()]))\ny = h(a, b)\n",
            id="functools.partial, by position",
        ),
        pytest.param(
            f"class N:\n    def __init__(self):\n        self.f = local_map(g, out)\n\n"
            f"    def forward(self, a):\n        return self.f(a, self.w){HERE}\n",
            "class N:\n    def __init__(self):\n"
            "        self.f = local_map(g, out, in_grad_placements=([Shard(0)], [Partial()]))\n\n"
            "    def forward(self, a):\n        return self.f(a, self.w)\n",
            id="an attribute",
        ),
        pytest.param(
            f"class M:\n    def __init__(self):\n        self.f = f = g\n\n"
            f"    def forward(self, a):\n        f = local_map(g, out)\n        return f(a, self.w){HERE}\n",
            "class M:\n    def __init__(self):\n        self.f = f = g\n\n    def forward(self, a):\n"
            "        f = local_map(g, out, in_grad_placements=([Shard(0)], [Partial()]))\n"
            "        return f(a, self.w)\n",
            id="others of that name elsewhere",
        ),
        pytest.param(
            f"f = g\n\nclass M:\n    f = h\n\n    @local_map(out_placements=out)\n    def scaled(self, a): ...\n\n"
            f"    def forward(self, a):\n        return self.scaled(a, self.w){HERE}\n",
            "f = g\n\nclass M:\n    f = h\n\n"
            "    @local_map(out_placements=out, in_grad_placements=([Shard(0)], [Partial()]))\n"
            "    def scaled(self, a): ...\n\n    def forward(self, a):\n        return self.scaled(a, self.w)\n",
            id="a decorated method",
        ),
    ],
)
def test_local_map(marked: str, after: str) -> None:
    assert given(MAPPED + marked, "local_map", "in_grad_placements", (ROWS,), (PARTIAL,)) == MAPPED + after


def test_local_map_of_one_argument_gets_a_tuple_of_one() -> None:
    text = given(f"{MAPPED}y = local_map(g, out)(w){HERE}\n", "local_map", "in_grad_placements", (PARTIAL,))
    assert text.endswith("y = local_map(g, out, in_grad_placements=([Partial()],))(w)\n")


def test_local_map_under_another_name() -> None:
    head = "import torch.distributed.tensor.experimental as ex\n" + IMPORTED
    text = given(f"{head}y = ex.local_map(g, out)(w){HERE}\n", "local_map", "in_grad_placements", (PARTIAL,))
    assert text.endswith("y = ex.local_map(g, out, in_grad_placements=([Partial()],))(w)\n")


# --------------------------------------------------------------------------- imports


@pytest.mark.parametrize(
    ("head", "after", "spelled"),
    [
        pytest.param(
            "import torch\nfrom torch.distributed.tensor import DTensor, Shard\n",
            "import torch\nfrom torch.distributed.tensor import DTensor, Partial, Shard\n",
            "Partial()",
            id="in the import that is there, in its place",
        ),
        pytest.param(
            "from torch.distributed.tensor import Shard, Replicate, DTensor\n",
            "from torch.distributed.tensor import Shard, Replicate, DTensor, Partial\n",
            "Partial()",
            id="at its end where it is in no order",
        ),
        pytest.param(
            "from torch.distributed.tensor import (\n    DTensor,\n    Shard,\n)\n",
            "from torch.distributed.tensor import (\n    DTensor,\n    Partial,\n    Shard,\n)\n",
            "Partial()",
            id="over lines",
        ),
        pytest.param(
            "from torch.distributed.tensor import (\n    DTensor,  # of course\n)\n",
            "from torch.distributed.tensor import (\n    DTensor,\n    Partial,  # of course\n)\n",
            "Partial()",
            id="over lines, one name",
        ),
        pytest.param(
            '"""Doc."""\n\nfrom __future__ import annotations\n\nimport os\n\nimport torch\nfrom torch import nn\n'
            "\nimport mine\n",
            '"""Doc."""\n\nfrom __future__ import annotations\n\nimport os\n\nimport torch\nfrom torch import nn\n'
            "from torch.distributed.tensor import Partial\n\nimport mine\n",
            "Partial()",
            id="a line of its own, after torch's",
        ),
        pytest.param(
            "from torch.distributed.tensor import Partial as P\n",
            "from torch.distributed.tensor import Partial as P\n",
            "P()",
            id="an alias",
        ),
        pytest.param(
            "from torch.distributed._tensor import Partial\n",
            "from torch.distributed._tensor import Partial\n",
            "Partial()",
            id="the old home",
        ),
        pytest.param(
            "import torch.distributed.tensor as dt\n",
            "import torch.distributed.tensor as dt\n",
            "dt.Partial()",
            id="the module under an alias",
        ),
        pytest.param(
            "from torch.distributed import tensor\n",
            "from torch.distributed import tensor\n",
            "tensor.Partial()",
            id="the module by name",
        ),
        pytest.param(
            "import torch\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
            "    from torch.distributed.tensor import Partial\n",
            "import torch\nfrom torch.distributed.tensor import Partial\nfrom typing import TYPE_CHECKING\n\n"
            "if TYPE_CHECKING:\n    from torch.distributed.tensor import Partial\n",
            "Partial()",
            id="an import for typing only is none",
        ),
        pytest.param(
            "from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor\n",
            "from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor\n"
            "from torch.distributed.tensor import Partial\n",
            "Partial()",
            id="no room on the line",
        ),
    ],
)
def test_the_name_is_imported(head: str, after: str, spelled: str) -> None:
    text = given(f"{head}\ny = w.to_local(){HERE}\n")
    assert text == f"{after}\ny = w.to_local(grad_placements=[{spelled}])\n"


def test_a_file_without_imports() -> None:
    text = given(f"y = w.to_local(){HERE}\n")
    assert (
        text
        == "from torch.distributed.tensor import Partial\n\ny = w.to_local(grad_placements=[Partial()])\n"
    )


def test_line_endings_stay() -> None:
    text = given(f"import torch\r\ny = w.to_local(){HERE}\r\n")
    assert text == (
        "import torch\r\nfrom torch.distributed.tensor import Partial\r\n"
        "y = w.to_local(grad_placements=[Partial()])\r\n"
    )


# --------------------------------------------------------------------------- what is left alone


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        (f"y = w.to_local(grad_placements=grads){HERE}\n", "computed"),
        (f"y = w.to_local(grad_placements=[P]){HERE}\n", "computed"),
        (f"y = w.to_local(grad_placements=[Replicate(), Replicate()]){HERE}\n", "computed"),
        (f"y = w.to_local(grad_placements=[p for p in w.placements]){HERE}\n", "computed"),
        (f"y = w.to_local(**label){HERE}\n", "two stars"),
        (f"y = local(w){HERE}\n", "not called by its name"),
        (f"def f(w, Partial):\n    return w.to_local(){HERE}\n", "the name Partial means something else"),
        (f"y = w.to_local(w.to_local())  {HERE}\n", "no call ends"),
        (f"y = w.to_local(){HERE})\n", "cannot be parsed"),
    ],
    ids=["a name", "names in a list", "another length", "a comprehension", "stars", "an alias", "a shadowed name",
         "elsewhere", "broken"],
)  # fmt: skip
def test_refused(marked: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        given("from torch.distributed.tensor import Replicate\n" + marked)


def test_a_class_of_the_file_s_own_is_not_torch_s() -> None:
    with pytest.raises(Refused, match="the name Partial means something else in this file"):
        given(f"class Partial: ...\n\n\ny = w.to_local(){HERE}\n")


def test_a_strided_shard_has_no_public_name() -> None:
    with pytest.raises(Refused, match="strided shard"):
        given(f"y = w.to_local(){HERE}\n", "to_local", "grad_placements", (STRIDED, PARTIAL))


def test_a_site_without_columns_is_refused() -> None:
    text, what = remedy(f"y = w.to_local(){HERE}\n", "to_local", "grad_placements", (PARTIAL,))
    site = CallSite(path="f.py", line=1, function="f")
    with pytest.raises(Refused, match="position"):
        edited(
            text,
            [
                Remedy(
                    call_site=site,
                    kind=what.kind,
                    argument=what.argument,
                    placements=what.placements,
                    safe=True,
                    why="",
                )
            ],
        )


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        (f"y = f(a, b){HERE}\n", "is not in this file"),
        (f"def f(a, b): ...\n\n\ny = f(a, b){HERE}\n", "is not in this file"),
        (f"f = local_map(g, o)\nf = local_map(h, o)\ny = f(a, b){HERE}\n", "more than one"),
        (f"f = local_map(g, o)\nif x:\n    f = h\ny = f(a, b){HERE}\n", "more than one"),
        (f"x.f = local_map(g, o)\nz.f = h\ny = x.f(a, b){HERE}\n", "more than one"),
        (f"y = local_map(g, o)(*ab){HERE}\n", "which of the arguments"),
        (f"y = local_map(g, o)(a){HERE}\n", "which of the arguments"),
        (f"y = local_map(g, o, in_placements=([S], None))(a, b){HERE}\n", "which of the arguments"),
        (f"y = local_map(g, o, in_grad_placements=grads)(a, b){HERE}\n", "computed"),
        (f"y = local_map(g, *more)(a, b){HERE}\n", "with a star"),
    ],
)
def test_local_map_refused(marked: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        given(MAPPED + marked, "local_map", "in_grad_placements", (ROWS,), (PARTIAL,))


# --------------------------------------------------------------------------- several at once


def test_several_calls_in_one_go() -> None:
    marked = f"y = f(x.to_local(){HERE}, w.to_local())\nz = v.full_tensor()\n"
    text, first = remedy(marked, "to_local", "grad_placements", (ROWS,))
    _, second = remedy(marked.replace(HERE, "").replace("w.to_local()", f"w.to_local(){HERE}"), "to_local",
                       "grad_placements", (PARTIAL,))  # fmt: skip
    _, third = remedy(marked.replace(HERE, "").replace("full_tensor()", f"full_tensor(){HERE}"), "full_tensor",
                      "grad_placements", (REPLICATE,))  # fmt: skip
    assert edited(text, [third, first, second]) == (
        "from torch.distributed.tensor import Partial, Replicate, Shard\n\n"
        "y = f(x.to_local(grad_placements=[Shard(0)]), w.to_local(grad_placements=[Partial()]))\n"
        "z = v.full_tensor(grad_placements=[Replicate()])\n"
    )


def test_a_call_on_the_result_of_another() -> None:
    text, outer = remedy(f"y = w.full_tensor().to_local(){HERE}\n", "to_local", "grad_placements", (PARTIAL,))
    _, inner = remedy(f"y = w.full_tensor(){HERE}.to_local()\n", "full_tensor", "grad_placements", (PARTIAL,))
    after = "y = w.full_tensor(grad_placements=[Partial()]).to_local(grad_placements=[Partial()])\n"
    assert edited(IMPORTED + text, [moved(outer), moved(inner)]) == IMPORTED + after


def moved(what: Remedy) -> Remedy:
    """The same, where two lines of imports stand before."""
    assert what.call_site.span is not None
    line, column, end_line, end_column = what.call_site.span
    return replace(what, call_site=replace(what.call_site, span=(line + 2, column, end_line + 2, end_column)))


def test_two_wishes_at_one_call_that_contradict() -> None:
    text, first = remedy(f"y = w.to_local(){HERE}\n", "to_local", "grad_placements", (PARTIAL,))
    _, second = remedy(f"y = w.to_local(){HERE}\n", "to_local", "grad_placements", (REPLICATE,))
    with pytest.raises(Refused, match="different placements"):
        edited(text, [first, second])
    assert edited(text, [first, first]).count("grad_placements") == 1

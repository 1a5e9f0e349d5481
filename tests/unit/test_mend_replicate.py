"""The mend of replicate_compute, on text: found by what it does, written once, refused where it is not understood."""

from __future__ import annotations

import ast

import libcst as cst
import pytest
from gather_source import DATA, ENTER, FIRST_END, LAST_END, LEAVE, PARTIALS, SOURCE, edited

from placement_audit.mend import replicate
from placement_audit.mend.result import Form, Part, State

pytestmark = pytest.mark.unit

BOTH = pytest.mark.parametrize("form", list(Form))


def mend(text: str, form: Form = Form.REDUCED, *, force: bool = False) -> Part:
    return replicate.mend(text, form, force=force)


def method(text: str) -> str:
    """The mended branch of the method, as ast writes it."""
    tree = next(
        node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == "replicate_compute"
    )
    return ast.unparse(tree)


def test_reduced_form():
    part = mend(SOURCE)
    assert part.state is State.NOT_APPLIED
    assert SOURCE.splitlines()[part.line - 1] == LEAVE.rstrip("\n")
    assert "DTensor.from_local(d, rest_mesh, rest)" in part.reason
    want = """\
def replicate_compute(self, weight):
    others = weight._spec.mesh.ndim - self.mesh.ndim
    if others > 0:
        data_mesh = self.mesh
        non_dp = tuple(weight._spec.placements[-others:])
        if all((placement.is_replicate() for placement in non_dp)):
            whole = weight.redistribute(placements=[*self.full, *non_dp], forward_dtype=self.param_dtype, \
backward_dtype=self.sum_dtype)
            return _off_data_parallel(whole, weight._spec.mesh[tuple(weight._spec.mesh.mesh_dim_names[-others:])], \
tuple(self.sums))
        a = weight.to_local()
"""
    assert method(part.text).startswith(want)
    assert "    _join_reductions(target, gatherer)\n    made = {" in part.text
    assert "dp_mesh, dp_grads = gatherer" not in part.text
    assert "parametrization.mesh, parametrization.sums" in part.text


def test_deferred_form():
    text = mend(SOURCE, Form.DEFERRED).text
    assert (
        "whole = weight.detach().redistribute(placements=[*self.full, *non_dp], forward_dtype=self.param_dtype)"
        in (method(text))
    )
    assert method(text).count("tuple(self.sums), self.sum_dtype)") == 1
    assert "_join_reductions" not in text


@BOTH
def test_every_old_line_stays(form):
    new = mend(SOURCE, form).text.splitlines()
    at = 0
    for line in SOURCE.splitlines():
        at = new.index(line, at) + 1


@BOTH
def test_twice_is_once(form):
    once = mend(SOURCE, form).text
    again = mend(once, form)
    assert again.state is State.APPLIED
    assert again.text == once


@BOTH
def test_the_other_form_is_said_and_replaced(form):
    other = next(one for one in Form if one is not form)
    part = mend(mend(SOURCE, other).text, form)
    assert part.state is State.OTHER_FORM
    assert part.text == mend(SOURCE, form).text


@BOTH
def test_applied_however_it_is_laid_out(form):
    tree = ast.unparse(ast.parse(mend(SOURCE, form).text))
    assert mend(tree, form).state is State.APPLIED


@BOTH
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("backward_dtype=self.sum_dtype,\n", "backward_dtype=None,\n"),
        ("if p == Partial() else Replicate()", "if p == Partial() else Partial()"),
        ("tuple(self.sums)", "tuple(self.full)"),
    ],
)
def test_ours_with_an_edit_is_not_ours(form, old, new):
    text = mend(SOURCE, form).text
    if text.count(old) == 0:
        pytest.skip("not in this form")
    part = mend(text.replace(old, new), form)
    assert part.state is State.NOT_APPLIED
    assert part.text == text


# --------------------------------------------------------------------------- other people's mends


@pytest.mark.parametrize("spelling", FIRST_END)
def test_only_the_first_end_is_wrong_and_mended(spelling):
    part = mend(edited(FIRST_END[spelling]))
    assert part.state is State.WRONG
    assert "PR 2532" in part.reason
    assert "too large" in part.reason
    assert "grad_placements=grads" not in part.text
    assert mend(part.text).state is State.APPLIED
    if spelling != "loop":  # nobody can tell whether a loop does more
        assert part.text == mend(SOURCE).text


def test_only_the_last_end_is_wrong_and_mended():
    part = mend(edited(LAST_END))
    assert part.state is State.WRONG
    assert "never summed" in part.reason
    assert part.text == mend(SOURCE).text


def test_both_ends_by_someone_else_is_left_alone():
    theirs = edited(FIRST_END["inline"], LAST_END)
    part = mend(theirs)
    assert part.state is State.REFUSED
    assert part.text == theirs
    assert mend(theirs, force=True).text == mend(SOURCE).text


def test_both_ends_in_one_expression():
    start, end = SOURCE.index("            a = weight"), SOURCE.index("        else:\n            out")
    nested = (
        "            out = DTensor.from_local(DTensor.from_local(weight.to_local({}), data_mesh, self.layout)"
        ".redistribute(placements=self.full).to_local(grad_placements=self.sums), weight.device_mesh, "
        "weight.placements[-others:]{})\n"
    )
    plain = SOURCE[:start] + nested.format("", "") + SOURCE[end:]
    said = (
        SOURCE[:start]
        + nested.format(f"grad_placements=[*x, {PARTIALS}]", f", grad_placements={PARTIALS}")
        + SOURCE[end:]
    )
    assert mend(plain).state is State.NOT_APPLIED
    assert mend(said).state is State.REFUSED
    assert mend(said, force=True).text == mend(plain).text


@pytest.mark.parametrize(
    "edit",
    [
        (LEAVE, "            a = weight.to_local(grad_placements=weight.placements)\n"),
        (LEAVE, "            a = weight.to_local(grad_placements=tuple(weight._spec.placements))\n"),
        (LEAVE, "            a = weight.to_local(grad_placements=None)\n"),
        (ENTER, "            out = DTensor.from_local(d, rest_mesh, rest, grad_placements=rest)\n"),
    ],
)
def test_the_default_said_aloud_is_no_fault(edit):
    part = mend(edited(edit))
    assert part.state is State.NOT_APPLIED
    assert part.text == mend(SOURCE).text


def test_what_cannot_be_read_is_refused():
    text = edited((LEAVE, "            a = weight.to_local(grad_placements=labels_of(weight))\n"))
    part = mend(text)
    assert part.state is State.REFUSED
    assert "cannot be read" in part.reason
    assert part.text == text


def test_a_function_of_the_file_is_read():
    text = edited((LEAVE, "            a = weight.to_local(grad_placements=labels_of(weight))\n"))
    text += "\n\ndef labels_of(weight):\n    return [*weight.placements[:-1], Partial()]\n"
    assert mend(text).state is State.WRONG


def test_comments_of_what_goes_stay():
    text = edited(
        (
            LEAVE,
            f"            # ours, see ticket 12\n            g = {DATA} + {PARTIALS}\n"
            "            a = weight.to_local(grad_placements=g)\n",
        )
    )
    assert "# ours, see ticket 12" in mend(text).text


# --------------------------------------------------------------------------- other shapes of the same


@BOTH
@pytest.mark.parametrize(
    "edits",
    [
        # one name for everything
        [
            (LEAVE, "            t = weight.to_local()\n"),
            ("b = DTensor.from_local(a,", "t = DTensor.from_local(t,"),
            ("c = b.redistribute(", "t = t.redistribute("),
            ("d = c.to_local(", "t = t.to_local("),
            ("(d, rest_mesh", "(t, rest_mesh"),
        ],
        # in one expression
        [(LEAVE, ""), ("from_local(a, ", "from_local(weight.to_local(), ")],
        # keywords
        [
            (
                "from_local(d, rest_mesh, rest)",
                "from_local(local_tensor=d, device_mesh=rest_mesh, placements=rest)",
            )
        ],
        # unpacked
        [
            (
                "            data_mesh = self.mesh\n",
                "            data_mesh, here = self.mesh, weight.mesh\n"
                "            lead, last = weight._spec.placements\n",
            ),
            ("from_local(d, rest_mesh, rest)", "from_local(d, rest_mesh, (last,))"),
        ],
        # annotated
        [("            rest = tuple(", "            rest: tuple = tuple(")],
        # no dtype
        [(", forward_dtype=self.param_dtype, backward_dtype=self.sum_dtype)", ")")],
        # returned at once
        [(ENTER, "            return DTensor.from_local(d, rest_mesh, rest)\n")],
    ],
    ids=["one name", "nested", "keywords", "unpacked", "annotated", "no dtype", "return"],
)
def test_other_ways_to_write_it(form, edits):
    text = edited(*edits)
    part = mend(text, form)
    assert part.state is State.NOT_APPLIED
    compile(part.text, "mended", "exec")
    assert mend(part.text, form).state is State.APPLIED


def test_names_only_known_later_unfold():
    text = edited(
        ("            labels = tuple(", "            n = others\n            labels = tuple("),
        ("names[-others:]", "names[-n:]"),
    )
    assert "weight._spec.mesh[tuple(weight._spec.mesh.mesh_dim_names[-others:])]" in mend(text).text
    text = text.replace("n = others", "n = weight.ndim - self.mesh.ndim")
    assert "mesh_dim_names[-(weight.ndim - self.mesh.ndim):])]" in mend(text).text


def test_a_name_bound_anew_in_between_is_not_taken_for_the_old_one():
    text = edited(
        ("            labels = tuple(", "            others = len(rest)\n            labels = tuple(")
    )
    part = mend(text)
    assert part.state is State.REFUSED
    assert "'others' is only known after" in part.reason


@BOTH
@pytest.mark.parametrize(
    ("imports", "partial"),
    [
        ("import torch\nfrom torch.distributed.tensor import DTensor, Partial as P, Replicate\n", "P()"),
        (
            "import torch\nfrom torch.distributed.tensor import DTensor, Replicate\n",
            "torch.distributed.tensor.Partial()",
        ),
        (
            "import torch as t\nfrom torch.distributed.tensor import DTensor, Replicate\n",
            "t.distributed.tensor.Partial()",
        ),
    ],
)
def test_names_as_the_file_has_them(form, imports, partial):
    text = imports + SOURCE.split("\n", 2)[2]
    new = mend(text, form).text
    assert f"kept = [p if p == {partial} else Replicate() for p in grad.placements]" in new


def test_taken_names_are_passed_by():
    text = edited(
        (
            "            data_mesh = self.mesh\n",
            "            data_mesh = self.mesh\n            non_dp = whole = 1\n",
        )
    )
    new = mend(text).text
    assert "non_dp_2 = tuple(" in new
    assert "whole_2 = weight.redistribute(" in new


@pytest.mark.parametrize("indent", ["  ", "\t"])
def test_indents_as_the_file_has_them(indent):
    text = SOURCE.replace("    ", indent)
    new = mend(text).text
    compile(new, "mended", "exec")
    assert (
        f"\n{indent * 3}if all(placement.is_replicate() for placement in non_dp):\n{indent * 4}whole =" in new
    )
    assert mend(new).text == new


def test_line_ends_as_the_file_has_them():
    new = mend(SOURCE.replace("\n", "\r\n")).text
    assert new == mend(SOURCE).text.replace("\n", "\r\n")


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        (
            [("def replicate_compute(self, weight)", "def compute(self, weight)")],
            "no class here has a method",
        ),
        (
            [("def replicate_compute(self, weight)", "def replicate_compute(self, weight, how)")],
            "other arguments",
        ),
        ([(ENTER, "            out = d\n")], "does not end as a DTensor"),
        (
            [("d = c.to_local(grad_placements=self.sums)", "d = c.to_local()")],
            "nothing reduces over data parallel",
        ),
        ([("c = b.redistribute(", "c = full(")], "a redistribute is expected"),
        ([(LEAVE, "            a = weight._local_tensor\n")], "a to_local is expected"),
        ([(LEAVE, "            a = weight.data.to_local()\n")], "not a call on the parameter weight itself"),
        (
            [
                (
                    LEAVE,
                    "            a = None\n            if others > 1:\n                a = weight.to_local()\n",
                )
            ],
            "a to_local is expected",
        ),
        (
            [
                (
                    "            rest = tuple(weight._spec.placements[-others:])",
                    "            rest = tuple(weight._spec.placements[:others])",
                )
            ],
            "the last of weight's own",
        ),
        (
            [
                (
                    "            rest = tuple(weight._spec.placements[-others:])",
                    "            rest = (Replicate(),)",
                )
            ],
            "the last of weight's own",
        ),
        (
            [
                (
                    "            data_mesh = self.mesh\n",
                    "            weight = cast(weight)\n            data_mesh = self.mesh\n",
                )
            ],
            "gives its parameter's name",
        ),
        ([("            labels = tuple(", "            labels = scan(a); labels = tuple(")], ""),
        (
            [("        return out\n", "        return self.hook(out)\n")],
            "does more with what it has gathered",
        ),
        ([("import torch\n", "")], "torch is not imported"),
        ([("STORE: dict", "_off_data_parallel = 1\nSTORE: dict")], "is taken in this file"),
        ([("rest_mesh = weight._spec.mesh[labels]", "rest_mesh = pick(a)")], "only known after"),
    ],
)
@BOTH
def test_refused_with_the_reason(edits, why, form):
    text = edited(*edits)
    part = mend(text, form)
    if not why:
        assert part.state is State.NOT_APPLIED
        return
    assert part.state is State.REFUSED
    assert why in part.reason
    assert part.text == text
    assert mend(text, form, force=True).text == text


def test_two_classes_are_refused():
    part = mend(SOURCE + SOURCE[SOURCE.index("class Gatherer") :].replace("class Gatherer", "class Second"))
    assert part.state is State.REFUSED
    assert "Gatherer, Second" in part.reason


def test_two_gathers_are_refused():
    start, end = SOURCE.index("            a = weight"), SOURCE.index("        else:\n            out")
    part = mend(SOURCE[:end] + SOURCE[start:end] + SOURCE[end:])
    assert part.state is State.REFUSED
    assert "in 2 places" in part.reason


def test_unparsed_is_not_ours_to_say():
    with pytest.raises(cst.ParserSyntaxError):
        mend("def broken(:\n")

"""spmd_types beside placement-audit: its answers where it is installed, and the counting without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from placement_audit import Job
from tests.faults import BY_NAME
from tests.faults.family import RIGHT, Bag, Family
from tests.trace.worlds import fake_mesh

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_faults", SCRIPTS / "bench_faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def spmd(bench: ModuleType) -> ModuleType:
    if reason := bench.not_compared("spmd_types"):
        pytest.skip(reason)
    from tests.faults import spmd

    return spmd


# --------------------------------------------------------------------------- where it is installed


@pytest.mark.trace
@pytest.mark.parametrize(
    ("family", "verdicts"),
    [
        # f is left out, and what is equal on all ranks meets what is not; what is summed after backward is not seen.
        (
            "MLP, tensor parallel over 2",
            {
                "as it is": "right",
                "in a flat buffer": "right",
                "without f": "wrong",
                "f and g swapped": "wrong",
                "g sums backward, too": "wrong",
            },
        ),
        (
            "gradients all-reduced by hand",
            {"own mean, averaged": "right", "global mean, never summed": "right"},
        ),
        # A bare to_local makes it I, and a piece is cut from R alone.
        ("replicated router", {"declared": "right", "bare to_local": "wrong"}),
        # The loss is R, and its gradient would count as a term.
        ("used alike on all ranks", {"bare to_local": "right", "overdone": "wrong"}),
        # P has one type of gradient, whatever was declared.
        ("a term out and back", {"Replicate": "right", "Partial": "right"}),
        # Under I it would be an error; the right variant decides for R.
        ("fewer key and value heads than ranks", {"as it is": "right", "copies not summed": "right"}),
        # The parameter is R, for the batch varies.
        ("a DTensor's gradient summed by hand", {"without autograd": "right", "declared, too": "right"}),
        # Right, and an error: a forward that takes back in detach() what it adds.
        ("bias of a row-parallel linear", {"added after": "right", "divided, not differentiated": "wrong"}),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
def test_it_says(family: str, verdicts: dict[str, str], spmd: ModuleType) -> None:
    answers = spmd.checked(BY_NAME[family])
    assert {v: answers[v].verdict for v in verdicts} == verdicts
    assert all(bool(a.why) is (a.verdict != "right") for a in answers.values())


@pytest.mark.trace
@pytest.mark.parametrize(
    ("family", "verdicts"),
    [
        (
            "gradients all-reduced by hand",
            {"global mean, summed": "right", "global mean, never summed": "wrong"},
        ),
        ("MLP, sequence parallel over 2", {"as it is": "right", "LayerNorm not summed": "wrong"}),
        # The loss that is logged is summed in place, a term as it is.
        ("mean over unequal counts", {"global count": "right"}),
        # A DTensor's own local part is P, as its parameter's is R; twice is two views, and it sees one sum of each.
        ("a DTensor's gradient summed by hand", {"as it is": "right", "summed twice": "right"}),
        # A buffer's type is not that of the gradients in it.
        ("gradients in one flat buffer", {"one by one": "right", "whole": "wrong"}),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
def test_it_says_where_gradients_are_typed_too(
    family: str, verdicts: dict[str, str], spmd: ModuleType
) -> None:
    answers = spmd.checked(BY_NAME[family], gradients=True)
    assert {v: answers[v].verdict for v in verdicts} == verdicts


@pytest.mark.trace
def test_a_type_that_it_loses_is_no_type_error(spmd: ModuleType) -> None:
    answers = spmd.checked(BY_NAME["norm weight re-wrapped"])
    assert {a.verdict for a in answers.values()} == {"does not run"}
    assert all(a.why.endswith(" (strict; permissive raises nothing)") for a in answers.values()), answers


@pytest.mark.trace
def test_a_parameter_is_typed_by_what_the_job_declares(spmd: ModuleType) -> None:
    mesh = fake_mesh(dp=2, tp=2)
    model = Bag(norm=torch.ones(4), w=torch.ones(4, 4))
    x, y = torch.ones(4), torch.ones(4)
    job = Job(
        model=model,
        step=lambda: y.sum(),
        mesh=mesh,
        inputs=(x,),
        batch_placements={"dp": Shard(0)},
        declared={"w": {"tp": Shard(1)}},
    )
    with spmd.spmd.set_current_mesh(mesh):
        spmd.annotate(job, spmd.spmd.I)
        typed = {
            n: "".join(spmd.spmd.get_axis_local_type(t, m).value for m in ("dp", "tp"))
            for n, t in {**dict(model.named_parameters()), "x": x, "y": y}.items()
        }
    dist.destroy_process_group()
    assert typed == {"norm": "RI", "w": "RV", "x": "II", "y": "II"}


@pytest.mark.trace
def test_a_program_that_fails_does_not_run(spmd: ModuleType) -> None:
    def job(mesh: DeviceMesh, variant: str) -> Job:
        return Job(model=Bag(w=torch.ones(2)), step=lambda: torch.ones(2) @ torch.ones(3), mesh=mesh)

    family = Family(name="", about="", mesh={"tp": 2}, variants={"fails": RIGHT}, job=job)
    answer = spmd.checked(family)["fails"]
    assert answer.verdict == "does not run"
    assert answer.why.startswith("RuntimeError: inconsistent tensor size"), answer.why
    assert not dist.is_initialized()


@pytest.mark.trace
def test_a_step_without_backward_does_not_run(spmd: ModuleType) -> None:
    family = Family(
        name="",
        about="",
        mesh={"tp": 2},
        variants={"forgets": RIGHT},
        job=lambda mesh, _: Job(model=Bag(w=torch.ones(2)), step=lambda: None, mesh=mesh),
    )
    assert spmd.checked(family) == {
        "forgets": spmd.Said(verdict="does not run", why="RuntimeError: the step never came to backward()")
    }


@pytest.mark.trace
def test_an_error_of_the_program_itself_is_no_type_error(spmd: ModuleType) -> None:
    assert not spmd.is_type_error(TypeError("assert_type() does not support DTensor"))
    assert not spmd.is_type_error(spmd.spmd.SpmdTypeError("raw broadcast is not yet implemented"))
    assert spmd.is_type_error(spmd.spmd.SpmdTypeError("Invariant type cannot mix. Found: [I, V]"))
    assert spmd.told(spmd.spmd.SpmdTypeError("Invariant type cannot mix. Found: [I, V]")) == (
        "Invariant type cannot mix"
    )
    assert spmd.told(ValueError("no\nsuch")) == "ValueError: no"


@pytest.mark.trace
def test_the_programs_are_left_as_they_were(spmd: ModuleType) -> None:
    from tests.faults import family, functions, plain_tensors

    spmd.checked(BY_NAME["MLP, sequence parallel over 2"])
    assert plain_tensors.mine is family.mine
    assert plain_tensors.gathered is functions.gathered
    assert not hasattr(functions.Copy, "spmd_typecheck")


# --------------------------------------------------------------------------- the counting


@pytest.mark.unit
@pytest.mark.parametrize(
    ("right", "verdict", "outcome"),
    [
        (False, "wrong", "caught"),
        (False, "right", "missed"),
        (False, "fault", "missed"),
        (True, "wrong", "false alarm"),
        (True, "fault", "false alarm"),
        (True, "right", "right"),
        (True, "does not run", "does not run"),
        (False, "does not run", "does not run"),
        (True, None, "-"),
    ],
)
def test_an_outcome(right: bool, verdict: str | None, outcome: str, bench: ModuleType) -> None:
    assert bench.outcome_of(right, verdict) == outcome


@pytest.mark.unit
def test_a_tally_counts_what_does_not_run_apart_and_only_where_there_is_any(bench: ModuleType) -> None:
    truth = {("f", "a"): True, ("f", "b"): False, ("g", "a"): False, ("g", "b"): True}
    column = {("f", "a"): "right", ("f", "b"): "wrong", ("g", "a"): "does not run"}
    assert bench.tally(truth, column) == "1 caught, 0 missed, 0 false alarm, 1 right, 1 does not run"
    assert bench.tally(truth, {("g", "a"): "right"}) == "0 caught, 1 missed, 0 false alarm, 0 right"


@pytest.mark.unit
def test_a_reason_is_told_once_for_a_family(bench: ModuleType) -> None:
    reasons = {("f", "a"): "no type", ("f", "b"): "no type", ("f", "c"): "no rule", ("g", "a"): "no type"}
    assert bench.summed_up(reasons) == [
        "f (2 variants): no type",
        "f (1 variant): no rule",
        "g (1 variant): no type",
    ]


@pytest.mark.unit
def test_where_it_is_not_installed_or_too_old_the_line_says_how_to_get_it(bench: ModuleType) -> None:
    assert bench.not_compared("no-such-package") == (
        'no-such-package: not installed. To compare: pip install "no-such-package>=0.3"'
    )
    this = tuple(int(n) for n in pytest.__version__.split(".")[:2])
    assert bench.not_compared("pytest", (1, 0)) is None
    assert bench.not_compared("pytest", this) is None
    late = bench.not_compared("pytest", (1000, 0))
    assert late == (
        f"pytest: {pytest.__version__} is installed, and 1000.0 or later is needed. "
        'To compare: pip install "pytest>=1000.0"'
    )

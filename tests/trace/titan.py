"""Real torchtitan in this process, stock or with the wrapper rewritten as other people proposed."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from placement_audit.build import build
from placement_audit.case import Case
from placement_audit.config import RankEnv, load
from placement_audit.engine.trace import trace_step
from placement_audit.judge import judge
from placement_audit.verdicts import Report
from tests.trace.worlds import run_record

CONFIGS = Path(__file__).parents[2] / "configs"

TP_PARTIAL = "tuple(Partial() if p.is_replicate() else p for p in x._spec.placements[-non_dp_mesh_dims:])"

PR_2532 = (
    "sharded_local_tensor = x.to_local()",
    "sharded_local_tensor = x.to_local("
    f"grad_placements=tuple(x._spec.placements[:-non_dp_mesh_dims]) + {TP_PARTIAL})",
)
"""The proposed fix, in our words: the first to_local says Partial on tp."""

OTHER_HALF = (
    "replicated_local_tensor, non_dp_mesh, non_dp_placements\n",
    f"replicated_local_tensor, non_dp_mesh, non_dp_placements, grad_placements={TP_PARTIAL}\n",
)
"""What it lacks: the last from_local says the same."""


def case_of(config: str, *overrides: str, device: str = "auto") -> Case:
    """A job of configs/, built as the command would build it alone."""
    job = load(CONFIGS / config, overrides=list(overrides), device=device)
    return build(job, rank_env=RankEnv.from_environ({}))


def report_on(config: str, *overrides: str, device: str = "auto") -> Report:
    """Build, trace, judge."""
    case = case_of(config, *overrides, device=device)
    return judge(trace_step(case, run_record(case)))


@contextmanager
def rewritten(*edits: tuple[str, str]) -> Generator[int]:
    """Run with `ReplicateComputation.replicate_compute` edited; yields the line of its first to_local.

    The new code keeps the old one's file name and line numbers, so that call sites stay true.
    """
    import torchtitan.experiments.simple_fsdp.simple_fsdp as module

    cls: Any = module.ReplicateComputation
    original = cls.replicate_compute
    lines, first = inspect.getsourcelines(original)
    source = textwrap.dedent("".join(lines))
    site = first + next(i for i, line in enumerate(lines) if "x.to_local(" in line)
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    namespace = dict(module.__dict__)
    exec(compile("\n" * (first - 1) + source, module.__file__, "exec"), namespace)
    cls.replicate_compute = namespace["replicate_compute"]
    try:
        yield site
    finally:
        cls.replicate_compute = original

"""Benchmarks of placement-audit; speed is measured here and never in a timed test.

    python3 scripts/bench.py                     traced over untraced time of one step on meta, three models
    python3 scripts/bench.py --models 8B --pairs 9
    python3 scripts/bench.py --measured          on gloo ranks: the watched step, and a whole measurement, over the
                                                 plain training step of the same ranks
    python3 scripts/bench.py --faults            the seeded faults of tests/faults: caught, missed and false alarms,
                                                 traced and measured, and by spmd_types where it is installed
    python3 scripts/bench.py --chance 500        so many programs made by chance, traced and set against their numbers

Each pair runs the same step untraced and traced, one after the other, in one process; the figure is the
median of the pairs' ratios, so that a machine whose speed drifts does not change it. Needs the project's
environment (`scripts/run.py` makes it).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement_audit.config import RankEnv
    from placement_audit.engine.trace import Tracer

ROOT = Path(__file__).resolve().parents[1]

MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "debugmodel": ("fsdp_tp.toml", ()),
    "8B": ("fsdp_tp.toml", ("--model.flavor", "8B")),
    "405B": ("llama3_405b.toml", ()),
}


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of one call; the step is one thread, and other processes must not count."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(model: str, pairs: int) -> dict[str, float]:
    """Paired times of one model, in this process."""
    sys.path.insert(0, str(ROOT))
    from placement_audit.build import build
    from placement_audit.config import RankEnv, load
    from placement_audit.engine.trace import Tracer

    config, overrides = MODELS[model]
    case = build(
        load(str(ROOT / "configs" / config), overrides=list(overrides)), rank_env=RankEnv.from_environ({})
    )

    def untraced() -> None:
        for p in case.model.parameters():
            p.grad = None
        case.step()

    def traced() -> None:
        Tracer(case).run()

    untraced()
    traced()
    runs = [(seconds(untraced), seconds(traced)) for _ in range(pairs)]
    return {
        "untraced_s": statistics.median(u for u, _ in runs),
        "traced_s": statistics.median(t for _, t in runs),
        "ratio": statistics.median(t / u for u, t in runs),
        "ratio_min": min(t / u for u, t in runs),
        "ratio_max": max(t / u for u, t in runs),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def on_rank(env: RankEnv, config: str, pairs: int) -> dict[str, float]:
    """One rank's wall seconds: plain step, watched step, and a whole measurement around it."""
    from placement_audit.build import build
    from placement_audit.config import load
    from placement_audit.engine.trace import Tracer
    from placement_audit.measure.fingerprint import BoundaryPrints, fingerprint
    from placement_audit.measure.run import finish, prepare

    case = build(load(str(ROOT / "configs" / config), device="cpu"), rank_env=env, float32=True)
    start = time.perf_counter()
    prepared = prepare(case, seed=0)
    around = time.perf_counter() - start

    def plain() -> None:
        for p in case.model.parameters():
            p.grad = None
        case.step()

    def watched() -> None:
        nonlocal tracer, loss
        tracer = Tracer(case, fingerprint=fingerprint)
        loss = tracer.run()

    tracer: Tracer | None = None
    loss: object = None

    def wall(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    plain()
    watched()
    runs = [(wall(plain), wall(watched)) for _ in range(pairs)]
    assert tracer is not None
    prints = [
        BoundaryPrints(index=i, value=v, arrived=a, left=left) for i, v, a, left in tracer.fingerprints()
    ]
    start = time.perf_counter()
    finish(prepared, case, loss=loss, boundaries=prints)
    around += time.perf_counter() - start
    step = statistics.median(p for p, _ in runs)
    return {
        "step_s": step,
        "watched_s": statistics.median(w for _, w in runs),
        "ratio": statistics.median(w / p for p, w in runs),
        "whole_ratio": (around + statistics.median(w for _, w in runs)) / step,
    }


def measured(pairs: int) -> int:
    """Print a row for each configuration that fits this machine."""
    sys.path.insert(0, str(ROOT))
    import bench  # pyrefly: ignore [missing-import]  by its name, so that the ranks can import it

    from tests.gloo.ranks import on_ranks

    print(f"{'config':<16}{'ranks':>6}{'step s':>9}{'watched s':>11}{'ratio':>8}{'whole measurement':>20}")
    for config, ranks in (("tp.toml", 2), ("fsdp_tp.toml", 4)):
        row = on_ranks(ranks, bench.on_rank, config, pairs, deadline=600)[0]
        print(
            f"{config:<16}{ranks:>6}{row['step_s']:>9.3f}{row['watched_s']:>11.3f}{row['ratio']:>8.2f}"
            f"{row['whole_ratio']:>18.1f} x",
            flush=True,
        )
    return 0


def main() -> int:
    """Measure each model in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description="traced over untraced time of one step on meta")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--pairs", type=int, default=7, metavar="N", help="paired runs per model (default: 7)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    parser.add_argument("--one", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--measured", action="store_true", help="on gloo ranks, over the plain step")
    parser.add_argument(
        "--faults", action="store_true", help="the seeded faults: caught, missed, false alarms"
    )
    parser.add_argument("--chance", type=int, metavar="N", help="N programs made by chance on each mesh")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="with --chance: the first one's")
    args = parser.parse_args()
    if args.chance:
        sys.path.insert(0, str(ROOT))
        from bench_chance import chance  # pyrefly: ignore [missing-import]  beside this script

        return chance(args.chance, args.first)
    if args.faults:
        sys.path.insert(0, str(ROOT))
        from bench_faults import faults  # pyrefly: ignore [missing-import]  beside this script

        return faults()
    if args.measured:
        return measured(args.pairs)
    if args.one:
        print(json.dumps({"model": args.one, "pairs": args.pairs, **measure(args.one, args.pairs)}))
        return 0
    if not args.json:
        print(
            f"{'model':<12}{'untraced s':>12}{'traced s':>12}{'ratio':>8}{'min':>8}{'max':>8}{'peak MiB':>10}"
        )
    for model in args.models:
        command = [sys.executable, __file__, "--one", model, "--pairs", str(args.pairs)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return done.returncode
        line = done.stdout.strip().splitlines()[-1]
        row = json.loads(line)
        print(
            line
            if args.json
            else f"{model:<12}{row['untraced_s']:>12.3f}{row['traced_s']:>12.3f}{row['ratio']:>8.2f}"
            f"{row['ratio_min']:>8.2f}{row['ratio_max']:>8.2f}{row['peak_mib']:>10.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

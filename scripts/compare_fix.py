"""What `placement_audit.fix` changes: collectives and bytes of one training step by mesh dim, traced, as Markdown.

    python3 scripts/compare_fix.py
    python3 scripts/compare_fix.py --models debugmodel 8B --set-ups FSDP

Each job is audited as released, fixed, and fixed with the sum deferred, by the command that users run; torchtitan's own
``experimental.custom_import`` installs the fix. Counted are rank 0's collectives of backward, and the bytes that it
sends into each. What is the same in all three is left out. Needs the project's environment (`scripts/run.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "debugmodel": ("fsdp_tp.toml", ()),
    "8B": ("fsdp_tp.toml", ("--model.flavor", "8B")),
    "405B": ("llama3_405b.toml", ()),
}
SIZES = {"debugmodel": (2, 2), "8B": (8, 8), "405B": (128, 8)}
"""Data-parallel ranks x tensor-parallel ranks."""

SET_UPS = ("FSDP", "FSDP in float32", "DDP")
FORMS = {"released": "", "fixed": "placement_audit.fix.auto", "deferred": "placement_audit.fix.auto_deferred"}
BYTES = {"float32": 4, "bfloat16": 2}


def overrides(model: str, set_up: str, form: str) -> list[str]:
    """What to tell torchtitan beyond the job file."""
    data, tensor = SIZES[model]
    degrees = {"data_parallel_shard": data, "data_parallel_replicate": 1, "tensor_parallel": tensor}
    if set_up == "DDP":
        degrees |= {"data_parallel_shard": 1, "data_parallel_replicate": data}
    out = [*MODELS[model][1]]
    for name, degree in degrees.items():
        out += [f"--parallelism.{name}_degree", str(degree)]
    if set_up == "FSDP in float32":
        out += ["--training.mixed_precision_param", "float32"]
    if FORMS[form]:
        out += ["--experimental.custom_import", FORMS[form]]
    return out


def audit(model: str, set_up: str, form: str) -> tuple[Counter[str], Counter[str], str]:
    """Audit a job: how many collectives of each kind, their bytes, and the verdicts."""
    from placement_audit.report.json_io import loads
    from placement_audit.tracing import Phase

    with tempfile.TemporaryDirectory() as room:
        saved = Path(room) / "audit.json"
        command = [
            sys.executable,
            "-m",
            "placement_audit",
            "--config",
            str(ROOT / "configs" / MODELS[model][0]),
        ]
        command += ["--format", "json", "--output-file", str(saved), "--quiet", "--no-measure", "--exit-zero"]
        command += ["--", *overrides(model, set_up, form)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        report = loads(saved.read_bytes())
    number: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for c in report.trace.collectives:
        if c.phase is Phase.BACKWARD:
            kind = f"{c.name} over {' x '.join(c.mesh_dims)} in {c.dtype}"
            number[kind] += 1
            size[kind] += c.numel * BYTES[c.dtype]
    verdicts = Counter(j.verdict.value for j in report.judgements)
    rules = Counter(f.rule_id for f in report.findings)
    return number, size, ", ".join(f"{n} {what}" for what, n in [*verdicts.items(), *rules.items()])


def rows(model: str, set_up: str) -> list[str]:
    """The table's lines for one job."""
    found = {form: audit(model, set_up, form) for form in FORMS}
    kinds = sorted({kind for number, _, _ in found.values() for kind in number})
    differ = [k for k in kinds if len({(n[k], s[k]) for n, s, _ in found.values()}) > 1]
    data, tensor = SIZES[model]
    job = f"{model}, {set_up} {data} x TP {tensor}"
    out = []
    for kind in differ:
        cells = [f"{n[kind]}, {s[kind]:,} B" if n[kind] else "none" for n, s, _ in found.values()]
        out.append(f"| {job} | {kind} | {' | '.join(cells)} |")
    sums = [f"{sum(n[k] for k in differ)}, {sum(s[k] for k in differ):,} B" for n, s, _ in found.values()]
    out.append(f"| {job} | together | {' | '.join(sums)} |")
    out.append(f"| {job} | verdicts | {' | '.join(words for *_, words in found.values())} |")
    return out


def main() -> int:
    """Print the table, a job at a time."""
    parser = argparse.ArgumentParser(description="what placement_audit.fix changes, in collectives and bytes")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--set-ups", nargs="+", choices=SET_UPS, default=list(SET_UPS))
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    print(f"| job | backward, a rank | {' | '.join(FORMS)} |")
    print(f"|---|---|{'---|' * len(FORMS)}")
    for model in args.models:
        for set_up in args.set_ups:
            print("\n".join(rows(model, set_up)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

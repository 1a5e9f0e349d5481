"""What --help says of each command, apart from its options."""

from __future__ import annotations

TOP = """\
placement-audit [audit] --config FILE [options] [-- torchtitan overrides]
       placement-audit run FILE.py:FUNCTION [options] [-- arguments]
       placement-audit explain PARAMETER --config FILE [options] [-- torchtitan overrides]
       placement-audit explain PARAMETER --run FILE.py:FUNCTION [options] [-- FUNCTION's arguments]
       placement-audit explain RULE
       placement-audit rules
       placement-audit report SAVED.json [--format FORMAT[:FILE]] ...
       placement-audit patch [--torchtitan DIR] [--check | --diff | --apply | --revert]
       placement-audit revert FILE ...
       placement-audit baseline --write FILE (--config FILE | --report SAVED.json)
       placement-audit diff BEFORE.json AFTER.json [--format text|json]
       placement-audit init [--dir DIR] [--config FILE] [--yes]
       placement-audit completion bash|fish|zsh
       torchrun --nproc-per-node N -m placement_audit --config FILE ...\
"""

EPILOG = """\
exit status:
  0  clean
  1  findings (0 with --exit-zero)
  2  usage or configuration: an option, the job file, a degree that does not divide
  3  the audit did not complete (the model failed, a rank hung), or audited nothing

examples:
  placement-audit --config configs/fsdp_tp.toml
  placement-audit --config job.toml --format json --output-file audit.json -- --training.seq_len 4096
  placement-audit --module graph_trainer.llama3 --config graph_trainer_llama3_8b --world-size 64
  placement-audit --config job.toml --fix
  placement-audit run my_script.py:build --world-size 4 --measure -- hidden=64
  placement-audit explain layers.0.attention_norm.weight --config configs/tp.toml
"""

PATCH_EPILOG = """\
exit status:
  0  --check: applied, in the form asked for; else: done, or nothing to do
  1  --check only: not applied, applied in the other form, or mended so that it is wrong
  2  usage, or refused: a file that is not understood, or should not be touched

examples:
  placement-audit patch
  placement-audit patch --torchtitan ../torchtitan --diff | git -C ../torchtitan apply
  placement-audit patch --torchtitan ../torchtitan --apply
"""

REVERT_EPILOG = """\
exit status:
  0  reverted
  2  nothing of ours to take back, or edited since; files named before that one are reverted

examples:
  placement-audit revert my_model/norm.py
"""

BASELINE_EPILOG = """\
exit status:
  0  written
  2  usage or configuration
  3  the audit did not complete; nothing was written

examples:
  placement-audit baseline --config job.toml --write placement-audit-baseline.json
  placement-audit audit --config job.toml --baseline placement-audit-baseline.json
"""

DIFF_EPILOG = """\
exit status:
  0  the same, apart from versions
  1  something differs
  2  usage, or a report that cannot be read

examples:
  placement-audit diff torch-2.12.json torch-2.13.json
"""

INIT_EPILOG = """\
exit status:
  0  written, shown, or there already
  1  a file of that name has other content: left as it is, the rest done
  2  usage, or a file that cannot be written: nothing is

examples:
  placement-audit init
  placement-audit init --dir ../torchtitan --config ../torchtitan/jobs/llama3_8b.toml --yes
"""

COMPLETION_EPILOG = """\
examples:
  eval "$(placement-audit completion bash)"                                # in ~/.bashrc
  placement-audit completion zsh > ~/.local/share/zsh_completion/_placement-audit
  placement-audit completion fish > ~/.config/fish/completions/placement-audit.fish
"""

PATCH = """\
Mends SimpleFSDP in a torchtitan on disk: the tensor-parallel sum of a replicated weight's
gradient comes after the data-parallel one, in its dtype; kept classes no longer mix up two
models."""

COMMANDS = {
    "audit": "audit a torchtitan job",
    "run": "audit a program of your own",
    "explain": "explain a rule, or one parameter's gradient",
    "rules": "list the rules",
    "report": "render a saved report again",
    "patch": "mend SimpleFSDP in a torchtitan on disk",
    "revert": "put back what --fix or patch edited",
    "baseline": "write a file of known findings",
    "diff": "set two saved reports side by side",
    "init": "write a workflow, a test and a table for your repository",
    "completion": "print a shell's completion script",
}
"""What each does, for shells."""

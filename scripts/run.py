#!/usr/bin/env python3
"""Set up once, then audit, test or lint: the project's one command. Standard library only.

    python3 scripts/run.py audit --config configs/tp.toml    further arguments go to placement_audit
    python3 scripts/run.py test -q                           further arguments go to pytest
    python3 scripts/run.py lint

The first run makes a virtual environment and installs the tested versions (a few minutes, about 2 GB);
later runs start at once. An interrupted set-up is taken up by the next run; changed pins are installed by
it. The exit status is that of the program run; else 2 is a mistake in the call, 3 a set-up that failed.

Environment variables:
    PLACEMENT_AUDIT_VENV     where the environment lives, instead of .venv in the project
    PLACEMENT_AUDIT_PYTHON   an interpreter that has torch and torchtitan already: nothing is installed
    TORCH_INDEX_URL          package index to take torch from, e.g. https://download.pytorch.org/whl/cpu,
                             which is the default on Linux without a GPU where pip's own sources have no
                             CPU build (PyPI's brings several GB of CUDA)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {"audit": {"test"}, "test": {"test", "lint"}, "lint": {"test", "lint"}}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MODULE = {"audit": "placement_audit", "test": "pytest"}
LOCK, OWNED, STAMP = (f".placement-audit.{name}" for name in ("lock", "owned", "stamp"))


class Failure(Exception):
    """Ends the run with one line on stderr.

    Attributes:
        status: 2 for a mistake in the call, 3 for a set-up that failed.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def say(message: str) -> None:
    """Print one line on stderr; stdout belongs to the program that is run."""
    print(f"run.py: {message}", file=sys.stderr, flush=True)


def constraints_file() -> Path:
    """Choose the pins: by the torch index where one is given, else by whether a GPU is there."""
    url = os.environ.get("TORCH_INDEX_URL")
    if url:
        cuda = not url.rstrip("/").endswith("/cpu")
    else:
        try:
            cuda = subprocess.check_output(["nvidia-smi", "-L"], timeout=60).startswith(b"GPU ")
        except (OSError, subprocess.SubprocessError):
            cuda = False
    return ROOT / "scripts" / f"constraints-{'cuda' if cuda else 'cpu'}.txt"


def call(command: list[str], hint: str, lock: int) -> None:
    """Run one step of the set-up, its output on stderr; which keeps the lock if this process is killed."""
    status = subprocess.call(command, stdout=sys.stderr, pass_fds=(lock,))
    if status:
        url = os.environ.get("TORCH_INDEX_URL")  # may hold a password
        shown = shlex.join("$TORCH_INDEX_URL" if part == url else part for part in command)
        raise Failure(3, f"set-up failed (exit status {status}); {hint}; the command was: {shown}")


def make_venv(folder: Path, kind: str, lock: int) -> None:
    """Make the environment, or make it anew where its kind (Python, sort of torch) changed.

    Only what this script made is ever deleted: a file in the folder marks it. An environment that was there
    before gets packages installed and is else left alone.
    """
    owned = folder / OWNED
    content = [path for path in folder.iterdir() if path.name != LOCK]
    if content and not owned.exists():
        if not (folder / "bin" / "python").exists():
            raise Failure(2, f"{folder} is neither empty nor a virtual environment: choose another")
        return
    if content and owned.read_text() != kind:
        if Path(sys.prefix).resolve() == folder:
            raise Failure(2, f"{folder} must be made anew: run this with a Python from outside it")
        for path in content:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    owned.write_text(kind)
    hint = "where venv or ensurepip is missing, install it (Debian, Ubuntu: apt install python3-venv)"
    call([sys.executable, "-m", "venv", str(folder)], hint, lock)


def cpu_index(python: Path, constraints: Path) -> str:
    """Return PyTorch's CPU index where pip's own sources have no CPU build of the pinned torch, else ""."""
    pin = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    known = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True
    )
    return "" if f"{pin.removeprefix('torch==')}+cpu" in known.stdout else CPU_INDEX


def set_up(extras: set[str]) -> str:
    """Return the environment's interpreter, after installing whatever is not as it should be."""
    folder = Path(os.environ.get("PLACEMENT_AUDIT_VENV") or ROOT / ".venv").expanduser().resolve()
    python, stamp = folder / "bin" / "python", folder / STAMP
    constraints, url = constraints_file(), os.environ.get("TORCH_INDEX_URL", "")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    kind = hashlib.sha256(f"{version} {constraints.name} {url}".encode()).hexdigest()
    pins = (ROOT / "pyproject.toml").read_bytes() + constraints.read_bytes()
    digest = hashlib.sha256(f"{kind} {ROOT} ".encode() + pins).hexdigest()

    def installed() -> set[str]:
        """Extras that a finished set-up with these very pins put there."""
        found = stamp.read_text().split() if stamp.exists() and python.exists() else []
        return set(found[1:]) if found[:1] == [digest] else set()

    if extras <= installed():
        return str(python)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:  # released when the file closes, or the process dies
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run sets up {folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if extras <= installed():
            return str(python)
        say(f"setting up {folder} with {constraints.name} (the first time takes minutes and about 2 GB)")
        stamp.unlink(missing_ok=True)
        make_venv(folder, kind, lock.fileno())
        pip = [str(python), "-m", "pip", "install", "--no-input", "-c", str(constraints)]
        hint = "pip's own words are above; the next run takes it up again"
        if not url and sys.platform == "linux" and constraints.name == "constraints-cpu.txt":
            url = cpu_index(python, constraints)
        if url:
            call([*pip, "--no-deps", "--index-url", url, "torch"], hint, lock.fileno())
        names = sorted(extras)
        call([*pip, "-e", f"{ROOT}[{','.join(names)}]"], hint, lock.fileno())
        half = stamp.with_suffix(".half")
        half.write_text(" ".join([digest, *names]))
        half.replace(stamp)  # the last step: no stamp, no environment
    return str(python)


def given_python(name: str) -> str:
    """Return the interpreter of PLACEMENT_AUDIT_PYTHON, and let it import the checkout."""
    found = shutil.which(name)
    if not found:
        raise Failure(2, f"PLACEMENT_AUDIT_PYTHON={name} is not an executable file")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.path.abspath(found)  # noqa: PTH100 - resolve() would leave a virtual environment


def lint(python: str) -> int:
    """Run every check, even where one before it failed; return the first failure's exit status."""
    steps = (
        ("-m", "ruff", "check", "."),
        ("-m", "ruff", "format", "--check", "."),
        ("-m", "pyrefly", "check", "--python-interpreter-path", python),
        ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"),
    )
    failed = 0
    for step in steps:
        say(f"lint: {shlex.join(step)}")
        status = subprocess.call([python, *step])
        failed = failed or (128 - status if status < 0 else status)
    return failed


def main(argv: list[str]) -> int:
    """Run one command.

    An audit and a test run take this process's place: exit status and signals are theirs, unchanged.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if not argv or argv[0] not in EXTRAS:
        wrong = f"unknown command {argv[0]!r}" if argv else "no command"
        raise Failure(2, f"{wrong}: say audit, test or lint (see --help)")
    command, arguments = argv[0], argv[1:]
    if command == "lint" and arguments:
        raise Failure(2, f"lint takes no arguments, got: {shlex.join(arguments)}")
    given = os.environ.get("PLACEMENT_AUDIT_PYTHON")
    if not given and sys.version_info < (3, 11):
        raise Failure(2, f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: try python3.11")
    python = given_python(given) if given else set_up(EXTRAS[command])
    if command != "audit":
        os.chdir(ROOT)  # an audit stays where the user is: relative paths mean what they typed
    if command == "lint":
        return lint(python)
    try:
        os.execv(python, [python, "-m", MODULE[command], *arguments])
    except OSError as error:
        raise Failure(3, f"cannot run {python}: {error.strerror}") from None


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        say(str(failure))
        sys.exit(failure.status)
    except KeyboardInterrupt:
        say("interrupted; where that was in a set-up, the next run takes it up")
        sys.exit(130)
    except OSError as error:
        say(f"set-up failed: {error}")
        sys.exit(3)

"""An exception of the job's own code -> one sentence: what was raised, where, in which module.

Knows frames, not torch: "torch" is told by the path of a file.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType

_OWN = str(Path(__file__).parent) + os.sep
_STDLIB = str(Path(os.__file__).parent) + os.sep
_PACKAGES = os.sep + "site-packages" + os.sep


def short_path(filename: str) -> str:
    """A path as a user would say it: from site-packages on, or from the working directory on."""
    _, found, rest = filename.rpartition(_PACKAGES)
    if found:
        return rest
    here = str(Path.cwd()) + os.sep
    return filename.removeprefix(here)


def is_own(filename: str) -> bool:
    """True for our own files, and for code without one."""
    return filename.startswith((_OWN, "<"))


def is_torch(filename: str) -> bool:
    """True for torch's files."""
    return f"{_PACKAGES}torch{os.sep}" in filename or f"{os.sep}torch{os.sep}_" in filename


def _is_stdlib(filename: str) -> bool:
    return _PACKAGES not in filename and filename.startswith(_STDLIB)


def _is_job(filename: str) -> bool:
    return not (is_own(filename) or is_torch(filename) or _is_stdlib(filename))


def _place(filename: str, line: int, function: str) -> str:
    return f"{short_path(filename)}:{line} in {function}"


def place_of_frame(frame: FrameType | None) -> str:
    """Where a thread is: its innermost frame in the user's or a package's code, not torch's or ours."""
    found = frame
    while found is not None and not _is_job(found.f_code.co_filename):
        found = found.f_back
    found = found or frame
    return _place(found.f_code.co_filename, found.f_lineno, found.f_code.co_name) if found else "?"


def place_of_thread(ident: int) -> str:
    """Where another thread of this process is just now."""
    return place_of_frame(sys._current_frames().get(ident))


class Failure:
    """What an exception's traceback says about the job."""

    def __init__(self, error: BaseException, modules: Mapping[int, str] | None = None) -> None:
        """Walk the traceback once.

        Args:
            error: as caught.
            modules: FQN by id() of each module of the model, to name the one whose forward failed.
        """
        self.error = error
        self.module: str | None = None
        self.backward = False
        self.ours = False
        self.place = "?"
        step: TracebackType | None = error.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            owner = step.tb_frame.f_locals.get("self")
            if modules and id(owner) in modules:
                self.module = modules[id(owner)]
            if code.co_name == "_engine_run_backward":
                self.backward = True
            self.ours = is_own(code.co_filename)
            if _is_job(code.co_filename) or self.place == "?":
                self.place = _place(code.co_filename, step.tb_lineno, code.co_name)
            step = step.tb_next

    @property
    def what(self) -> str:
        """Type and message, on one line."""
        text = " ".join(str(self.error).split())
        return f"{type(self.error).__name__}: {text}" if text else type(self.error).__name__

    @property
    def details(self) -> str:
        """The whole traceback."""
        return "".join(traceback.format_exception(self.error))

"""One SimpleFSDP file: all of its faults and mends together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from libcst import ParserSyntaxError

from placement_audit.errors import UsageError
from placement_audit.mend import cache, replicate
from placement_audit.mend.files import Source
from placement_audit.mend.manifest import Known, known_as
from placement_audit.mend.result import Form, Part, State

_WORST_FIRST = (State.REFUSED, State.WRONG, State.NOT_APPLIED, State.OTHER_FORM, State.APPLIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one file is, and what it would become.

    Attributes:
        source: the file.
        parts: its faults, one each.
        text: the whole file, mended.
        known: the release that the file is of, mended or not; None for any other file.
    """

    source: Source
    parts: tuple[Part, ...]
    text: str
    known: Known | None

    @property
    def state(self) -> State:
        """The worst of its parts'."""
        return next(state for state in _WORST_FIRST if any(part.state is state for part in self.parts))

    @property
    def shown(self) -> PurePosixPath:
        return self.source.shown


def look(source: Source, form: Form, *, force: bool = False) -> Look:
    """Look at one file, and mend its text.

    Args:
        source: the file.
        form: of the mend.
        force: replace also what is mended in another way.

    Raises:
        UsageError: it is no Python that can be read.
    """
    try:
        gather = replicate.mend(source.text, form, force=force)
        kept = cache.mend(source.text)
        mended = cache.mend(gather.text).text
    except ParserSyntaxError as error:
        raise UsageError(
            f"{source.path}:{error.raw_line}: no Python that can be read: {error.message.splitlines()[0]} "
            "Mend that first, or install torchtitan again."
        ) from None
    parts = (gather, kept)
    refused = any(part.state is State.REFUSED for part in parts) and not (
        force and gather.text != source.text
    )
    return Look(
        source=source,
        parts=parts,
        text=source.text if refused else mended,
        known=known_as(source.sha256),
    )

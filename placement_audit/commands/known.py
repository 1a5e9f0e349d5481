"""The ``--baseline`` of an audit or a report."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from placement_audit.errors import ReportError

if TYPE_CHECKING:
    from placement_audit.baseline import Known
    from placement_audit.verdicts import Report


def read(path: str) -> tuple[Known, ...]:
    """A baseline.

    Raises:
        ReportError: it cannot be read, or is none.
    """
    from placement_audit import baseline

    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ReportError(
            f"{path}: no such file. placement-audit baseline --config FILE --write {path} makes it."
        ) from None
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}.") from None
    return baseline.loads(data, path)


def load(args: Namespace) -> None:
    """Read the baseline that was asked for, before an audit is spent on it.

    Raises:
        ReportError: it cannot be read, or is none.
    """
    path = getattr(args, "baseline", None)
    args.known = None if path is None else read(path)


def marked(args: Namespace, report: Report) -> Report:
    """The report with what the baseline knows; the same where none was asked for."""
    if args.known is None:
        return report
    from placement_audit import baseline

    return baseline.apply(report, args.known, args.baseline)

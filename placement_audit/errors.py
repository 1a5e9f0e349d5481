"""The exception tree.

::

    AuditError                  base; carries the exit status
    |-- UsageError              2: the user can mend it: an option, a file, a place to write
    |   |-- ConfigError         2: the job file, our table in it, an override
    |   `-- ReportError         2: a saved report that cannot be read
    |-- BuildError              2: the job cannot be built: a degree, a model, torchtitan itself
    `-- IncompleteError         3: the audit started and did not complete, or audited nothing
        `-- NotMeasurable       a measurement that cannot be made; its trace stands

Every message says what is wrong, where, what was expected, what was found, and what to do next; the
command line prints it as it is, without a traceback.
"""

from __future__ import annotations


class AuditError(Exception):
    """Anything that ends an audit without a verdict.

    Attributes:
        message: whole sentences for the user; may have several lines.
        exit_status: of the process.
    """

    exit_status: int = 3

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(AuditError):
    """What the user asked for cannot be done as asked."""

    exit_status = 2


class ConfigError(UsageError):
    """The job file, the `[placement_audit]` table or a torchtitan override is wrong."""


class ReportError(UsageError):
    """A saved report cannot be read."""


class BuildError(AuditError):
    """The job cannot be built as configured (a degree that does not divide, an unknown model, ...)."""

    exit_status = 2


class IncompleteError(AuditError):
    """The audit did not complete: the model failed, a rank hung, or nothing was there to audit.

    Attributes:
        details: what only --verbose shows, such as the model's traceback; "" for nothing.
    """

    exit_status = 3

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class NotMeasurable(IncompleteError):
    """This job cannot be measured here; the message says why. Its trace is as good as ever."""

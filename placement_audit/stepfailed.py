"""A step of the job that raised: its own error, said as one, and not taken for a fault of ours."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from placement_audit.case import Case
from placement_audit.dtensor_api import clean_fqn
from placement_audit.errors import AuditError, IncompleteError
from placement_audit.failure import Failure


@contextmanager
def told(case: Case) -> Generator[None]:
    """Run the job's step inside: what it raises is told as the model's own error.

    Raises:
        IncompleteError: it raised; an `AuditError` is left as it is.
    """
    try:
        yield
    except AuditError:
        raise
    except Exception as error:
        raise _failed(error, case) from error


def _failed(error: Exception, case: Case) -> IncompleteError:
    """The model's own error, and where it was."""
    modules = {id(m): clean_fqn(fqn) for fqn, m in case.model.named_modules()}
    failure = Failure(error, modules)
    if failure.ours:
        return IncompleteError(
            f"placement-audit itself failed while it traced {case.name}: {failure.what} ({failure.place}). "
            "This is a fault of placement-audit, not of the job; --verbose shows the traceback.",
            details=failure.details,
        )
    phase = "backward" if failure.backward else "forward"
    module = f', module "{failure.module}"' if failure.module else ""
    hint = ""
    if case.backend == "fake" and case.device_type == "meta":
        hint = (
            "\nThe tensors were on the meta device, which has shapes and no values. If the model reads "
            "values "
            "(.item(), .tolist()), audit it with --device cpu, or on real ranks under torchrun."
        )
    return IncompleteError(
        f"{case.name} failed in {phase}{module}: {failure.what} ({failure.place}).{hint}",
        details=failure.details,
    )

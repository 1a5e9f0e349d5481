"""A failure while a job is built, told with the error of the job's own code."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from placement_audit.errors import AuditError, BuildError, IncompleteError
from placement_audit.failure import Failure


@contextmanager
def own_words(name: str) -> Generator[None]:
    """Tell a failure of the job's own code with its own error.

    Args:
        name: of the job.

    Raises:
        BuildError: the code refused what the job asks for.
        IncompleteError: it failed.
    """
    try:
        yield
    except AuditError:
        raise
    except Exception as error:
        failure = Failure(error)
        # Checks of degrees and options in torchtitan and in parallelize functions raise these.
        if isinstance(error, (AssertionError, ValueError, NotImplementedError, ImportError, KeyError)):
            raise BuildError(
                f"{name} cannot be built as configured: {failure.what} ({failure.place})."
            ) from error
        raise IncompleteError(
            f"{name} failed while it was built: {failure.what} ({failure.place}).", details=failure.details
        ) from error

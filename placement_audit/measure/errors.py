"""What ends a measurement without numbers."""

from __future__ import annotations

from placement_audit.errors import IncompleteError


class NotMeasurable(IncompleteError):
    """This job cannot be measured here; the message says why. Its trace is as good as ever."""

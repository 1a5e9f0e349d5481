"""placement-audit: says which DTensor gradients lost, doubled or mis-scaled a reduction, and where."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["AuditError", "Job", "Report", "audit", "audit_factory", "render", "watch"]

_HOMES = {
    "AuditError": "errors",
    "Job": "job",
    "Report": "verdicts",
    "audit": "api",
    "audit_factory": "api",
    "render": "api",
    "watch": "api",
}
"""Public name -> module that has it: imported at first use, so that this package stays light."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

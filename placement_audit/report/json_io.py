"""A report as JSON and back.

``loads(dumps(report)) == report``, always. The JSON follows `placement_audit.model` field by field,
with two exceptions. A fraction is a string ("1/2", "2"). And the trace's call sites, layouts, states
and tensors are written once each, into ``trace.tables``; ``boundaries``, ``collectives`` and the uses
of a parameter hold indices into them. A 405B model has some 8,000 boundaries at some 20 call sites,
so spelling them out makes the file five times as large. Judgements and findings spell everything out.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from fractions import Fraction
from typing import Any

import msgspec

from placement_audit import __version__
from placement_audit.errors import ReportError
from placement_audit.tracing import Boundary, Trace
from placement_audit.verdicts import SCHEMA_VERSION, Report

BOUNDARY_TABLES = {
    "call_site": "sites",
    "user_site": "sites",
    "src": "layouts",
    "dst": "layouts",
    "grad_declared": "layouts",
    "value_state": "states",
    "tensor": "tensors",
}
"""Field of a boundary -> the table that its value is written into."""

CROSSING_TABLES = {
    "arrived": "layouts",
    "arrived_state": "states",
    "left": "layouts",
    "left_state": "states",
    "tensor": "tensors",
}
"""The same for `Boundary.grad`."""

USE_TABLES = {"call_site": "sites", "layout": "layouts", "result": "layouts"}
UPDATE_TABLES = {"state": "states", "call_site": "sites", "grad_state": "states", "grad_site": "sites"}
COLLECTIVE_TABLES = {"call_site": "sites"}

Json = dict[str, Any]


def dumps(report: Report) -> str:
    """The report as one line of JSON, in a stable order, with a newline at its end."""
    raw = msgspec.to_builtins(report, enc_hook=_encode_fraction)
    tables = _Tables()
    _intern_trace(raw["trace"], report.trace, tables)
    raw["trace"]["tables"] = tables.rows
    return json.dumps(raw, ensure_ascii=True, separators=(",", ":")) + "\n"


def loads(text: str | bytes) -> Report:
    """Read a report that `dumps` wrote.

    Raises:
        ReportError: the text is no report, or one of another schema version; the message says which.
    """
    try:
        raw = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(
            f"The saved report is not JSON: {error}.\n"
            "Expected the output of `placement-audit --format json`; the file may be cut short."
        ) from error
    _check_version(raw)
    try:
        trace = raw["trace"]
        _spell_out_trace(trace, trace.pop("tables"))
        return msgspec.convert(raw, Report, dec_hook=_decode_fraction)
    except msgspec.ValidationError as error:
        raise _damaged(str(error)) from error
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error


# --------------------------------------------------------------------------- versions and fractions


def _check_version(raw: object) -> None:
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise ReportError(
            "The file is JSON but no placement-audit report: it has no schema_version.\n"
            "Expected the output of `placement-audit --format json`."
        )
    found = raw["schema_version"]
    if found != SCHEMA_VERSION:
        raise ReportError(
            f"The saved report has schema_version {found!r}; placement-audit {__version__} reads"
            f" {SCHEMA_VERSION!r}.\nRender it with placement-audit {_writer(raw)}, which wrote it,"
            " or audit again."
        )


def _writer(raw: Json) -> str:
    try:
        return str(raw["trace"]["run"]["tool_version"])
    except (KeyError, TypeError):
        return "of the version"


def _damaged(detail: str) -> ReportError:
    return ReportError(
        f"The saved report has schema_version {SCHEMA_VERSION!r} but does not fit it: {detail}.\n"
        "Was the file edited? Write it again with `placement-audit --format json`."
    )


def _encode_fraction(value: object) -> str:
    if isinstance(value, Fraction):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a report")


def _decode_fraction(wanted: type, value: object) -> Fraction:
    if wanted is Fraction and isinstance(value, str):
        return Fraction(value)
    raise ValueError(f"expected a fraction such as '1/2', found {value!r}")


# --------------------------------------------------------------------------- the tables


class _Tables:
    """Values written once, in the order of their first use."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {"sites": [], "layouts": [], "states": [], "tensors": []}
        self._index: dict[tuple[str, Hashable], int] = {}

    def put(self, table: str, value: Hashable, raw: object) -> int:
        """Index of ``value`` in ``table``; ``raw`` is its JSON form, kept if it is new."""
        key = (table, value)
        found = self._index.get(key)
        if found is None:
            found = self._index[key] = len(self.rows[table])
            self.rows[table].append(raw)
        return found

    def replace(self, raw: Json, value: object, fields: dict[str, str]) -> None:
        """Put the index in place of each of ``fields`` of ``raw``, the JSON form of ``value``."""
        for name, table in fields.items():
            inner = getattr(value, name)
            if inner is not None:
                raw[name] = self.put(table, inner, raw[name])


def _intern_trace(raw: Json, trace: Trace, tables: _Tables) -> None:
    for raw_boundary, boundary in zip(raw["boundaries"], trace.boundaries, strict=True):
        _intern_boundary(raw_boundary, boundary, tables)
    for raw_param, param in zip(raw["params"], trace.params, strict=True):
        for raw_use, use in zip(raw_param["uses"], param.uses, strict=True):
            tables.replace(raw_use, use, USE_TABLES)
        if param.update is not None:
            tables.replace(raw_param["update"], param.update, UPDATE_TABLES)
        else:
            del raw_param["update"]
    for raw_collective, collective in zip(raw["collectives"], trace.collectives, strict=True):
        tables.replace(raw_collective, collective, COLLECTIVE_TABLES)


def _intern_boundary(raw: Json, boundary: Boundary, tables: _Tables) -> None:
    tables.replace(raw, boundary, BOUNDARY_TABLES)
    if not boundary.own_dims:
        del raw["own_dims"]  # as nearly always: thousands of empty lists say nothing
    if not boundary.name:
        del raw["name"]
    if boundary.grad is not None:
        tables.replace(raw["grad"], boundary.grad, CROSSING_TABLES)


def _spell_out_trace(raw: Json, tables: dict[str, list[Any]]) -> None:
    for boundary in raw["boundaries"]:
        _spell_out(boundary, BOUNDARY_TABLES, tables)
        if boundary["grad"] is not None:
            _spell_out(boundary["grad"], CROSSING_TABLES, tables)
    for param in raw["params"]:
        for use in param["uses"]:
            _spell_out(use, USE_TABLES, tables)
        if param.get("update") is not None:
            _spell_out(param["update"], UPDATE_TABLES, tables)
    for collective in raw["collectives"]:
        _spell_out(collective, COLLECTIVE_TABLES, tables)


def _spell_out(record: Json, fields: dict[str, str], tables: dict[str, list[Any]]) -> None:
    for name, table in fields.items():
        at = record[name]
        if at is not None:
            record[name] = tables[table][_position(at)]


def _position(at: Any) -> int:
    # a negative index would silently read a table from its end
    if not isinstance(at, int) or isinstance(at, bool) or at < 0:
        raise ValueError(f"expected a position in trace.tables, found {at!r}")
    return at

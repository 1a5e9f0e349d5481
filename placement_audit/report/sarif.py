"""The report as SARIF 2.1.0, for code scanning and editors: the gradient's way is a code flow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from placement_audit.model import CallSite
from placement_audit.report.edits import replacements
from placement_audit.report.places import Inside, primary, recorded
from placement_audit.report.route import Edge, Route, Stop, backward_stops, forward_stops, labels_text
from placement_audit.report.routes import Routes
from placement_audit.rules import RULES, Rule, rule_text
from placement_audit.verdicts import Edit, EditStatus, Finding, Means, Outcome, Report, Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

FINGERPRINT = "placementAudit/v1"
"""Name of our fingerprint; the number goes up when the way to make it changes."""

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_ROOT = "%SRCROOT%"
_ELSEWHERE = "PYTHONPATH"
_INDEX = {rule.id: i for i, rule in enumerate(RULES)}

Json = dict[str, Any]


def sarif(report: Report, inside: Inside = recorded) -> str:
    """One run with a result for every finding, as JSON with a newline at its end.

    Args:
        report: what to write.
        inside: what tells the files of the user's repository from others.
    """
    run = report.trace.run
    writer = _Writer(report, inside)
    driver = {
        "name": "placement-audit",
        "semanticVersion": run.tool_version,
        "rules": [_rule(rule) for rule in RULES],
    }
    out = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                # two jobs of one repository are two analyses: without an id the later upload closes the other's
                "automationDetails": {"id": f"placement-audit/{run.config_path or run.model}/"},
                "invocations": [_invocation(report)],
                "originalUriBaseIds": {
                    _ROOT: {"description": {"text": "The top folder of the repository."}},
                    _ELSEWHERE: {"description": {"text": "The folder that the package is installed in."}},
                },
                "columnKind": "unicodeCodePoints",
                "results": [writer.result(f) for f in report.findings],
                "properties": {
                    "model": run.model,
                    "mesh": str(report.trace.mesh),
                    "evidence": list(run.evidence),
                    "versions": dict(run.versions),
                },
            }
        ],
    }
    return json.dumps(out, indent=1) + "\n"


def _rule(rule: Rule) -> Json:
    text = rule_text(rule)
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": " ".join(rule.why.split())},
        "help": {"text": text, "markdown": f"````text\n{text}````"},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": ["correctness", "distributed-training"]},
    }


def _invocation(report: Report) -> Json:
    told = [*report.trace.run.notes, *report.blind_spots]
    return {
        "executionSuccessful": report.outcome is not Outcome.INCOMPLETE,
        "exitCode": report.exit_status,
        "toolExecutionNotifications": [{"level": "note", "message": {"text": text}} for text in told],
    }


class _Writer:
    """Findings of one report -> results."""

    def __init__(self, report: Report, inside: Inside) -> None:
        self._inside = inside
        self._routes = Routes(report)
        job = CallSite(path=report.trace.run.config_path, line=1, function="")
        self._job_file = self._place(job) if self._inside(job) else {}
        self._edits = {print_: edit for edit in report.edits for print_ in edit.fingerprints}

    def result(self, f: Finding) -> Json:
        at = primary(f.path, self._inside)
        out: Json = {
            "ruleId": f.rule_id,
            "ruleIndex": _INDEX[f.rule_id],
            "level": _LEVELS[f.severity],
            "message": {"text": _message(f)},
            "locations": [self._location(at.call_site if at else None, f)],
            "partialFingerprints": {FINGERPRINT: f.fingerprint},
            "properties": {
                "meshDim": f.mesh_dim,
                "expected": f.expected,
                "observed": f.observed,
                "evidence": [f"{e.strength}: {e.statement}" for e in f.evidence],
            },
        }
        if f.suppressed is not None:
            kind = "inSource" if f.suppressed.by is Means.COMMENT else "external"
            mark = f.suppressed
            until = f" (until {mark.until})" if mark.until is not None else ""
            out["suppressions"] = [{"kind": kind, "justification": f"{mark.reason or mark.where}{until}"}]
        others = [s for s in f.path if s is not at]
        if others:
            out["relatedLocations"] = [
                {"id": i, **self._place(s.call_site), "message": {"text": f"{s.kind}: {s.role}"}}
                for i, s in enumerate(others, 1)
            ]
        route = self._routes.of(f)
        flow = self._flow(route) if route is not None else []
        if flow:
            out["codeFlows"] = [{"threadFlows": [{"locations": flow}]}]
        fix = self._fix(self._edits.get(f.fingerprint))
        if fix:
            out["fixes"] = [fix]
        return out

    def _location(self, site: CallSite | None, f: Finding) -> Json:
        name = f.param_fqn if f.param_fqn is not None else f.module_fqn
        # a finding without a line of code is about the job; services show nothing that is about no file
        out = dict((self._place(site) if site is not None else {}) or self._job_file)
        if name:
            kind = "parameter" if f.param_fqn is not None else "module"
            out["logicalLocations"] = [{"fullyQualifiedName": name, "kind": kind}]
        return out

    def _place(self, site: CallSite) -> Json:
        """Where a call stands; nothing for a place without a file."""
        if site.line < 1:
            return {}
        region: Json = {"startLine": site.line}
        if site.span is not None:
            line, column, end_line, end_column = site.span
            # SARIF counts columns from 1
            region = {
                "startLine": line,
                "startColumn": column + 1,
                "endLine": end_line,
                "endColumn": end_column + 1,
            }
        if site.code_line:
            region["snippet"] = {"text": site.code_line}
        return {"physicalLocation": {"artifactLocation": self._file(site), "region": region}}

    def _file(self, site: CallSite) -> Json:
        own = self._inside(site)
        return {"uri": quote(own or site.path.lstrip("/")), "uriBaseId": _ROOT if own else _ELSEWHERE}

    def _flow(self, route: Route) -> list[Json]:
        """Forward, then back, then what reads the gradient; what a viewer steps through."""
        steps: list[tuple[Stop, str, bool]] = []
        for s in forward_stops(route):
            text = _with(f"forward of {s.kind}: {_change(s.before, s.after)}", s.ran_forward)
            steps.append((s, f"{text}{_wrong(s.after)}", s.faulty_forward))
        for s in (*backward_stops(route), *route.readers):
            what = "" if s in route.readers else "backward of "
            text = _with(f"{what}{s.kind}: {_change(s.arrived, s.left)}", s.ran_backward)
            text += _wrong(s.left)
            steps.append((s, f"{text} ({s.role})" if s.role else text, s.faulty_back))
        return [
            {
                "location": {**self._place(s.site), "message": {"text": text}},
                "executionOrder": order,
                "importance": "essential" if fault or s.role else "important",
            }
            for order, (s, text, fault) in enumerate(steps, 1)
        ]

    def _fix(self, edit: Edit | None) -> Json | None:
        """The edit, where it may be made as it stands: a safe one, not yet made."""
        if edit is None or not edit.safe or edit.status not in (EditStatus.SHOWN, EditStatus.PROVEN):
            return None
        changes = replacements(edit.diff)
        if not changes:
            return None
        site = CallSite(path=edit.path, line=edit.line, function="")
        return {
            "description": {"text": edit.proof or edit.reason},
            "artifactChanges": [
                {
                    "artifactLocation": self._file(site),
                    "replacements": [
                        {
                            "deletedRegion": {
                                "startLine": c.line,
                                "startColumn": 1,
                                "endLine": c.line + c.lines,
                                "endColumn": 1,
                            },
                            "insertedContent": {"text": c.text},
                        }
                        for c in changes
                    ],
                }
            ],
        }


def _message(f: Finding) -> str:
    about = f.param_fqn if f.param_fqn is not None else f.module_fqn
    on = f"mesh dim {f.mesh_dim}" if f.mesh_dim else ""
    parts = [
        f"{', '.join(filter(None, (about, on)))}: {f.message.rstrip('.')}." if about or on else f.message,
        f"Expected: {f.expected}.",
        f"Observed: {f.observed}.",
    ]
    parts += [f"{e.strength.capitalize()}: {e.statement.rstrip('.')}." for e in f.evidence]
    return " ".join((*parts, f"Next: {f.next_step}"))


def _change(before: Edge | None, after: Edge | None) -> str:
    return f"{labels_text(before)} -> {labels_text(after)}"


def _wrong(edge: Edge | None) -> str:
    if edge is None or not edge.mark:
        return ""
    if edge.labels and edge.really:
        return f"; FALSE LABEL, {edge.told}"
    return f"; {edge.verdict}: {edge.told}" if edge.told else f"; {edge.verdict}"


def _with(text: str, ran: Iterable[str]) -> str:
    return "; ".join((text, *ran))

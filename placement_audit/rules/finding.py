"""Builds a `Finding`: rule metadata and a fingerprint that outlives line shifts and rewording."""

from __future__ import annotations

import hashlib
import tokenize
from contextlib import suppress

from placement_audit.rules.catalogue import get_rule
from placement_audit.verdicts import Evidence, Finding, PathStep, Severity


def make_finding(
    rule_id: str,
    *,
    param_fqn: str | None,
    module_fqn: str,
    mesh_dim: str,
    message: str,
    expected: str,
    observed: str,
    evidence: tuple[Evidence, ...],
    path: tuple[PathStep, ...],
    next_step: str,
    severity: Severity | None = None,
) -> Finding:
    """A finding with its rule's name and severity (unless another is given); see `Finding`."""
    rule = get_rule(rule_id)
    place = ("", "", "")
    if path:
        place = (path[0].kind, path[0].call_site.path, _code(path[0].call_site.code_line))
    stable = "\0".join((rule_id, param_fqn or "", "" if param_fqn else module_fqn, mesh_dim, *place))
    return Finding(
        rule_id=rule.id,
        rule_name=rule.name,
        severity=severity or rule.severity,
        param_fqn=param_fqn,
        module_fqn=module_fqn,
        mesh_dim=mesh_dim,
        message=message,
        expected=expected,
        observed=observed,
        evidence=evidence,
        path=path,
        next_step=next_step,
        fingerprint=hashlib.sha256(stable.encode()).hexdigest()[:16],
    )


def _code(line: str) -> str:
    """A line of code without its comment: one that says why a finding is suppressed must not make it another."""
    if "#" not in line:
        return line
    with suppress(tokenize.TokenError, SyntaxError):  # half a statement, as the first line of a call is
        for token in tokenize.generate_tokens(iter([line]).__next__):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]].rstrip()
    return line

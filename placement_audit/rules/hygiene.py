"""PA0xx: findings about suppressions."""

from __future__ import annotations

from placement_audit.model import CallSite
from placement_audit.rules.finding import make_finding
from placement_audit.verdicts import Finding, PathStep


def hygiene_finding(
    rule_id: str, *, kind: str, site: CallSite, message: str, expected: str, observed: str, next_step: str
) -> Finding:
    """A finding about one suppression.

    Args:
        rule_id: PA001, PA002 or PA003.
        kind: what it is: "comment" or "config".
        site: its own line.
        message: one sentence.
        expected: in words.
        observed: in words.
        next_step: what to do.
    """
    return make_finding(
        rule_id,
        param_fqn=None,
        module_fqn="",
        mesh_dim="",
        message=message,
        expected=expected,
        observed=observed,
        evidence=(),
        path=(PathStep(role="cause", kind=kind, call_site=site, boundary=-1),),
        next_step=next_step,
    )

"""The audits of a pytest session, and the items that show them rule by rule. Imports nothing heavy.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from placement_audit.pytest_audit import Request
    from placement_audit.rules import Rule
    from placement_audit.verdicts import Report

MARK = "placement_audit"


class AuditWarning(pytest.PytestWarning):
    """A finding that is no error: the gradient is right, by luck or by other means."""


class Audits:
    """The audits of this process's session: each is run once, when its first test is."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = config.rootpath
        self._required = bool(config.getoption("--placement-audit-require-device"))
        self._done: dict[Request, Report | str] = {}
        self._gpus: int | None = None

    def report(self, request: Request) -> Report:
        """The report; fails or skips the test that asks where there can be none."""
        from placement_audit.errors import AuditError
        from placement_audit.pytest_audit import audit

        cuda = self._on_gpus(request)
        if request not in self._done:
            try:
                self._done[request] = audit(request, self._folder, cuda=cuda)
            except AuditError as error:
                self._done[request] = error.message
        found = self._done[request]
        if isinstance(found, str):
            pytest.fail(f"{request.config} was not audited: {found}", pytrace=False)
        return found

    def _on_gpus(self, request: Request) -> bool:
        """Whether the ranks run on GPUs."""
        if request.nproc is None or (request.device == "cpu" and not self._required):
            return False
        if request.device == "cpu":
            pytest.fail(
                "device='cpu' under --placement-audit-require-device, which wants GPUs", pytrace=False
            )
        if self._gpus is None:
            from placement_audit.pytest_audit import gpus

            self._gpus = gpus()
        if self._gpus >= request.nproc:
            return True
        reason = f"{request.config}: {request.nproc} ranks need as many GPUs; torch sees {self._gpus}"
        if self._required:
            pytest.fail(f"{reason}, and --placement-audit-require-device was given", pytrace=False)
        if request.device == "cuda":
            pytest.skip(reason)
        return False


AUDITS = pytest.StashKey[Audits]()


# --------------------------------------------------------------------------- items


class AuditFile(pytest.File):
    """A job file."""

    def collect(self) -> Iterable[pytest.Item]:
        """One item a rule."""
        from placement_audit.pytest_audit import Request
        from placement_audit.rules import RULES

        options = self.config.option
        name = os.path.relpath(self.path, self.config.rootpath)
        request = Request(
            config=str(self.path) if name.startswith("..") else name,
            nproc=options.placement_audit_nproc,
            device=options.placement_audit_device,
        )
        for rule in RULES:
            yield AuditItem.from_parent(self, name=f"{rule.id}-{rule.name}", rule=rule, request=request)


class AuditItem(pytest.Item):
    """One rule on one job file."""

    def __init__(self, *, rule: Rule, request: Request, **more: Any) -> None:
        super().__init__(**more)
        self.rule = rule
        self.request = request
        self.add_marker(pytest.mark.placement_audit(config=request.config))
        keep_together(self, request)

    def runtest(self) -> None:
        """Fail with the rule's findings; a rule that this evidence cannot judge is skipped, not passed."""
        from placement_audit.pytest_audit import blocks
        from placement_audit.verdicts import Outcome, Severity

        report = self.config.stash[AUDITS].report(self.request)
        found = blocks(report, Severity.ERROR, rule_id=self.rule.id)
        if found:
            pytest.fail(found, pytrace=False)
        if report.outcome is Outcome.INCOMPLETE:
            pytest.fail(incomplete(report), pytrace=False)
        if self.rule.measured_only and report.measurement is None:
            pytest.skip(f"only values show {self.rule.name}: measure it with --placement-audit-nproc N")
        warned = blocks(report, Severity.WARNING, rule_id=self.rule.id)
        if warned:
            self.warn(AuditWarning(f"\n{warned}"))
        rest = (
            blocks(report, Severity.NOTE, rule_id=self.rule.id),
            blocks(report, *Severity, rule_id=self.rule.id, suppressed=True),
        )
        if any(rest):
            self.add_report_section("call", "placement-audit", "\n".join(filter(None, rest)))

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it is, and its headline."""
        return self.path, 0, f"{self.request.config}: {self.rule.id} {self.rule.name}"


def keep_together(item: pytest.Item, request: Request) -> None:
    """Let pytest-xdist's ``--dist loadgroup`` audit a job file in one worker only."""
    if item.config.pluginmanager.hasplugin("xdist") and not any(item.iter_markers("xdist_group")):
        item.add_marker(pytest.mark.xdist_group(name=f"placement-audit {request.config}"))


def marked(item: pytest.Item) -> Request | None:
    """What a test's marker asks for; None without one."""
    from placement_audit.errors import UsageError
    from placement_audit.pytest_audit import request_of

    mark = item.get_closest_marker(MARK)
    if mark is None or isinstance(item, AuditItem):
        return None
    try:
        return request_of(mark.args, mark.kwargs)
    except UsageError as error:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.{MARK}: {error.message}") from None


def incomplete(report: Report) -> str:
    """What to say where an audit ended without a verdict."""
    from placement_audit.report.text import summary

    return f"the audit is not complete: {summary(report).plain}"

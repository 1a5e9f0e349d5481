"""pytest: an item for each job file and rule, a marker, and a fixture that has the report.

``pytest --placement-audit configs/tp.toml`` audits a job file once and passes or fails each rule. A test marked
``@pytest.mark.placement_audit(config="configs/tp.toml", nproc=2)`` fails where that audit has errors; one that
asks for the fixture ``placement_report`` gets the report instead, and judges it itself. Without ``nproc`` the
job is traced, in one process; with it, it is measured on so many real ranks.

Imports nothing heavy: pytest loads this wherever placement-audit is installed. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import placement_audit
from placement_audit.pytest_items import AUDITS, MARK, AuditFile, Audits, incomplete, keep_together, marked

if TYPE_CHECKING:
    from placement_audit.pytest_audit import Request
    from placement_audit.verdicts import Report

_USAGE = (
    f"{MARK}(config, nproc=None, device='auto', world_size=None, overrides=(), timeout=None): audit this job file, "
    "once a session; the test fails where the audit has errors, or judges the fixture placement_report"
)

_REPORT: pytest.StashKey[Report] = pytest.StashKey()


# --------------------------------------------------------------------------- options


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("placement-audit", "audits of gradient placements")
    group.addoption(
        "--placement-audit",
        metavar="FILE",
        action="append",
        default=[],
        help="audit this torchtitan job file, an item for each rule; may be given several times",
    )
    group.addoption(
        "--placement-audit-nproc",
        metavar="N",
        type=int,
        help="measure these audits on N real ranks (default: trace them, in one process)",
    )
    group.addoption(
        "--placement-audit-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="of the N ranks; auto (default): GPUs where there are N, else the CPU; cuda: else skip",
    )
    group.addoption(
        "--placement-audit-require-device",
        action="store_true",
        help="fail, here and for marked tests, where ranks would find fewer GPUs than they are",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the job files as arguments: then each is a file of items like any other."""
    config.addinivalue_line("markers", _USAGE)
    config.stash[AUDITS] = Audits(config)
    ranks = config.getoption("--placement-audit-nproc")
    if ranks is not None and ranks < 1:
        raise pytest.UsageError(f"--placement-audit-nproc: expected a whole number, 1 or more; got {ranks}")
    given = [Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args]
    for path in _job_files(config):
        if not path.is_file():
            raise pytest.UsageError(
                f"--placement-audit {path}: no such file; expected a torchtitan job file (TOML)"
            )
        if path not in given:  # as it is by a node id, and in a worker of pytest-xdist
            config.args.append(str(path))


def pytest_report_header() -> str:
    """Name the versions that an audit depends on."""
    from placement_audit.adapters.environment import versions

    others = ", ".join(f"{name} {version}" for name, version in versions() if name != "python")
    return f"placement-audit: {placement_audit.__version__}, {others}"


def _job_files(config: pytest.Config) -> list[Path]:
    folder = config.invocation_params.dir
    return list(dict.fromkeys((folder / name).resolve() for name in config.getoption("--placement-audit")))


# --------------------------------------------------------------------------- collection


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take the job files that were asked for."""
    if file_path.resolve() in _job_files(parent.config):
        return AuditFile.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse wrong markers before anything runs, and keep the tests of one job file in one worker."""
    wrong = []
    for item in items:
        try:
            request = marked(item)
        except pytest.UsageError as error:
            wrong.append(str(error))
        else:
            if request is not None:
                keep_together(item, request)
    # an exception in a worker of pytest-xdist would be a crash: there each such test fails by itself
    if wrong and not hasattr(config, "workerinput"):
        raise pytest.UsageError("\n".join(wrong))


# --------------------------------------------------------------------------- marked tests


@pytest.fixture
def placement_report(request: pytest.FixtureRequest) -> Report:
    """The `placement_audit.Report` of the job file that the test's marker names."""
    wanted = _marked_well(request.node)
    if wanted is None:
        pytest.fail(f"placement_report needs @pytest.mark.{MARK}(config=...) on the test", pytrace=False)
    report = request.config.stash[AUDITS].report(wanted)
    request.node.stash[_REPORT] = report
    return report


def _marked_well(item: pytest.Item) -> Request | None:
    """What a test's marker asks for, or None; fails the test where it asks for nothing that there is."""
    try:
        return marked(item)
    except pytest.UsageError as error:
        wrong = str(error)
    pytest.fail(wrong, pytrace=False)  # out here it is no error "during handling" of the first


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Audit for a marked test that does not look at the report itself."""
    wanted = _marked_well(item)
    if wanted is None or "placement_report" in getattr(item, "fixturenames", ()):
        return
    from placement_audit.pytest_audit import blocks
    from placement_audit.verdicts import Severity

    report = item.config.stash[AUDITS].report(wanted)
    if report.exit_status:
        pytest.fail(blocks(report, Severity.ERROR) or incomplete(report), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the findings beside the assertion of a test that judged the report itself."""
    outcome = yield
    report = item.stash.get(_REPORT, None)
    if report is not None and outcome.when == "call" and outcome.failed:
        from placement_audit.pytest_audit import blocks
        from placement_audit.verdicts import Severity

        outcome.sections.append(("placement-audit", blocks(report, Severity.ERROR, Severity.WARNING)))
    return outcome

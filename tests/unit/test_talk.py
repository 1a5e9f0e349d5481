"""Standard error: progress for terminals, one message for errors, details for those who ask."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import make_report
import pytest

from placement_audit import cli, pipeline
from placement_audit.errors import IncompleteError

pytestmark = pytest.mark.unit

CONFIG = str(Path(__file__).parents[2] / "configs" / "tp.toml")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def audited(monkeypatch):
    """Runs ``audit`` with an audit that says how far it is, and ends well or not; returns what stderr got."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def audited(*args: str, stderr: io.StringIO, fails: bool = False) -> str:
        def run(config, options):
            options.tell("trace", None)
            if fails:
                raise IncompleteError("it failed.", details="the details")
            options.tell("trace", 1.25)
            return make_report.stock_report()

        monkeypatch.setattr(pipeline, "run", run)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert cli.main(["--config", CONFIG, *args]) == (3 if fails else 0)
        return stderr.getvalue()

    return audited


def test_progress_on_a_terminal(audited):
    assert audited(stderr=Terminal()) == "tracing one step ... 1.2 s\n"


@pytest.mark.parametrize(
    ("args", "stderr"), [((), io.StringIO()), (("--quiet",), Terminal())], ids=["log", "quiet"]
)
def test_none_in_a_log_nor_where_quiet(audited, args, stderr):
    assert audited(*args, stderr=stderr) == ""


def test_an_error_begins_a_line_of_its_own(audited):
    said = audited(stderr=Terminal(), fails=True)
    assert said == "tracing one step ... \nplacement-audit: error: it failed.\n"


def test_details_for_those_who_ask(audited):
    assert audited("--verbose", stderr=io.StringIO(), fails=True).splitlines() == [
        "placement-audit: error: it failed.",
        "the details",
    ]

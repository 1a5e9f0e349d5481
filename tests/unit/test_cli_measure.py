"""Who is asked to measure: nobody, ranks of our own, or torchrun's."""

from __future__ import annotations

from pathlib import Path

import make_report
import pytest

from placement_audit import cli, pipeline, ranks
from placement_audit.verdicts import Report

pytestmark = pytest.mark.unit

CONFIG = str(Path(__file__).parents[2] / "configs" / "tp.toml")


@pytest.fixture
def asked(monkeypatch) -> dict[str, object]:
    """How the audit was asked for; nothing is run."""
    seen: dict[str, object] = {}

    def run(config, options) -> Report:
        seen["measure"] = options.measure
        return make_report.stock_report()

    def run_ranks(config, work, manner) -> Report:
        seen["manner"] = manner
        return work(config, None, manner.tell)

    monkeypatch.setattr(pipeline, "run", run)
    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize("words", [[], ["--no-measure"]], ids=["nothing said", "--no-measure"])
def test_alone_nothing_is_measured_unless_asked(asked, words):
    assert cli.main(["--config", CONFIG, *words]) == 0
    assert asked == {"measure": False}


def test_alone_measuring_starts_ranks(asked):
    assert cli.main(["--config", CONFIG, "--measure", "--log-dir", "x", "--verbose"]) == 0
    assert asked["measure"] is True
    assert (asked["manner"].log_dir, asked["manner"].verbose) == ("x", True)


def test_explain_measures_too(asked, capsys):
    fqn = make_report.stock_report().trace.params[0].fqn
    assert cli.main(["explain", fqn, "--config", CONFIG, "--measure"]) == 0
    assert "manner" in asked
    assert fqn in capsys.readouterr().out


def test_logs_of_ranks_that_there_are_none_of_are_refused(asked, capsys):
    assert cli.main(["--config", CONFIG, "--log-dir", "x"]) == 2
    assert capsys.readouterr().err == (
        "placement-audit: error: --log-dir is for ranks: it needs --measure, or torchrun.\n"
    )
    assert asked == {}

"""The pytest plugin, run by pytest on small suites. A saved report stands for the audit's own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import date
from pathlib import Path

import make_report as m
import pytest

from placement_audit import pytest_audit
from placement_audit.errors import IncompleteError, UsageError
from placement_audit.pytest_audit import Request, command_of, request_of
from placement_audit.report.json_io import dumps
from placement_audit.rules import RULES
from placement_audit.verdicts import Means, Outcome, Report, Severity, Suppressed

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]

PLUGIN = ("-p", "placement_audit.pytest_plugin", "-p", "no:cacheprovider")

# Stands for the audit's own process: finds its report beside the job file, and notes who asked.
STUB = """\
import json, os
from pathlib import Path
from placement_audit import pytest_audit

def _run(command, folder, environ, errors):
    with Path("calls").open("a") as calls:
        calls.write(json.dumps([os.environ.get("PYTEST_XDIST_WORKER"), command]) + "\\n")
    saved = Path(folder, command[command.index("--config") + 1] + ".json")
    if not saved.exists():
        errors.write(b"importing ... placement-audit: error: training.seq_len: 7 does not divide.\\nTry 8.\\n")
        return 2
    Path(command[command.index("--output-file") + 1]).write_bytes(saved.read_bytes())
    return 0

pytest_audit._run = _run
"""


class Suite:
    """A folder with a job file for each report, and tests."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        monkeypatch.setattr(pytest_audit, "_run", pytest_audit._run)  # put back what the stub sets
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        pytester.makeconftest(STUB)
        self.job("bad", m.one_sided_report(layers=2))
        self.job("good", m.stock_report(layers=2))
        self.job("broken", None)

    def job(self, name: str, report: Report | None) -> None:
        (self.pytester.path / f"{name}.toml").write_text("[model]\n")
        if report is not None:
            (self.pytester.path / f"{name}.toml.json").write_text(dumps(report))

    def run(self, *words: str, workers: bool = False) -> pytest.RunResult:
        run = self.pytester.runpytest_subprocess if workers else self.pytester.runpytest_inprocess
        return run(*PLUGIN, *(("-p", "xdist") if workers else ()), *words)

    def calls(self) -> list[tuple[str | None, list[str]]]:
        """(worker, command) of each audit."""
        path = self.pytester.path / "calls"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def audited(self) -> list[str]:
        return [command[command.index("--config") + 1] for _, command in self.calls()]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return Suite(pytester, monkeypatch)


def needing_values() -> int:
    return sum(r.measured_only for r in RULES)


# --------------------------------------------------------------------------- an item for each job file and rule


def test_a_job_file_is_an_item_a_rule_and_one_audit(suite: Suite) -> None:
    result = suite.run("--placement-audit", "good.toml", "--placement-audit", "bad.toml", "-v")
    result.assert_outcomes(
        passed=2 * (len(RULES) - needing_values()) - 1, skipped=2 * needing_values(), failed=1
    )
    result.stdout.fnmatch_lines(["bad.toml::PA202-* FAILED*", "good.toml::PA202-double-reduction PASSED*"])
    assert suite.audited() == ["bad.toml", "good.toml"]


def test_a_failure_is_the_findings_block_and_no_traceback(suite: Suite) -> None:
    out = str(suite.run("--placement-audit", "bad.toml").stdout)
    assert "_ bad.toml: PA202 double-reduction _" in out
    block = out.partition("_ bad.toml: PA202 double-reduction _")[2].partition("\n")[2]
    assert block.startswith("PA202 double-reduction   5 parameters   mesh dim tp   error\n")
    assert f"\n              {m.WRAPPER}:189 in replicate_compute\n" in block
    assert "\n              sharded_local_tensor = x.to_local(grad_placements=grads)\n" in block
    assert "\n  next        declare Partial() in neither call or in both" in block
    for noise in ("Traceback", "pytest_items.py", "runtest", "excinfo"):
        assert noise not in out.partition("short test summary")[0], noise
    assert "FAILED bad.toml::PA202-double-reduction - Failed: PA202 double-reduction" in out


def test_the_command_traces_and_measures_where_ranks_are_asked_for(suite: Suite) -> None:
    suite.run("--placement-audit", "good.toml")
    result = suite.run("--placement-audit", "good.toml", "--placement-audit-nproc", "2", "-k", "PA201")
    result.assert_outcomes(passed=1, deselected=len(RULES) - 1)
    (_, traced), (_, measured) = suite.calls()
    assert "--no-measure" in traced
    assert " --measure --world-size 2 --device cpu " in " ".join(measured)


@pytest.mark.parametrize(
    "words", [("bad.toml::PA201-lost-reduction",), ("-k", "PA201"), ("./", "-k", "PA201")]
)
def test_one_rule_is_picked_like_any_test(suite: Suite, words: tuple[str, ...]) -> None:
    result = suite.run(*words, "--placement-audit", "bad.toml")
    assert result.parseoutcomes()["passed"] == 1
    assert "failed" not in result.parseoutcomes()


def test_audits_are_added_to_tests_and_marked(suite: Suite) -> None:
    suite.pytester.makepyfile(test_other="def test_other(): pass")
    count = len(RULES)
    result = suite.run(
        "--placement-audit", "good.toml", "--placement-audit", "./good.toml", "--collect-only", "-q"
    )
    assert f"{count + 1} tests collected" in str(result.stdout)
    result = suite.run("--placement-audit", "good.toml", "--strict-markers", "-m", "placement_audit")
    assert result.parseoutcomes() == {
        "passed": count - needing_values(),
        "skipped": needing_values(),
        "deselected": 1,
    }


def test_collecting_audits_nothing(suite: Suite) -> None:
    suite.pytester.makepyfile(
        "import pytest\n@pytest.mark.placement_audit(config='bad.toml')\ndef test_it(): pass\n"
    )
    suite.run("--placement-audit", "bad.toml", "--collect-only")
    assert suite.calls() == []


def test_without_the_option_a_job_file_is_no_test(suite: Suite) -> None:
    suite.pytester.makepyfile("def test_it(): pass")
    suite.run().assert_outcomes(passed=1)


def test_an_audit_that_fails_says_why_at_each_rule_and_runs_once(suite: Suite) -> None:
    result = suite.run("--placement-audit", "broken.toml")
    result.assert_outcomes(failed=len(RULES))
    assert "broken.toml was not audited: training.seq_len: 7 does not divide.\nTry 8.\n" in str(result.stdout)
    assert len(suite.calls()) == 1


def test_an_incomplete_audit_passes_no_rule(suite: Suite) -> None:
    suite.job(
        "empty", replace(m.stock_report(layers=1), judgements=(), outcome=Outcome.INCOMPLETE, exit_status=3)
    )
    result = suite.run("--placement-audit", "empty.toml")
    result.assert_outcomes(failed=len(RULES))
    assert "the audit is not complete: incomplete: nothing was audited" in str(result.stdout)


def test_a_rule_that_only_values_show_is_skipped_after_a_trace(suite: Suite) -> None:
    out = str(suite.run("--placement-audit", "good.toml", "-rs").stdout)
    assert "only values show wrong-update: measure it with --placement-audit-nproc N" in out


def test_which_rules_only_values_show() -> None:
    said = {
        r.id for r in RULES if r.how_judged.startswith("Measured only") or "both strengths" in r.how_judged
    }
    assert {r.id for r in RULES if r.measured_only} == said


def test_a_warning_passes_and_is_told_a_note_is_kept(suite: Suite) -> None:
    first = m.one_sided_report(layers=1).findings[0]
    findings = (
        replace(first, severity=Severity.WARNING),
        replace(first, rule_id="PA501", rule_name="reduction-dtype", severity=Severity.NOTE),
    )
    suite.job("odd", replace(m.stock_report(layers=1), findings=findings))
    result = suite.run("--placement-audit", "odd.toml", "-rP")
    result.assert_outcomes(passed=len(RULES) - needing_values(), skipped=needing_values(), warnings=1)
    out = str(result.stdout)
    assert "AuditWarning: \n  PA202 double-reduction" in out
    assert "- Captured placement-audit call -" in out
    assert "PA501       reduction-dtype on tp: " in out


def test_a_suppressed_finding_passes_and_its_reason_is_kept(suite: Suite) -> None:
    report = m.one_sided_report(layers=1)
    why = Suppressed(by=Means.CONFIG, reason="mended upstream", where="job.toml:3", until=date(2027, 1, 31))
    findings = tuple(replace(f, suppressed=why) for f in report.findings)
    suite.job("known", replace(report, findings=findings, outcome=Outcome.CLEAN, exit_status=0))
    result = suite.run("--placement-audit", "known.toml", "-k", "PA202", "-rP")
    result.assert_outcomes(passed=1, deselected=len(RULES) - 1)
    assert "suppressed in job.toml:3 until 2027-01-31: mended upstream" in str(result.stdout)


def test_a_missing_job_file_is_a_usage_error(suite: Suite) -> None:
    result = suite.run("--placement-audit", "none.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "none.toml: no such file; expected a torchtitan job file (TOML)" in str(result.stderr)


def test_ranks_are_a_positive_number(suite: Suite) -> None:
    result = suite.run("--placement-audit", "good.toml", "--placement-audit-nproc", "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--placement-audit-nproc: expected a whole number, 1 or more; got 0" in str(result.stderr)


def test_the_header_has_the_versions(suite: Suite) -> None:
    suite.run().stdout.fnmatch_lines(["placement-audit: 0.*, torch *, torchtitan *"])


def test_junit_xml_has_the_block(suite: Suite) -> None:
    suite.run("--placement-audit", "bad.toml", "--junit-xml=out.xml")
    cases = list(ET.parse(suite.pytester.path / "out.xml").iter("testcase"))
    assert len(cases) == len(RULES)
    (case,) = [c for c in cases if c.get("name") == "PA202-double-reduction"]
    assert case.get("classname") == "bad.toml"
    (failure,) = case
    assert failure.tag == "failure"
    assert "x.to_local(grad_placements=grads)" in (failure.text or "")


# --------------------------------------------------------------------------- the marker and the fixture


def marked(keywords: str, body: str = "def test_it(): pass") -> str:
    return f"import pytest\n@pytest.mark.placement_audit({keywords})\n{body}\n"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            "conifg='bad.toml'",
            "unknown keyword 'conifg'. Did you mean 'config'? It takes config, nproc, device, ",
        ),
        (
            "config='bad.toml', ranks=2",
            "unknown keyword 'ranks'. It takes config, nproc, device, world_size, ",
        ),
        ("'bad.toml'", "takes keywords only, got 'bad.toml': say config='bad.toml'."),
        ("nproc=2", "config is missing: the path of a job file"),
        ("config=3", "config: expected the path of a job file, from pytest's root folder; got 3."),
        ("config='bad.toml', nproc='2'", "nproc: expected a whole number of ranks, 1 or more; got '2'."),
        ("config='bad.toml', nproc=True", "nproc: expected a whole number of ranks, 1 or more; got True."),
        ("config='bad.toml', nproc=0", "nproc: expected a whole number of ranks, 1 or more; got 0."),
        ("config='bad.toml', device='gpu'", 'device: expected "auto", "cpu" or "cuda"; got \'gpu\'.'),
        ("config='bad.toml', overrides='--x 1'", "overrides: expected a list of torchtitan's own options"),
        ("config='bad.toml', timeout=0", "timeout: expected a number of seconds, more than 0; got 0."),
        ("config='bad.toml', nproc=2, world_size=4", "nproc is the number of ranks that run, "),
    ],
)
def test_wrong_keywords_are_a_usage_error(suite: Suite, keywords: str, message: str) -> None:
    suite.pytester.makepyfile(test_a=marked(keywords))
    result = suite.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"test_a.py::test_it: @pytest.mark.placement_audit: {message}" in str(result.stderr)
    assert suite.calls() == []


def test_all_wrong_markers_are_told_at_once(suite: Suite) -> None:
    suite.pytester.makepyfile(test_a=marked("conf='x'"), test_b=marked("nproc=2"))
    error = str(suite.run().stderr)
    assert "test_a.py::test_it: " in error
    assert "test_b.py::test_it: " in error


def test_the_keywords_become_the_command() -> None:
    asked = request_of(
        (), {"config": Path("a.toml"), "overrides": ["--x", "1"], "timeout": 9, "world_size": 8}
    )
    assert asked == Request(config="a.toml", overrides=("--x", "1"), timeout=9, world_size=8)
    words = " ".join(command_of(asked, cuda=False, out="o.json")[1:])
    assert words == (
        "-m placement_audit --config a.toml --format json --output-file o.json --no-measure --world-size 8 "
        "--timeout 9 -- --x 1"
    )
    words = " ".join(command_of(Request(config="a.toml", nproc=2), cuda=True, out="o.json")[1:])
    assert words == (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m placement_audit --config a.toml "
        "--format json --output-file o.json --measure --device cuda --"
    )


def test_the_fixture_is_the_report_and_the_test_is_its_judge(suite: Suite) -> None:
    body = """
def test_it(placement_report):
    import placement_audit
    assert isinstance(placement_report, placement_audit.Report)
    assert {f.rule_id for f in placement_report.findings} == {"PA202"}
    assert placement_report.exit_status == 1
"""
    suite.pytester.makepyfile(marked("config='bad.toml'", body))
    suite.run("--strict-markers").assert_outcomes(passed=1)


def test_a_failed_assertion_on_the_report_has_the_findings_beside_it(suite: Suite) -> None:
    body = "def test_it(placement_report):\n    assert placement_report.exit_status == 0"
    suite.pytester.makepyfile(marked("config='bad.toml'", body))
    result = suite.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *assert 1 == 0*", "*- placement-audit -*", "PA202 double-reduction   5 param*"]
    )


def test_a_marked_test_without_the_fixture_fails_with_the_audit(suite: Suite) -> None:
    suite.pytester.makepyfile(test_bad=marked("config='bad.toml'"), test_good=marked("config='good.toml'"))
    result = suite.run()
    result.assert_outcomes(passed=1, failed=1)
    out = str(result.stdout)
    assert "_ test_it _" in out
    assert (
        out.partition("_ test_it _")[2].partition("\n")[2].startswith("PA202 double-reduction   5 parameters")
    )
    assert suite.audited() == ["bad.toml", "good.toml"]


def test_the_fixture_wants_the_marker(suite: Suite) -> None:
    suite.pytester.makepyfile("def test_it(placement_report): pass")
    result = suite.run()
    result.assert_outcomes(errors=1)
    assert "placement_report needs @pytest.mark.placement_audit(config=...) on the test" in str(result.stdout)


def test_the_audit_runs_in_the_root_folder_and_once_for_items_and_tests(suite: Suite) -> None:
    suite.pytester.makeini("[pytest]")
    below = suite.pytester.mkdir("below")
    (below / "test_it.py").write_text(marked("config='good.toml'"))
    suite.run("--placement-audit", "good.toml", "below").assert_outcomes(
        passed=len(RULES) - needing_values() + 1, skipped=needing_values()
    )
    assert suite.audited() == ["good.toml"]


# --------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("device", "there", "flags", "outcome", "cuda"),
    [
        ("auto", 0, (), "passed", False),
        ("auto", 1, (), "passed", False),
        ("auto", 2, (), "passed", True),
        ("cpu", 2, (), "passed", False),
        ("cuda", 2, (), "passed", True),
        ("cuda", 1, (), "skipped", None),
        ("cuda", 1, ("--placement-audit-require-device",), "failed", None),
        ("auto", 1, ("--placement-audit-require-device",), "failed", None),
        ("auto", 2, ("--placement-audit-require-device",), "passed", True),
        ("cpu", 2, ("--placement-audit-require-device",), "failed", None),
    ],
)
def test_fewer_gpus_than_ranks(
    suite: Suite,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    there: int,
    flags: tuple[str, ...],
    outcome: str,
    cuda: bool | None,
) -> None:
    monkeypatch.setattr(pytest_audit, "gpus", lambda: there)
    suite.pytester.makepyfile(marked(f"config='good.toml', nproc=2, device='{device}'"))
    result = suite.run("-rs", *flags)
    result.assert_outcomes(**{outcome: 1})
    commands = [" ".join(command) for _, command in suite.calls()]
    assert [("torch.distributed.run" in c) for c in commands] == ([] if cuda is None else [cuda])
    if cuda is None and device != "cpu":
        assert "good.toml: 2 ranks need as many GPUs; torch sees 1" in str(result.stdout)


def test_items_have_the_same_options(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_audit, "gpus", lambda: 1)
    words = (
        "--placement-audit",
        "good.toml",
        "--placement-audit-nproc",
        "2",
        "--placement-audit-device",
        "cuda",
    )
    suite.run(*words).assert_outcomes(skipped=len(RULES))
    suite.run(*words, "--placement-audit-require-device").assert_outcomes(failed=len(RULES))
    assert suite.calls() == []


@pytest.mark.parametrize(("code", "count"), [("print(3)", 3), ("print(3); raise SystemExit(1)", 0), ("", 0)])
def test_gpus_are_counted_by_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, code: str, count: int
) -> None:
    monkeypatch.setattr(pytest_audit, "_COUNT", code)
    assert pytest_audit.gpus() == count


# --------------------------------------------------------------------------- the audit's own process


def test_what_torchrun_adds_is_cut_off() -> None:
    said = (
        "W1129 20:00:00.0 7 run.py:1] \nplacement-audit: error: tensor_parallel_degree: 3 does not divide 2.\n"
        "Set it to 2.\nE1129 20:00:01.0 7 api.py:9] failed (exitcode: 1)\nTraceback (most recent call last):\n  x\n"
    )
    told = pytest_audit._failure(1, said)
    assert told.message == "tensor_parallel_degree: 3 does not divide 2.\nSet it to 2."
    assert isinstance(told, IncompleteError)
    assert pytest_audit._failure(-9, "").message.startswith("the audit ended with status -9")


def test_a_real_process_tells_what_is_wrong_with_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)  # pytest under torchrun: the audit is no rank of it
    (tmp_path / "job.toml").write_text("[placement_audit]\nworld_size = 'two'\n")
    with pytest.raises(IncompleteError, match=r"placement_audit\.world_size: expected a whole number"):
        pytest_audit.audit(Request(config="job.toml"), tmp_path)


def test_unknown_keywords_are_for_the_command_line_too() -> None:
    with pytest.raises(UsageError, match="unknown keyword 'x'"):
        request_of((), {"x": 1})


# --------------------------------------------------------------------------- pytest-xdist, plugins, imports


def test_one_worker_audits_a_job_file_and_the_controller_none(suite: Suite) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    suite.job("other", m.stock_report(layers=1))
    words = [word for name in ("bad", "good", "other") for word in ("--placement-audit", f"{name}.toml")]
    result = suite.run(*words, "-n", "2", "--dist", "loadfile", "--strict-markers", workers=True)
    result.assert_outcomes(
        passed=3 * (len(RULES) - needing_values()) - 1, skipped=3 * needing_values(), failed=1
    )
    assert sorted(suite.audited()) == ["bad.toml", "good.toml", "other.toml"]
    assert {worker for worker, _ in suite.calls()} == {"gw0", "gw1"}
    assert "PA202 double-reduction   5 parameters" in str(result.stdout)


def test_items_and_tests_of_one_job_file_are_one_group(suite: Suite) -> None:
    # pytest-xdist 3.8 puts no name of a group into a node id of pytest 9.2: what it reads is looked at
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    suite.pytester.makepyfile(marked("config='bad.toml'"))
    hook = """
def pytest_collection_finish(session):
    marks = [[m.kwargs for m in item.iter_markers("xdist_group")] for item in session.items]
    Path("groups").write_text(json.dumps(marks))
"""
    suite.pytester.makeconftest(STUB + hook)
    suite.run("--placement-audit", "bad.toml", "--collect-only", workers=True)
    groups = json.loads((suite.pytester.path / "groups").read_text())
    assert groups == [[{"name": "placement-audit bad.toml"}]] * (len(RULES) + 1)


def test_a_wrong_marker_in_a_worker_fails_its_test_alone(suite: Suite) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    suite.pytester.makepyfile(test_a=marked("conifg='bad.toml'"), test_b="def test_b(): pass")
    result = suite.run("-n", "2", workers=True)
    result.assert_outcomes(passed=1, failed=1)
    assert "unknown keyword 'conifg'" in str(result.stdout)
    assert "During handling" not in str(result.stdout)


def test_named_twice_the_plugin_is_there_once(suite: Suite) -> None:
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    info = suite.pytester.mkdir("site") / "placement_audit_copy-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: placement-audit-copy\nVersion: 0.1\n")
    lines = "".join(f"{name} = {module}\n" for name, module in entry.items())
    (info / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    suite.pytester.makeconftest('pytest_plugins = ["placement_audit.pytest_plugin"]\n' + STUB)
    environ = {**os.environ, "PYTHONPATH": f"{info.parent}{os.pathsep}{os.environ['PYTHONPATH']}"}
    del environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    for plugin in ([], ["-p", "placement_audit.pytest_plugin"]):
        command = [sys.executable, "-m", "pytest", *plugin, "--placement-audit", "good.toml", "-q"]
        done = subprocess.run(
            command,
            cwd=suite.pytester.path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{len(RULES) - needing_values()} passed, {needing_values()} skipped" in done.stdout


def test_the_plugin_is_light() -> None:
    probe = (
        "import sys, placement_audit.pytest_plugin as p; p.pytest_report_header(); "
        "import placement_audit.pytest_audit; "
        "found = {m.partition('.')[0] for m in sys.modules}; "
        "print(sorted(found & {'torch', 'torchtitan', 'triton', 'numpy', 'libcst'}))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"

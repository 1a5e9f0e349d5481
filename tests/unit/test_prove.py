"""Edits are proven before they are kept: real files, and an audit that reads what it is given."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_report as m
import pytest
from test_proof import NORM, finding, report  # type: ignore[import-not-found]

from placement_audit import cli
from placement_audit.errors import IncompleteError
from placement_audit.mend import files
from placement_audit.mend.attach import Planned, attach
from placement_audit.model import CallSite, Placement, PlacementKind
from placement_audit.prove import Terms, mend
from placement_audit.report import render
from placement_audit.verdicts import EditStatus, Finding, PathStep, Remedy, Report, Verdict

pytestmark = pytest.mark.unit

PARTIAL = Placement(PlacementKind.PARTIAL, reduce_op="sum")
BEFORE = "import torch\n\n\ndef forward(w):\n    return w.to_local()\n"
AFTER = (
    "import torch\nfrom torch.distributed.tensor import Partial\n\n\n"
    "def forward(w):\n    return w.to_local(grad_placements=[Partial()])\n"
)

SITE = CallSite(path="a.py", line=5, function="forward", code_line="return w.to_local()", span=(5, 11, 5, 23))
REMEDY = Remedy(
    call_site=SITE,
    kind="to_local",
    argument="grad_placements",
    placements=((PARTIAL,),),
    safe=True,
    why="because",
)


class World:
    """Two files, ``a.py`` and ``b.py``, with a lost reduction each, and the audits of them.

    Attributes:
        folder: of the files.
        audits: what each audit was of: the texts that it saw, by file name.
        verdict: says of the texts which files' findings are left, and whether a new one appears.
    """

    def __init__(self, folder: Path, *names: str, safe: bool = True) -> None:
        self.folder = folder
        self.names = names
        self.audits: list[dict[str, str]] = []
        self.safe = safe
        self.fails: Callable[[dict[str, str]], str | None] = lambda texts: None
        for name in names:
            (folder / name).write_text(BEFORE)

    def finding(self, name: str) -> Finding:
        site = CallSite(
            path=name, line=5, function="forward", code_line="return w.to_local()", span=(5, 11, 5, 23)
        )
        remedy = replace(REMEDY, call_site=site, safe=self.safe)
        step = PathStep(role="cause", kind="to_local", call_site=site, boundary=0)
        return finding(path=(step,), fingerprint=name, remedy=remedy, fqn=NORM)

    def report(self, texts: dict[str, str]) -> Report:
        left = [self.finding(n) for n in self.names if "Partial" not in texts[n]]
        trouble = self.fails(texts)
        if trouble == "breaks":
            raise IncompleteError("the model failed in forward")
        if trouble is not None:
            left.append(finding("PA202", function=trouble, fingerprint="new"))
        made = report(*left, verdict=Verdict.LOST_REDUCTION if left else Verdict.OK)
        return replace(made, measurement=object())  # type: ignore[arg-type]

    def texts(self) -> dict[str, str]:
        return {n: (self.folder / n).read_text() for n in self.names}

    def audit(self, overlay: Path | None) -> Report:
        texts = self.texts()
        if overlay is not None:
            for row in json.loads((overlay / "overlay.json").read_text()):
                texts[Path(row["file"]).name] = (overlay / row["copy"]).read_text()
        self.audits.append(texts)
        made = self.report(texts)
        return made if overlay is not None else attach(made, [self.folder])[0]

    def mended(self, **terms: Any) -> Report:
        before, planned = attach(self.report(self.texts()), [self.folder])
        base = Terms(audit=self.audit, write=True, force=False, traced_only=False, tell=lambda *_: None)
        return mend(before, planned, replace(base, **terms))


@pytest.fixture(autouse=True)
def _how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement_audit.prove.how", lambda report: "proven by both")


def outcomes(made: Report) -> dict[str, str]:
    return {e.path: e.status.value for e in made.edits}


def test_both_are_proven_together_and_kept(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py", "b.py")
    made = world.mended()
    assert outcomes(made) == {"a.py": "applied", "b.py": "applied"}
    assert made.findings == ()
    assert world.texts() == {"a.py": AFTER, "b.py": AFTER}
    assert world.audits == [world.texts(), world.texts()], "once on copies, once on the files"
    files.revert(tmp_path / "a.py")
    assert (tmp_path / "a.py").read_text() == BEFORE


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")
    made = world.mended(write=False)
    assert outcomes(made) == {"a.py": "proven"}
    assert [f.fingerprint for f in made.findings] == ["a.py"], "the files are as they were"
    assert world.texts() == {"a.py": BEFORE}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py"]


def test_one_that_is_not_proven_does_not_keep_the_other_from_it(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py", "b.py")
    world.fails = lambda texts: "elsewhere" if "Partial" in texts["b.py"] else None
    made = world.mended()
    assert outcomes(made) == {"a.py": "applied", "b.py": "not kept"}
    assert world.texts() == {"a.py": AFTER, "b.py": BEFORE}
    (left,) = [e for e in made.edits if e.path == "b.py"]
    assert left.proof.startswith("new: PA202")
    assert "elsewhere" in left.proof
    assert len(world.audits) == 4


def test_two_that_do_not_go_together(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py", "b.py")
    world.fails = lambda texts: "elsewhere" if all("Partial" in t for t in texts.values()) else None
    assert outcomes(world.mended()) == {"a.py": "applied", "b.py": "not kept"}
    assert world.texts() == {"a.py": AFTER, "b.py": BEFORE}


def test_none_is_proven(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")
    world.fails = lambda texts: "elsewhere" if "Partial" in texts["a.py"] else None
    made = world.mended()
    assert outcomes(made) == {"a.py": "not kept"}
    assert world.texts() == {"a.py": BEFORE}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py"]
    assert made.exit_status == world.report(world.texts()).exit_status


def test_an_edit_that_breaks_the_model(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")
    world.fails = lambda texts: "breaks" if "Partial" in texts["a.py"] else None
    (edit,) = world.mended().edits
    assert (edit.status, edit.proof) == (
        EditStatus.REJECTED,
        "the audit with it failed: the model failed in forward",
    )
    assert world.texts() == {"a.py": BEFORE}


@pytest.mark.parametrize("trouble", ["elsewhere", "breaks"])
def test_taken_back_where_the_files_do_not_bear_out_the_proof(tmp_path: Path, trouble: str) -> None:
    world = World(tmp_path, "a.py", "b.py")
    world.fails = lambda texts: trouble if len(world.audits) == 2 else None
    made = world.mended()
    assert outcomes(made) == {"a.py": "not kept", "b.py": "not kept"}
    assert all(e.proof.startswith("taken back: ") for e in made.edits)
    assert world.texts() == {"a.py": BEFORE, "b.py": BEFORE}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py", "b.py"]


def test_what_was_mended_before_is_not_taken_back_with_it(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")
    first = files.read(tmp_path / "a.py", tmp_path)
    files.apply([first.changed(f"{BEFORE}# mended before\n")])
    world.fails = lambda texts: "elsewhere" if len(world.audits) == 2 else None
    assert outcomes(world.mended()) == {"a.py": "not kept"}
    assert world.texts() == {"a.py": f"{BEFORE}# mended before\n"}
    files.revert(tmp_path / "a.py")
    assert world.texts() == {"a.py": BEFORE}


def test_a_file_that_cannot_be_written_is_told_in_the_report(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")
    (tmp_path / "a.py").chmod(0o444)
    (edit,) = world.mended().edits
    assert (edit.status, world.texts()) == (EditStatus.REJECTED, {"a.py": BEFORE})
    assert "read-only" in edit.proof


def test_taken_back_where_the_last_audit_is_interrupted(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")

    def stopped(texts: dict[str, str]) -> str | None:
        if len(world.audits) == 2:
            raise KeyboardInterrupt
        return None

    world.fails = stopped
    with pytest.raises(KeyboardInterrupt):
        world.mended()
    assert world.texts() == {"a.py": BEFORE}


def test_unsafe_ones_are_only_shown(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py", safe=False)
    (edit,) = world.mended().edits
    assert (edit.status, edit.safe, edit.reason) == (EditStatus.SHOWN, False, "because")
    assert "+    return w.to_local(grad_placements=[Partial()])" in edit.diff
    assert world.audits == []
    assert world.texts() == {"a.py": BEFORE}


def test_what_cannot_be_measured_is_not_kept(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")
    measured = world.report
    world.report = lambda texts: replace(measured(texts), measurement=None)  # type: ignore[method-assign]
    (edit,) = world.mended().edits
    assert edit.status is EditStatus.REJECTED
    assert "--no-measure takes it" in edit.proof
    assert world.audits == []
    assert outcomes(world.mended(traced_only=True)) == {"a.py": "applied"}


# --------------------------------------------------------------------------- what becomes an edit


def planned(folder: Path, site: CallSite, **changes: Any) -> Planned:
    base = replace(REMEDY, call_site=site, why="w")
    remedy = replace(base, **changes)
    made, (only,) = attach(report(finding(remedy=remedy)), [folder])
    assert made.edits == (only.edit,)
    return only


@pytest.mark.parametrize(
    ("site", "text", "words"),
    [
        (SITE, BEFORE.replace("w.to", "v.to"), "not found as it ran"),
        (replace(SITE, path="b.py"), BEFORE, "not found as it ran"),
        (replace(SITE, path="<string>"), BEFORE, "no file holds it"),
        (replace(SITE, package="torch"), BEFORE, "in torch itself"),
        (SITE, BEFORE.replace("import torch", "# @generated"), "a program wrote it"),
        (replace(SITE, span=None), BEFORE, "position"),
        (replace(SITE, span=(5, 11, 5, 22)), BEFORE, "no call ends"),
    ],
)
def test_no_edit(tmp_path: Path, site: CallSite, text: str, words: str) -> None:
    (tmp_path / "a.py").write_text(text)
    edit = planned(tmp_path, site).edit
    assert (edit.diff, edit.safe) == ("", False)
    assert words in edit.reason


def test_an_installed_package_is_not_the_user_s(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "site-packages"
    for package in ("other", "torchtitan"):
        (site / package).mkdir(parents=True)
        (site / package / "a.py").write_text(BEFORE)
    other = planned(site, replace(SITE, path="other/a.py", package="other")).edit
    assert "other is an installed package" in other.reason
    assert planned(site, replace(SITE, path="torchtitan/a.py", package="torchtitan")).edit.safe


def test_a_remedy_without_placements_is_said_and_no_diff(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(BEFORE)
    edit = planned(tmp_path, SITE, placements=(), safe=False, why="no constant is right").edit
    assert (edit.diff, edit.reason) == ("", "no constant is right")


def test_one_edit_a_place(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(BEFORE)
    remedy = replace(REMEDY, why="w")
    unsafe = replace(remedy, safe=False, why="not this one")
    found = [
        finding(fqn=f, fingerprint=f, remedy=r) for f, r in (("v", remedy), ("w", unsafe), ("x", remedy))
    ]
    made, _ = attach(report(*found), [tmp_path])
    (edit,) = made.edits
    assert edit.fingerprints == ("v", "w", "x")
    assert (edit.safe, edit.reason) == (False, "not this one"), "one doubt is enough"


def test_the_text_report_shows_a_diff_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(BEFORE)
    remedy = replace(REMEDY, why="it is")
    found = [finding(mesh_dim=d, fingerprint=d, remedy=remedy) for d in ("fsdp", "tp")]
    made, _ = attach(report(*found, verdict=Verdict.LOST_REDUCTION), [tmp_path])
    text = render(made, "text", width=100, color="never")
    added = "+    return w.to_local(grad_placements=[Partial()])"
    assert text.count(added) == 1
    assert text.count("edit        safe, --fix proves and applies it: it is") == 2
    assert "a.py:5, as above" in text
    assert "def forward" not in text, "lines that stay are left out"


def test_edits_survive_a_saved_report(tmp_path: Path) -> None:
    from placement_audit.report.json_io import dumps, loads

    (tmp_path / "a.py").write_text(BEFORE)
    world = World(tmp_path, "a.py")
    made, _ = attach(replace(world.report(world.texts()), measurement=None), [tmp_path])
    assert made.edits
    assert loads(dumps(made)) == made
    assert m.stock_report() == loads(dumps(m.stock_report()))


def test_a_long_diff_is_counted_in_the_text_report(tmp_path: Path) -> None:
    world = World(tmp_path, "a.py")
    made, _ = attach(replace(world.report(world.texts()), measurement=None), [tmp_path])
    long = "-line\n" + "".join(f"+line {i}\n" for i in range(40))
    made = replace(made, edits=(replace(made.edits[0], diff=f"--- a\n+++ b\n@@ @@\n{long}"),))
    text = render(made, "text", width=100, color="never")
    assert "+line 0\n" not in text
    assert "a.py, 40 lines added, 1 removed: the JSON report has the diff" in text


@pytest.mark.parametrize("name", ["a.py", "a file of models.py"])
def test_what_was_applied_is_reverted_by_the_command_that_the_report_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, name)
    before = (tmp_path / name).read_bytes()
    made = world.mended()
    (edit,) = [e for e in made.edits if e.status is EditStatus.APPLIED]
    for width in range(60, 120):
        shown = render(replace(made, measurement=None), "text", width=width, color="never").splitlines()
        (line,) = [line for line in shown if "placement-audit revert" in line]
        assert shlex.split(line.partition("placement-audit ")[2])[:2] == ["revert", name]
    assert edit.proof.endswith(" takes it back")
    assert (tmp_path / name).read_bytes() != before
    assert cli.main(["revert", name]) == 0
    assert capsys.readouterr().out == f"reverted  {name}\n"
    assert (tmp_path / name).read_bytes() == before
    assert cli.main(["revert", name]) == 2
    assert "nothing to revert" in capsys.readouterr().err
    assert cli.main(["revert", "b.py"]) == 2
    assert capsys.readouterr().err == "placement-audit: error: b.py: there is no such file.\n"

"""The HTML page in a real browser: themes, widths, no script, no network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import browser  # type: ignore[import-not-found]
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

import formats_shared as shared  # type: ignore[import-not-found]
import make_places  # type: ignore[import-not-found]
import make_report as m  # type: ignore[import-not-found]
from hostile import hostile_report  # type: ignore[import-not-found]

from placement_audit.model import MeshSpec
from placement_audit.report import render
from placement_audit.verdicts import Evidence, Report

pytestmark = pytest.mark.e2e

PAGES = ("mixed", "stock", "mended", "suppressed", "hostile", "five mesh dims", "places", "readers")

CELLS = """
[...document.querySelectorAll("table")[0].rows].map(
    row => [...row.cells].map(cell => cell.innerText.replace(/\\s+/g, " ").trim()).join(" | "))
"""

CONTRAST = """
(() => {
  const lum = c => c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const paint = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c.slice(0, 3); }
    return [255, 255, 255]; };
  const worst = {};
  for (const e of document.querySelectorAll("body *:not(svg):not(svg *)")) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const [a, b] = [lum(rgb(getComputedStyle(e).color).slice(0, 3)), lum(paint(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) worst[e.className + " " + e.tagName + ": " + e.innerText.slice(0, 30)] = ratio;
  }
  return worst;
})()
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is installed")
    started = browser.Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def five_mesh_dims() -> Report:
    """More columns than a narrow screen holds: the table scrolls in itself, the page does not."""
    report = m.stock_report(layers=1)
    mesh = MeshSpec(
        device_type="cpu",
        dim_names=(*m.MESH.dim_names, "dp_replicate", "context_parallel", "expert"),
        shape=(2,) * 5,
    )
    more = [
        replace(j, mesh_dim=d) for j in report.judgements if j.mesh_dim == "tp" for d in mesh.dim_names[2:]
    ]
    return replace(report, judgements=(*report.judgements, *more), trace=replace(report.trace, mesh=mesh))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    reports = {
        "mixed": m.mixed_report(),
        "stock": m.stock_report(),
        "mended": shared.mended(),
        "suppressed": shared.suppressed(),
        "hostile": hostile_report(),
        "five mesh dims": five_mesh_dims(),
        "places": make_places.everything(),
        "readers": make_places.readers(),
    }
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(render(report, "html"), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 400, 768, 1200])
@pytest.mark.parametrize("name", PAGES)
def test_fits_and_is_quiet(chromium, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    chromium.open(pages[name], width=width, dark=dark)
    assert chromium.value("innerWidth") == width
    assert chromium.value("document.documentElement.scrollWidth") == width
    told = [e for e in chromium.events if e["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
    told += [e for e in chromium.events if e["method"] == "Runtime.consoleAPICalled"]
    assert told == []
    asked = [
        e["params"]["request"]["url"] for e in chromium.events if e["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [pages[name].as_uri()]
    assert [e for e in chromium.events if e["method"] == "Page.javascriptDialogOpening"] == []


def test_the_cells_as_they_are_read(chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["mixed"], width=400)
    rows = chromium.value(CELLS)
    assert rows[0] == "parameter | fsdp 2 | tp 2"
    cells = {name: cells for name, *cells in (row.split(" | ") for row in rows)}
    times = "\N{MULTIPLICATION SIGN}"
    assert cells[f"layers.*.ffn_norm.weight {times} 3"] == [
        "O S(0) ok",
        f"D R double reduction {times}2, .grad P(sum)",
    ]
    assert cells["layers.1.attention_norm.weight"] == ["O S(0) ok", "L R lost reduction"]
    assert cells["norm.weight"] == ["O S(0) ok", "P R deferred, .grad P(sum)"]


def test_the_whole_grid_is_seen_at_400(chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["mixed"], width=400)
    assert chromium.value(
        "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth).join(' ')"
    ) == ("0 0")


def test_no_number_is_broken(chromium, tmp_path: Path) -> None:
    report = m.mixed_report()
    said = Evidence(strength="measured", statement="tolerance 1e-05, off by 2.5e-07, " * 6)
    findings = tuple(replace(f, evidence=(said,)) for f in report.findings)
    page = tmp_path / "numbers.html"
    page.write_text(render(replace(report, findings=findings), "html"), encoding="utf-8")
    for width in range(320, 420, 10):
        chromium.open(page, width=width)
        lines = chromium.value(
            "[...document.querySelectorAll('.number')].map(e => e.getClientRects().length)"
        )
        assert len(lines) >= 12
        assert set(lines) == {1}, width


DRAWINGS = pytest.mark.parametrize(
    ("name", "drawings"), [("mixed", 2), ("mended", 2), ("places", 11), ("readers", 6)]
)
"""Pages, and how many findings on them have a way."""


@DRAWINGS
def test_a_drawings_text_stays_in_it_and_can_be_read(
    chromium, pages: dict[str, Path], name: str, drawings: int
) -> None:
    chromium.open(pages[name], width=400)
    over = """[...document.querySelectorAll("svg.way")].flatMap(svg => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text")].filter(t => {
            const box = t.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1
                || box.height < 9;
        }).map(t => t.textContent);
    })"""
    assert chromium.value("document.querySelectorAll('svg.way').length") == drawings
    assert chromium.value("document.querySelectorAll('article').length") == drawings
    assert chromium.value("document.querySelectorAll('svg.way .cross').length") == drawings
    assert chromium.value(over) == []


@DRAWINGS
def test_lanes_do_not_run_into_each_other(chromium, pages: dict[str, Path], name: str, drawings: int) -> None:
    chromium.open(pages[name], width=400)
    assert chromium.value("document.querySelectorAll('svg.way').length") == drawings
    crossed = """[...document.querySelectorAll("svg.way")].flatMap(svg => {
        const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
        return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) =>
            p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 4 && q.top < p.bottom - 4
        ).map(([b]) => a + " / " + b));
    })"""
    assert chromium.value(crossed) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(chromium, pages: dict[str, Path], dark: bool) -> None:
    chromium.open(pages["mended"], width=1200, dark=dark)
    assert chromium.value("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert chromium.value(CONTRAST) == {}


def test_the_themes_differ(chromium, pages: dict[str, Path]) -> None:
    papers = []
    for dark in (False, True):
        chromium.open(pages["stock"], width=800, dark=dark)
        papers.append(chromium.value("getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(251, 251, 250)", "rgb(20, 21, 23)"]


def test_tables_have_their_headers_and_regions_their_names(chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["mixed"], width=1200)
    assert chromium.value("document.querySelectorAll('td:first-child, th:not([scope])').length") == 0
    nameless = """[...document.querySelectorAll("[role=region], svg[role=img], section, article")].filter(e =>
        !e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby").split(" ").every(
            id => document.getElementById(id))).length"""
    assert chromium.value(nameless) == 0

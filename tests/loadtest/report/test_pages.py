"""The pages as a browser shows them: headless Chromium, rendered text, plots, no complaint."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadtest.report.compare_page import search_page, versus_page
from loadtest.report.page import page
from loadtest.studies.capacity import Probe
from loadtest.studies.capacity_search import CapacitySearch
from loadtest.studies.compare import compare_runs
from loadtest.verdict.goodput_curve import GoodputCurve
from loadtest.verdict.prediction import TOLERANCE
from loadtest.verdict.resimulation import PredictedRequest, Resimulation
from loadtest.verdict.verdict import conclude

if TYPE_CHECKING:
    from conftest import RunMaker, SampleMaker

    from loadtest.run.folder import Run

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SCREENSHOTS = Path(os.environ.get("SCREENSHOTS", "out/screenshots"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the browser; there is one wherever these tests run."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("no Chromium: `apt-get install chromium`, or another one on the PATH")
    return found


class Browser:
    """Headless Chromium with a profile of its own."""

    def __init__(self, program: str, folder: Path) -> None:
        """Keep what it leaves in *folder*."""
        self._options = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1100,2400",
            "--virtual-time-budget=2000",
        ]

    def __call__(self, option: str, page_file: Path) -> subprocess.CompletedProcess[str]:
        """Open *page_file*."""
        return subprocess.run(
            [*self._options, option, page_file.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )


@pytest.fixture
def browser(chromium: str, tmp_path: Path) -> Browser:
    """Return a browser."""
    return Browser(chromium, tmp_path)


PROBE = """<script>
const shapes = [...document.querySelectorAll('svg')].map(s => {
  const drawn = [...s.querySelectorAll('polyline,circle')].filter(e => {
    const box = e.getBoundingClientRect();
    const style = getComputedStyle(e);
    return box.width + box.height > 0 && (style.stroke !== 'none' || style.fill !== 'none');
  });
  const box = s.getBoundingClientRect();
  return box.width > 100 && box.height > 100 ? drawn.length : 0;
});
const note = document.createElement('pre');
note.id = 'probe';
note.textContent = JSON.stringify({text: document.body.innerText, shapes: shapes,
  wide: document.documentElement.scrollWidth <= innerWidth});
document.body.append(note);
</script>"""
"""Writes into the page what is visible of it, where --dump-dom finds it."""


def look(browser: Browser, html: str, tmp_path: Path, name: str) -> dict[str, object]:
    """Open *html*, keep a screenshot, and return what a reader sees."""
    plain, probed = tmp_path / f"{name}.html", tmp_path / f"{name}-probed.html"
    plain.write_text(html, encoding="utf-8")
    probed.write_text(html.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture = (SCREENSHOTS / f"{name}.png").resolve()
    shot = browser(f"--screenshot={picture}", plain)
    said = [line for line in shot.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    header = picture.read_bytes()[:24]
    assert struct.unpack(">II", header[16:]) == (1100, 2400)
    dom = browser("--dump-dom", probed).stdout
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found
    seen: dict[str, object] = json.loads(unescape(found.group(1)))
    return seen


@pytest.fixture
def run(make_run: RunMaker, make_sample: SampleMaker) -> Run:
    """Answer 3,200 requests, one of which failed."""
    made = [make_sample(k, k / 480, ttft_s=0.05 + k * 7919 % 4800 / 48000) for k in range(4800)]
    made[7] = make_sample(
        7, 7 / 320, ttft_s=None, outcome="cut", detail="<script>alert(1)</script>"
    )
    return make_run(made)


def test_report(browser: Browser, run: Run, tmp_path: Path) -> None:
    """Verdict, phases, errors and plan are there to read; five plots have something in them."""
    foretold = PredictedRequest(
        ttft_s=0.1,
        tpot_s=0.02,
        e2e_s=0.28,
        longest_stall_s=0.02,
        phases_s={"request overhead": 0.01, "queue": 0.04, "prefill": 0.05},
    )
    resimulation = Resimulation(
        requests=dict.fromkeys(range(4800), foretold),
        itl={"mean": 0.02, "p50": 0.02, "p90": 0.02, "p95": 0.02, "p99": 0.02},
    )
    verdict = conclude(run, TOLERANCE, require_prediction=False, resimulation=resimulation)
    foreseen = GoodputCurve(
        points=((200.0, 200.0), (320.0, 318.0), (400.0, 380.0), (440.0, 210.0)),
        limit_requests_per_s=400.0,
    )
    seen = look(browser, page(run, verdict, resimulation, foreseen), tmp_path, "report")
    text, shapes = str(seen["text"]), seen["shapes"]

    assert seen["wide"]
    assert text.startswith("SLO MET")
    for part in ("Predicted, measured, promised", "Phase by phase", "Errors", "The plan"):
        assert part in text
    assert "<script>alert(1)</script>" in text
    assert "explains" in text
    assert isinstance(shapes, list)
    assert len(shapes) == 5
    assert "Goodput against load" in text
    assert "hold up to 400.00 requests/s" in text
    assert all(shapes)


def test_compare(browser: Browser, run: Run, tmp_path: Path) -> None:
    """Two runs: what differs stands first, both are drawn, and no name is wider than the page."""
    versus = compare_runs(run, run, ("before", "after" * 50))
    seen = look(browser, versus_page(versus, run, run), tmp_path, "compare")

    assert str(seen["text"]).startswith("0 of 16 figures differ")
    assert "Compared request by request" in str(seen["text"])
    assert seen["shapes"] == [2, 2]
    assert seen["wide"]


def test_search(browser: Browser, tmp_path: Path) -> None:
    """Tries, the limit found and the predicted one are drawn and said."""
    probes = tuple(
        Probe(
            requests_per_s=rate,
            num_requests=400,
            verdict={True: "met", False: "missed", None: "inconclusive"}[holds],
            holds=holds,
            attained_fraction=0.99 if holds else 0.7,
            good_requests_per_s=rate if holds else 0.7 * rate,
            ttft_s=0.4 if holds else None,
            tpot_s=0.03,
            folder="try",
        )
        for rate, holds in ((8.0, True), (10.0, True), (12.5, False), (11.2, True), (11.8, None))
    )
    search = CapacitySearch(
        host="http://127.0.0.1:1",
        inputs_hash="0",
        percentile="p90",
        first_requests_per_s=8.0,
        resolution_fraction=0.2,
        most_requests=1000,
        predicted_requests_per_s=12.0,
        saturation_requests_per_s=14.0,
        probes=probes,
    )
    seen = look(browser, search_page(search), tmp_path, "search")

    text = str(seen["text"])

    assert text.startswith("The SLO holds at 11.20 requests/s and misses at 12.50")
    assert "-4% to +7% off the measured limit" in text
    assert "Open at 11.80 requests/s" in text
    for part in ("holds", "misses", "open", "predicted limit", "all that is offered", "TTFT p90"):
        assert part in text
    assert seen["shapes"] == [6]

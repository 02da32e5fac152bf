"""The page kit: what is drawn is what was given, nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError, missing_package
from minicluster.pages import figure, write
from minicluster.pages.figure import Figure, axes, axis, bars, line, marks
from minicluster.pages.latency import LatencyCurve, latency_distribution
from minicluster.pages.page import (
    ChartRow,
    DataTable,
    FactTable,
    GpuBox,
    NodeBox,
    NodeGrid,
    Page,
    Section,
    Text,
    Tile,
    ToType,
)
from minicluster.pages.write import render, write_page
from tests.pages import figures_in

EVIL = "</script><b onload='x'>&amp;\"%{x}"


def chart(text: str = "what") -> Figure:
    """Return a chart that says *text* wherever it can."""
    return Figure(
        title=text,
        caption=text,
        traces=(
            marks(text, [1], [2], colour=figure.BLUE, hover="%{text}", texts=[text]),
            bars(text, [text], [2], colour=figure.RED, hover="%{x}"),
            line(text, [1, 2], [2, 3], colour=figure.SOFT, hover="%{y}"),
        ),
        layout=axes(axis(text), axis(text, 0, 5)),
    )


def page(text: str = "what") -> Page:
    """Return a page of every part, which says *text* wherever it can."""
    grid = NodeGrid(
        (text,), (NodeBox(text, (GpuBox(text, 1, text), GpuBox("free", None, text))),), 3
    )
    blocks = (
        Text(text),
        ToType(text, text),
        DataTable((text, text), ((text, text), ("b", "c"))),
        FactTable(((text, text),)),
        grid,
    )
    return Page(
        title=text,
        headline=text,
        status=text,
        lines=(text,),
        notes=(text,),
        tiles=(Tile(name=text, value=text, below=text, bad=True),),
        parts=(
            Section(text, blocks),
            Section(text, (Text(text),), folded=True),
            ChartRow((chart(text),)),
            ChartRow((chart(text),), folded=text),
        ),
        footer=text,
    )


class Checker(HTMLParser):
    """Collect elements, words and addresses of a page; its elements must close in order."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "data"}]
        self.words += [value or "" for _, value in attrs]
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def test_page_holds_its_charts_and_loads_nothing() -> None:
    """The very traces and layouts are in it, each chart with its caption."""
    html = render(page())
    assert checked(html).loads == []
    assert not re.search(r"url\(|@import|<link|https?://", html)
    assert figures_in(html) == 2 * [{"data": list(chart().traces), "layout": chart().layout}]
    assert html.count("<figcaption>what</figcaption>") == 2
    assert html.count('class="chart" role="img" aria-label="what"') == 2


@pytest.mark.parametrize("text", [EVIL, "<i> & b", "'\"{{ 7 * 7 }}</style>"])
def test_no_word_becomes_markup(text: str) -> None:
    """Whatever a scenario, a host or an error says is shown as it was said, and does nothing."""
    html = render(page(text))
    seen, plain = checked(html), checked(render(page()))
    assert seen.tags == plain.tags
    assert seen.words.count(text) >= plain.words.count("what") - 1  # less the title, which is raw
    assert f"<title>{text}" in unescape(html)
    for drawn in figures_in(html):
        assert not re.search("<[bi]", json.dumps(drawn))
        for trace in drawn["data"]:
            assert unescape(trace["name"]) == text
            assert text not in trace["hovertemplate"]


def test_colours_are_known_on_light_and_dark_screens() -> None:
    """Every colour of a chart is a variable that the style sheet has, twice."""
    style = (write.HERE / "page.css").read_text(encoding="utf-8")
    light, dark = (
        set(re.findall(r"(--[a-z]+): #", part)) for part in style.split("@media", maxsplit=1)
    )
    used = {value for name, value in vars(figure).items() if name.isupper() and "var(" in str(value)
            and isinstance(value, str)}  # fmt: skip
    assert light == dark
    assert {value[4:-1] for value in used} <= light
    script = (write.HERE / "page.js").read_text(encoding="utf-8")
    assert set(re.findall(r"var\((--[a-z]+)\)", script + style)) <= light


def test_a_page_is_one_file_that_holds_plotly(tmp_path: Path) -> None:
    """The script is in a page with charts, packed; a page without charts is small."""
    write_page(tmp_path / "a.html", page())
    write_page(tmp_path / "b.html", Page(title="a", headline="b"))
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    [packed] = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', text)
    assert b"Plotly" in gzip.decompress(base64.b64decode(packed))
    assert len(text) < 3_000_000
    assert (tmp_path / "b.html").stat().st_size < 50_000
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "b.html"}
    with pytest.raises(InputError, match="a file that can be written"):
        write_page(tmp_path / "no" / "a.html", page())


def test_without_plotly_charts_name_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was installed is installed again from where it came, not from a package index."""
    write._packed_plotly.cache_clear()
    monkeypatch.setattr(write, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError) as refused:
        render(page())
    assert "pip install 'REPOSITORY', where minicluster" in str(missing_package(refused.value.name))


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import sizing.report.questions", {"plotly", "jinja2", "ray", "torch", "vllm", "locust"}),
        ("import loadtest.report.judge", {"plotly", "jinja2", "ray", "torch", "vllm", "locust"}),
    ],
)
def test_libraries_are_imported_where_they_are_needed(code: str, absent: set[str]) -> None:
    """A command starts without those of pages and of serving; of Plotly only its script is read."""
    whole = f"{code}; import sys; print({absent} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


LATENCIES = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=2000)


@given(LATENCIES, st.floats(1e-3, 1e3))
def test_distribution_draws_the_values(values: list[float], limit: float) -> None:
    """Each point is a value over the share of requests within it; all lie on the axes."""
    drawn = latency_distribution(
        "TTFT: distribution",
        [LatencyCurve(name="measured", values_s=values, colour=figure.BLUE)],
        predicted_s={0.5: limit, 0.99: 2 * limit},
        limit=(0.99, limit),
    )
    unit = drawn.layout["xaxis"]["title"]["text"]
    scale = {"ms": 1000, "s": 1}[unit]
    curve, ordered = drawn.trace("measured"), np.sort(values)
    ranks = np.rint((1 - np.array(curve["y"])) * len(values) - 0.5).astype(int)
    assert ranks[0] == 0
    assert ranks[-1] == len(values) - 1
    assert curve["x"] == pytest.approx(scale * ordered[ranks], rel=1e-5)
    assert curve["customdata"] == pytest.approx(100 * (ranks + 0.5) / len(values), rel=1e-5)
    assert drawn.trace("predicted")["x"] == pytest.approx(
        [scale * limit, 2 * scale * limit], rel=1e-5
    )
    assert drawn.trace("predicted")["y"] == pytest.approx([0.5, 0.01])
    assert drawn.trace("SLO")["y"] == pytest.approx([1, 0.01, 0.01])
    assert drawn.trace("SLO")["x"][:2] == pytest.approx([scale * limit] * 2, rel=1e-5)
    (left, right), (foot, top) = drawn.layout["xaxis"]["range"], drawn.layout["yaxis"]["range"]
    for trace in drawn.traces:
        assert all(left <= x <= right * (1 + 1e-5) for x in trace["x"])
        assert all(top - 1e-5 <= math.log10(y) <= foot for y in trace["y"])

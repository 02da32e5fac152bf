"""Tables in a terminal: whole at every width, whatever is in them."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minicluster.pages.page import Cell, DataTable, FactTable, Section, Text
from sizing.report.terminal import print_sections, section_lines
from tests.sizing.conftest import Sizing

WIDTHS = (60, 80, 120)
QUICK = ("llama-3.1-8b-h100", "--set", "search.pools=mixed", "--set", "search.tp=[1]")
WORD = st.text("abcdefg-_.0123456789", min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("command", "keys", "widths"),
    [
        (("models",), ("name",), WIDTHS),
        (("gpus",), ("name",), WIDTHS),
        (("schema",), ("key",), WIDTHS),
        (("presets",), ("name",), WIDTHS),
        (("engines",), ("version",), WIDTHS),
        (("prices",), ("gpu",), WIDTHS),
        (("fit", "deepseek-v3", "--gpu", "h200-sxm"), ("layouts", "layout"), WIDTHS),
        (("fit", "--gpus", "2"), ("model",), WIDTHS),
        (("fabric", "topology", "dgx-h100"), ("tiers", "name"), WIDTHS),
        (("capacity", *QUICK, "--gpus", "1"), ("points", "layout"), WIDTHS[:1]),
        (("compare", QUICK[0], "--gpu", "h100-sxm,h200-sxm", *QUICK[1:]), (), WIDTHS[:1]),
        (("predict", QUICK[0], "--mixed", "3xTP1", "--verbose"), (), WIDTHS[:1]),
    ],
    ids=lambda value: str(value[0]) if value else "",
)
def test_no_key_and_no_answer_is_cut(
    sizing: Sizing,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    keys: tuple[str, ...],
    widths: tuple[int, ...],
) -> None:
    """Every line fits, nothing ends in an ellipsis, and every key stands there whole."""
    data = json.loads(sizing(*command, "--json").out) if keys else []
    rows = data if len(keys) < 2 else data[keys[0]]
    for width in widths:
        monkeypatch.setattr("tests.sizing.conftest.COLUMNS", str(width))
        done = sizing(*command)
        assert done.code == 0
        assert "…" not in done.out
        assert max(map(len, done.out.splitlines())) <= width
        printed = " ".join(done.out.split())
        assert [row[keys[-1]] for row in rows if row[keys[-1]] not in printed] == []


@settings(max_examples=40)
@given(
    st.lists(st.tuples(WORD, WORD, st.lists(WORD, max_size=9).map(" ".join)), min_size=1),
    st.integers(40, 160),
)
def test_cells_are_whole_and_lines_fit(rows: list[tuple[str, str, str]], width: int) -> None:
    """Columns that fit nowhere become a block a row; only texts are wrapped, between words."""
    table = DataTable(("name", "number", "text"), tuple(rows), words=("text",))
    lines = [line.plain for line in section_lines(Section("", (table,)), width)]
    assert max(map(len, lines)) <= width
    printed = " ".join(" ".join(lines).split()).split(" ")
    for row in rows:
        assert [word for cell in row for word in cell.split() if word not in printed] == []


def test_details_go_first_and_are_named() -> None:
    rows = (("a-name-that-is-long", "123", "4,567,890"),)
    table = DataTable(("name", "less\nneeded", "answer"), rows, details=("less\nneeded",))
    whole, narrow, blocks = (
        "\n".join(line.plain for line in section_lines(Section("", (table,)), width))
        for width in (60, 32, 20)
    )
    assert "less" in whole.splitlines()[0]
    assert narrow.splitlines()[0].split() == ["name", "answer"]
    assert "without less needed" in " ".join(narrow.split())
    assert "answer       4,567,890" in blocks
    assert "123" in blocks


def test_brackets_are_words_and_verdicts_have_colours() -> None:
    """A table of TOML is no markup of Rich's; facts and sentences are wrapped at the width."""
    console = Console(file=StringIO(), width=40, force_terminal=True, color_system="standard")
    facts = FactTable((("To change", "[cost] max_usd_per_hour " * 4),))
    verdicts = DataTable((), (("TTFT", Cell("missed", "bad")),))
    with console.capture() as screen:
        print_sections([Section("[slo] of it", (facts, verdicts, Text("[red]")))], console)
    shown = screen.get()
    assert shown.count("[cost]") == 4
    assert "[slo] of it" in shown
    assert "[red]" in shown
    assert "\x1b[31mmissed" in shown

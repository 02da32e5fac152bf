"""Sections in a terminal: the one place where a table is laid out for a width."""

from __future__ import annotations

import os
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text as Styled

from minicluster.pages.page import Cell, ChartRow, DataTable, FactTable, Section, Text, ToType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

GAP, INDENT = 2, 2
LABEL_WIDTH = 12
"""Least width of the names of facts."""
WORDS_WIDTH = 24
"""Width that a column of words has at least, unless its texts are shorter."""
PIPE_WIDTH = 160
"""Width of a table that is written to a pipe or a file; sentences keep the console's."""
STYLES = {"good": "green", "bad": "red", "open": "yellow", "bold": "bold", "": ""}


def print_sections(parts: Iterable[Section | ChartRow], console: Console | None = None) -> None:
    """Print sections for the width of the console; charts are for pages only."""
    console = console or Console()
    table_width = console.width
    if not console.is_terminal and "COLUMNS" not in os.environ:
        table_width = max(table_width, PIPE_WIDTH)
    for at, part in enumerate(part for part in parts if isinstance(part, Section)):
        lines = [*section_lines(part, console.width, table_width)]
        for line in [Styled(), *lines] if at else lines:
            console.print(line, no_wrap=True, overflow="ignore", crop=False, highlight=False)


def section_lines(part: Section, width: int, table_width: int | None = None) -> Iterator[Styled]:
    """
    Yield the lines of a section; a word longer than the width is never cut.

    Args:
        width: of sentences and facts, in columns.
        table_width: of tables; `None`: the same.
    """
    if part.title:
        yield from (Styled(line, "bold") for line in wrapped(part.title, width))
    commands = [len(block.command) for block in part.blocks if isinstance(block, ToType)]
    for block in part.blocks:
        if isinstance(block, Text):
            yield from map(Styled, wrapped(block.text, width))
        elif isinstance(block, ToType):
            yield Styled(f"{block.command:{max(commands)}}  {block.does}")
        elif isinstance(block, FactTable):
            yield from _facts(block.rows, width)
        elif isinstance(block, DataTable) and block.rows:
            yield from table_lines(block, table_width or width)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, its own kept, none empty; words are not cut."""
    lines = (
        wrap(line, max(width, 1), break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return [part for line in lines for part in line] or [""]


def _facts(rows: Sequence[tuple[str, str | Cell]], width: int, indent: int = 0) -> Iterator[Styled]:
    first = max(LABEL_WIDTH, *(len(name) + GAP for name, _ in rows))
    for name, value in rows:
        for at, line in enumerate(wrapped(str(value), width - indent - first)):
            label = "" if at else name
            yield Styled.assemble(" " * indent, f"{label:{first}}", (line, _style(value)))


def table_lines(table: DataTable, width: int) -> Iterator[Styled]:
    """Yield a table with all columns, else without its details, else a block for each row."""
    count = max(map(len, table.rows))
    filled = [at for at in range(count) if not at or any(str(row[at]) for row in table.rows)]
    details = [at for name in table.details for at in filled if table.heads[at] == name]
    for left_out in range(len(details) + 1):
        shown = [at for at in filled if at not in details[:left_out]]
        widths = column_widths(table, shown, width)
        if widths is not None:
            yield from _columns(table, shown, widths)
            if left_out:
                names = ", ".join(table.heads[at].replace("\n", " ") for at in details[:left_out])
                yield from (Styled(line, "dim") for line in wrapped(
                    f"without {names}: a wider terminal and --json have them", width))  # fmt: skip
            return
    for row in table.rows:
        yield Styled(str(row[0]), "bold")
        rest = [at for at in filled if at and str(row[at])]
        if table.heads:
            named = [(table.heads[at].replace("\n", " "), row[at]) for at in rest]
            yield from _facts(named, width, INDENT)
        else:
            for at in rest:
                for line in wrapped(str(row[at]), width - INDENT):
                    yield Styled.assemble(" " * INDENT, (line, _style(row[at])))


def column_widths(table: DataTable, shown: Sequence[int], width: int) -> list[int] | None:
    """
    Return the width of each column that is *shown*; `None` where they do not fit.

    Numbers and names keep theirs; headings and columns of words share what is left.
    """
    least, most = [], []
    for at in shown:
        head = table.heads[at] if table.heads else ""
        cells = [str(row[at]) for row in table.rows]
        whole = max(len(line) for cell in cells for line in cell.splitlines() or [""])
        word = max(len(part) for cell in cells for part in cell.split() or [""])
        kept = min(whole, max(WORDS_WIDTH, word)) if _has_words(table, at) else whole
        least.append(max(kept, *map(len, head.split() or [""])))
        most.append(max(whole, *map(len, head.splitlines() or [""]), least[-1]))
    room = width - sum(least) - GAP * (len(shown) - 1)
    if room < 0:
        return None
    widths = list(least)
    wanting = sorted(range(len(shown)), key=lambda at: most[at] - least[at])
    for place, at in enumerate(wanting):
        more = min(most[at] - least[at], room // (len(wanting) - place))
        widths[at], room = least[at] + more, room - more
    return widths


def _has_words(table: DataTable, at: int) -> bool:
    return not table.heads or table.heads[at] in table.words


def _columns(table: DataTable, shown: Sequence[int], widths: Sequence[int]) -> Iterator[Styled]:
    aligned = [">" if at and not _has_words(table, at) else "<" for at in shown]

    def lines(cells: Sequence[str | Cell], style: str = "") -> Iterator[Styled]:
        columns = [wrapped(str(cell), width) for cell, width in zip(cells, widths, strict=True)]
        for place in range(max(map(len, columns))):
            line = Styled()
            for cell, column, side, width in zip(cells, columns, aligned, widths, strict=True):
                text = column[place] if place < len(column) else ""
                line.append(f"{text:{side}{width}}", _style(cell) or style)
                line.append(" " * GAP)
            line.rstrip()
            yield line

    if table.heads:
        yield from lines([table.heads[at] for at in shown], "bold")
        yield Styled("─" * (sum(widths) + GAP * (len(widths) - 1)), "dim")
    for row in table.rows:
        yield from lines([row[at] for at in shown])


def _style(cell: str | Cell) -> str:
    return STYLES[cell.tone] if isinstance(cell, Cell) else ""

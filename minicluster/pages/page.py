"""A page as values: what it says, in the order in which it says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minicluster.pages.figure import Figure

PHONE, WRAPPED, GAP = 54, 12, 2
"""Characters in a line of a table on a phone, in a column of words, and between columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A number that is looked for first: its name, its value, and what to compare it with."""

    name: str
    value: str
    below: str = ""
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class ToType:
    """A command to type, and what it does."""

    kind: ClassVar[str] = "command"
    command: str
    does: str


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a tone: good, bad, open or bold."""

    text: str
    tone: str

    def __str__(self) -> str:
        """Return the text alone."""
        return self.text


@dataclass(frozen=True, slots=True)
class DataTable:
    """
    A table of figures, words in its first column.

    Attributes:
        heads: of each column; empty: rows without headings, all of words.
        rows: as many cells as heads each.
        words: heads of further columns of words, which may wrap.
        details: heads of columns that a narrow screen leaves out, the first of them first.
    """

    kind: ClassVar[str] = "table"
    heads: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    words: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def is_wide(self) -> bool:
        """Whether a phone has no room for the columns side by side; words may wrap there."""
        if not self.heads:
            return False
        widths = [
            max(len(str(row[at])) for row in (self.heads, *self.rows))
            for at in range(len(self.heads))
        ]
        wrapped = [
            min(width, WRAPPED) if at == 0 or head in self.words else width
            for at, (head, width) in enumerate(zip(self.heads, widths, strict=True))
        ]
        return sum(wrapped) + GAP * len(wrapped) > PHONE

    def groups(self) -> tuple[bool, ...]:
        """Say of each row whether a group begins with it: its first word is a new one."""
        firsts = [str(row[0]).partition(" ")[0] for row in self.rows]
        return tuple(
            at > 0 and first != firsts[at - 1] and not first[:1].isdigit()
            for at, first in enumerate(firsts)
        )


@dataclass(frozen=True, slots=True)
class FactTable:
    """Names, and what is said of each."""

    kind: ClassVar[str] = "facts"
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GpuBox:
    """A GPU: the role and the number of the replica that has it; `None`: it is free."""

    role: str
    replica: int | None
    title: str


@dataclass(frozen=True, slots=True)
class NodeBox:
    """A node and its GPUs."""

    name: str
    gpus: tuple[GpuBox, ...]


@dataclass(frozen=True, slots=True)
class NodeGrid:
    """GPUs by node, drawn as boxes, a legend of their roles; *more* nodes are not drawn."""

    kind: ClassVar[str] = "nodes"
    roles: tuple[str, ...]
    nodes: tuple[NodeBox, ...]
    more: int = 0


Block = Text | ToType | DataTable | FactTable | NodeGrid


@dataclass(frozen=True, slots=True)
class Section:
    """
    Blocks below a heading.

    Attributes:
        folded: whether a page shows the heading alone until a reader opens it.
    """

    kind: ClassVar[str] = "section"
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class ChartRow:
    """
    Charts side by side.

    Attributes:
        folded: heading that a page shows in their place until a reader opens it; empty: none.
    """

    kind: ClassVar[str] = "charts"
    figures: tuple[Figure, ...]
    folded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """
    A page: the answer first.

    Attributes:
        title: of the browser's tab.
        headline: the answer.
        status: how it ended, as a class of page.css: met, missed, inconclusive; empty: no verdict.
        lines: what the answer rests on.
        notes: what else to know of it, in grey.
        footer: which command wrote the page.
    """

    title: str
    headline: str
    status: str = ""
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = ()
    parts: tuple[Section | ChartRow, ...] = ()
    footer: str = ""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All charts."""
        rows = [part.figures for part in self.parts if isinstance(part, ChartRow)]
        return tuple(figure for row in rows for figure in row)

    def figure(self, title: str) -> Figure:
        """Return the chart of that *title*. Raises KeyError: the page has none."""
        figures = [figure for figure in self.figures if figure.title == title]
        if not figures:
            raise KeyError(title)
        return figures[0]

"""Self-contained HTML: nothing is loaded from anywhere."""

from __future__ import annotations

import html
from importlib import metadata, resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DOTS = {"held", "missed", "open", "point"}
"""Classes of a legend's marks that are no lines."""


def document(title: str, *body: str) -> str:
    """Return a whole page; *title* is escaped, *body* is not."""
    style = resources.files("loadtest.report").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}<footer>minicluster {metadata.version('minicluster')}, "
        "loadtest</footer></main></body></html>\n"
    )


def escape(text: object) -> str:
    """Make *text* safe wherever it stands."""
    return html.escape(str(text))


def section(title: str, inner: str) -> str:
    """Return *inner*, which is HTML, below a heading."""
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def paragraph(text: str, name: str = "") -> str:
    """Return *text* as a paragraph of class *name*; no line ends before its %."""
    mark = f' class="{name}"' if name else ""
    address = "://" in text.partition(" ")[0]
    begun = text if address else text[:1].upper() + text[1:]
    sentence = escape(begun).replace(" %", "&nbsp;%")
    return f"<p{mark}>{sentence}</p>"


def legend(marks: Mapping[str, str]) -> str:
    """Say what the marks of a drawing mean, by their class."""
    drawn = []
    for name, text in marks.items():
        kind = "b" if name in DOTS else "i"
        drawn.append(f'<span><{kind} class="{name}"></{kind}>{escape(text)}</span>')
    return f'<div class="legend">{"".join(drawn)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; where the first word of rows changes, a line is drawn."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    drawn, group = [], ""
    for row in rows:
        first = row[0].split()[0]
        mark = ' class="group"' if group and first != group and not first[0].isdigit() else ""
        group = first
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        drawn.append(f"<tr{mark}>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(drawn)}</tbody></table>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and what is said of them."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in pairs
    )
    return f'<table class="facts">{rows}</table>'

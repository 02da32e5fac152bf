"""How the page looks: the page kit's sections and charts in its style."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

import minicluster.pages
from minicluster.pages.page import Section, Text
from minicluster.pages.write import render_parts

if TYPE_CHECKING:
    from minicluster.pages.figure import Figure

CHART_HEIGHT = 340
"""Pixels."""
CSS = (Path(minicluster.pages.__file__).parent / "page.css").read_text(encoding="utf-8")
OWN = """
.stMainBlockContainer { padding-top: 2.5rem; }
h1 { font-size: 2rem !important; padding-top: 0 !important; }
.kit { background: none; }
.kit .tiles { margin: 0; grid-template-columns: 1fr; }
.kit .tile { min-height: 92px; }
.kit section {
  padding: 10px 0; margin: 0; border: 0; border-radius: 0; background: none; overflow-x: auto;
  animation: hidden-right linear; animation-timeline: scroll(self inline);
}
.kit td, .kit th { padding: 4px 7px; font-size: 13px; }
.kit { container-type: inline-size; }
[data-testid=stPopoverBody] .kit { width: min(640px, 78vw); }
@keyframes hidden-right { from { box-shadow: inset -12px 0 8px -8px #8888; } }
@container (width < 420px) { .kit td, .kit th { padding: 4px 3px; font-size: 12px; } }
@container (width < 300px) {
  .kit .facts :is(th, td) { display: block; width: auto; }
  .kit .facts th { border: 0; padding-bottom: 0; }
}
.kit th { white-space: pre-line; }
.kit.today td { white-space: normal; }
.kit.said h2 { display: none; }
.kit.said section { padding: 0; }
.kit.said p { font-size: 14px; margin: 2px 0; overflow-wrap: anywhere; }
[data-testid=stForm] [data-testid=stColumn] { min-width: 0; }
"""
STYLE = ".kit {" + CSS.replace(":root", "&").replace("body {", "& {") + "}" + OWN
"""Rules of page.css for everything inside an element of class `kit`, and for nothing else."""

COLOUR = re.compile(r"var\((--[a-z]+)\)")


def kit(*parts: Section, kind: str = "") -> str:
    """Return sections as HTML that `STYLE` fits; *kind* is a class of its own rules."""
    return f'<div class="{f"kit {kind}".strip()}">{render_parts(parts)}</div>'


def lines(text: str) -> str:
    """Return the lines of a text as HTML, a small paragraph each."""
    return kit(Section("", tuple(Text(line) for line in text.splitlines())), kind="said")


def palette(*, dark: bool) -> dict[str, str]:
    """Return the colours of the style sheet by name."""
    light_text, _, dark_text = CSS.partition("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"(--[a-z]+): (#[0-9a-f]{6})", dark_text if dark else light_text))


def coloured(value: Any, colours: dict[str, str]) -> Any:  # noqa: ANN401  (parts of a chart)
    """Return a part of a chart with colours in place of their names."""
    if isinstance(value, dict):
        return {key: coloured(each, colours) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [coloured(each, colours) for each in value]
    found = COLOUR.fullmatch(value) if isinstance(value, str) else None
    return colours[found[1]] if found else value


def chart(figure: Figure, class_name: str) -> None:
    """Draw a chart of the page kit in the colours of this page."""
    st.markdown(f"**{figure.title}**")
    colours = palette(dark=st.context.theme.type == "dark")
    shared = {
        "height": CHART_HEIGHT,
        "margin": {"l": 8, "r": 8, "t": 32, "b": 8},  # the toolbar stands above
        "legend": {"orientation": "h", "x": 0, "y": -0.42, "yanchor": "top"},
        "showlegend": len(figure.traces) > 1,
    }
    drawn = {"data": list(figure.traces), "layout": {**shared, **figure.layout}}
    st.plotly_chart(
        coloured(drawn, colours),
        key=f"{class_name}:{figure.title}",
        config={"displaylogo": False},
        alt=figure.caption,
    )
    st.caption(figure.caption)

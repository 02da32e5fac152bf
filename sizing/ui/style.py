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

CHART_HEIGHT = 300
"""Pixels."""
CSS = (Path(minicluster.pages.__file__).parent / "page.css").read_text(encoding="utf-8")
OWN = """
.stMainBlockContainer { padding-top: 2.5rem; }
h1 { font-size: 2rem !important; padding-top: 0 !important; }
.kit { background: none; }
.kit .tiles { margin: 0; grid-template-columns: 1fr; }
.kit .tile { min-height: 92px; padding: 8px 10px; }
[class*=st-key-tiles] {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(106px, 1fr)); gap: 4px 8px;
}
[class*=st-key-tiles] > * { width: auto; min-width: 0; }
[class*=st-key-tiles] button p { font-size: 12px; white-space: nowrap; }
[class*=st-key-tiles] button { min-height: 0; padding: 2px 0; }
.kit section { padding: 8px 0; margin: 0; border: 0; border-radius: 0; background: none; }
.kit td, .kit th { padding: 4px 7px; font-size: 13px; }
[data-testid=stPopoverBody] .kit { width: min(640px, 78vw); }
.kit th { white-space: pre-line; }
.kit p { font-size: 14px; }
.kit.today td { white-space: normal; }
.kit.said h2 { display: none; }
.kit.said section { padding: 0; }
.kit.said p { font-size: 14px; margin: 2px 0; overflow-wrap: anywhere; }
:is(.st-key-fields, .st-key-ticks) [data-testid=stColumn] { min-width: 0; }
.st-key-bar { background: Canvas; z-index: 9; }
.st-key-bar [data-testid=stMarkdown] p {
  font-size: 14px; min-height: 3em; max-height: 6em; overflow-y: auto; overflow-wrap: anywhere;
}
@media (min-width: 641px) {
  [class*=st-key-tiles] { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
  .st-key-sides > * > * > [data-testid=stColumn]:first-child {
    position: sticky; top: 1rem; align-self: flex-start;
  }
  .st-key-fields { max-height: calc(100vh - 16rem); overflow-y: auto; padding-right: 12px; }
  .st-key-bar a { display: none; }
}
@media (max-width: 640px) {
  .st-key-fields, .st-key-answer { gap: 0.6rem; }
  .st-key-fields [data-testid=stExpander] summary { padding: 6px 12px; min-height: 0; }
  .kit .tile b { font-size: 16px; }
  h3 { font-size: 1.3rem !important; padding: 0 0 0.4rem !important; }
  h1 { font-size: 1.5rem !important; }
  .kit .tile { font-size: 13px; }
  .stMainBlockContainer { padding: 1.2rem 1rem 9rem; }
  .st-key-sides > * > [data-testid=stHorizontalBlock] { flex-direction: column-reverse; }
  .st-key-bar {
    position: fixed; bottom: 0; left: 0; right: 0; width: auto; padding: 6px 16px 10px;
    border-top: 1px solid #8886;
  }
}
"""
STALE = """
.st-key-answer { opacity: 0.55; }
.st-key-answer [data-testid=stDownloadButton] { display: none; }
"""
"""Rules of an answer to what the fields said before: pale, and without downloads."""
STYLE = ".kit {" + CSS.replace(":root", "&").replace("body {", "& {") + "}" + OWN
"""Rules of page.css for everything inside an element of class `kit`, and for nothing else."""

ENTER = """
if (!window.planOnEnter) {
  window.planOnEnter = event => {
    if (event.key === "Enter" && event.target.matches(".st-key-fields input:not([role=combobox])"))
      setTimeout(() => document.querySelector(".st-key-plan button").click(), 100);
  };
  document.addEventListener("keydown", window.planOnEnter);
}
"""
"""Presses Plan where Enter was pressed in a field, once Streamlit has taken what was typed."""
COLOUR = re.compile(r"var\((--[a-z]+)\)")


def kit(*parts: Section, kind: str = "") -> str:
    """Return sections as HTML that `STYLE` fits; *kind* is a class of its own rules."""
    return f'<div class="{f"kit {kind}".strip()}">{render_parts(parts)}</div>'


def lines(text: str) -> str:
    """Return the lines of a text as HTML, a small paragraph each."""
    return kit(Section("", tuple(Text(line) for line in text.splitlines())), kind="said")


def no_formula(text: str) -> str:
    r"""Return Markdown with `\$` for `$`: what stands between two would be a formula."""
    return text.replace("$", r"\$")


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
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": len(figure.traces) > 1,
    }
    drawn = {"data": list(figure.traces), "layout": {**shared, **figure.layout}}
    st.plotly_chart(
        coloured(drawn, colours),
        key=f"{class_name}:{figure.title}",
        config={"displayModeBar": False},
        alt=figure.caption,
    )

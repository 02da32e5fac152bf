"""What the page answers: a plan with its figures, charts and files, or why there is none."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipFile

import streamlit as st

from minicluster.errors import MiniclusterError
from minicluster.pages.page import FactTable, Section, Text, Tile
from minicluster.pages.write import SCRIPT, plotly_script, render, render_tiles
from minicluster.plan import to_json
from sizing.planner.build_plan import NoPlan, plan
from sizing.planner.explanation import explain_plan
from sizing.planner.studies.capacity import capacity
from sizing.planner.studies.decisions import decisions
from sizing.planner.studies.loss import as_confident
from sizing.planner.studies.result import layout_of
from sizing.planner.studies.split_map import split_map
from sizing.report.plan_charts import latency_figures, layout_grid
from sizing.report.plan_page import plan_page, plan_tiles
from sizing.report.plan_screen import answer_facts, detail_facts, evidence_facts, headline
from sizing.report.questions import capacity_page, decisions_page, split_map_page
from sizing.report.tables import explanation_tables, latency_table, layout_table, titled_section
from sizing.simulation.planned import simulate
from sizing.ui import form
from sizing.ui.style import coloured, kit, palette

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table

    from minicluster.pages.figure import Figure
    from minicluster.pages.page import Page
    from minicluster.plan import Plan
    from sizing.planner.candidates import Candidate
    from sizing.planner.search import Told
    from sizing.simulation.outcome import Outcome

    Progress = Callable[[int, int], None]

REQUESTS = 6_000
"""Requests simulated for the distributions: a p99 rests on 60 of them."""
CHART_HEIGHT = 340
"""Pixels."""
TILE_WIDTH = 165
"""Pixels: two beside one another on a phone."""
SHARES = (0.25, 0.5, 1.0, 2.0)
"""GPUs of the capacity curve, as shares of the plan's."""
FACTS_OF = {
    "GPUs": ("Compared", "By confidence", "Network", "Routing", "Deployment"),
    "confidence": ("Confidence", "Simulated", "By confidence", "Measured", "Step times"),
    "headroom": ("Headroom", "Capacity"),
    "energy": ("Cost",),
    "price": ("Cost",),
}
"""Facts of a plan's screen that say where a figure comes from, by the figure's name."""


@lru_cache(maxsize=64)
def _known(case: form.Case) -> list[Plan | NoPlan]:  # noqa: ARG001  (the key)
    """Return a list for the plan of a case, which is put there when it is known."""
    return []


def planned(case: form.Case, told: Told | None = None) -> Plan | NoPlan:
    """
    Return the plan of a case, or why there is none; a case is planned once.

    Args:
        told: is called with each configuration that holds so far.

    Raises:
        InputError: a scenario that cannot be planned at all.
    """
    known = _known(case)
    if not known:
        try:
            known.append(plan(case.scenario(), told=told))
        except NoPlan as none:
            known.append(none)
    return known[0]


def draw(case: form.Case) -> None:
    """Draw the answer to one case."""
    found = _planned(case)
    if found is None:
        return
    st.subheader(headline(found), anchor="answer")
    st.markdown(f"**{layout_of(found)}**: {_binds(found)}")
    _tiles(case, found)
    pools = titled_section(layout_table(found.pools, found.prediction))
    st.html(kit(Section("", (layout_grid(found),)), pools))
    st.html(kit(titled_section(latency_table(found.prediction, found.promises))))
    _downloads(case, found)
    _distributions(case, found)
    _questions(case, found)
    with st.expander("Assumptions, errors and sources"):
        st.html(kit(Section("", (FactTable(tuple(_facts(found))),))))


def side_by_side(cases: Sequence[tuple[str, form.Case]]) -> None:
    """Draw the figures of several plans in columns."""
    for (name, case), column in zip(cases, st.columns(len(cases)), strict=True):
        with column, st.container(border=True):
            st.markdown(f"**{name}**")
            found = _planned(case)
            if found is not None:
                st.markdown(headline(found))
                rows = [("layout", layout_of(found)), ("then binds", found.headroom.binds)]
                rows += [(tile.name, tile.value) for tile in plan_tiles(found)]
                st.html(kit(Section("", (FactTable(tuple(rows)),))))


def _planned(case: form.Case) -> Plan | None:
    """Plan a case, or say why it has no plan."""
    so_far = st.empty()

    def told(found: Candidate) -> None:
        kinds = " and ".join(f"{gpus} {kind}" for kind, gpus in found.gpus_by_kind.items())
        so_far.markdown(
            f"### {kinds} hold the limits\n`{found}`, so far: fewer are looked for, and the figures"
            " follow"
        )

    try:
        with st.spinner("Searching layouts; each is simulated", show_time=True):
            found = planned(case, told)
    except MiniclusterError as error:
        st.error(str(error))
        return None
    so_far.empty()
    if not isinstance(found, NoPlan):
        return found
    none = found.infeasible
    st.error(f"**No plan**: {none.reason}")
    rows = [("What binds", none.binds)]
    if none.nearest:
        rows.append(("Nearest miss", f"{none.nearest} ({none.nearest_gpus} GPUs)"))
    rows += [("Missed by", none.missed_by), ("To change", none.way_out)]
    st.html(kit(Section("", (FactTable(tuple(rows)),))))
    return None


def _binds(found: Plan) -> str:
    used = found.prediction.utilisation_fraction
    parts = [
        f"{role} is {used[role]:.0%} used and bound by {bound}"
        for role, bound in found.prediction.bottleneck.items()
    ]
    return f"{'; '.join(parts)}. First limit beyond this load: {found.headroom.binds}."


def _facts(found: Plan) -> Iterator[tuple[str, str]]:
    yield from answer_facts(found)
    yield from evidence_facts(found)
    yield from detail_facts(found)


# --- figures, each with its terms


def _tiles(case: form.Case, found: Plan) -> None:
    """Draw the figures, and below each a button that opens the terms it is made of."""
    nodes = found.cost.nodes
    below = f"on {nodes} node{'' if nodes == 1 else 's'}"
    tiles = [Tile(name="GPUs", value=f"{found.cost.gpus}", below=below), *plan_tiles(found)]
    with st.container(horizontal=True, gap="small"):
        for tile in tiles:
            with st.container(width=TILE_WIDTH, gap=None):
                st.html(f'<div class="kit">{render_tiles([tile])}</div>')
                with st.popover(f"{tile.name}: how?", type="tertiary"):
                    st.html(kit(*_terms(case, found, tile.name.partition(" ")[0])))


def _terms(case: form.Case, found: Plan, figure: str) -> Iterator[Section]:
    """Yield what a figure is made of: terms of `sizing explain`, or what it is divided from."""
    if figure not in FACTS_OF:
        groups = {"TTFT": ("Mean TTFT", "Prefill"), "TPOT": ("Decode",)}[figure]
        for each in _explained(case):
            if isinstance(each, str):
                if each.startswith(groups):
                    yield Section("", (Text(each),))
            elif str(each.title).startswith((*groups, "Interference")):
                yield titled_section(each)
        yield titled_section(latency_table(found.prediction, found.promises))
        return
    kept = tuple(row for row in _facts(found) if row[0] in FACTS_OF[figure])
    yield Section("", (FactTable(kept),))
    if figure in {"GPUs", "headroom"}:
        yield titled_section(layout_table(found.pools, found.prediction))
    elif figure != "confidence":
        yield Section("Terms (docs/model.md, eq. E2)", (FactTable(tuple(_cost_terms(found))),))


@lru_cache(maxsize=64)
def _explained(case: form.Case) -> list[Table | str]:
    found = planned(case)
    return [] if isinstance(found, NoPlan) else list(explanation_tables(explain_plan(found)))


def _cost_terms(found: Plan) -> Iterator[tuple[str, str]]:
    """Yield what energy and price per token are divided from."""
    yield "GPUs", f"{found.cost.gpus}"
    if found.cost.gpu_power_w is not None:
        yield "Power of all", f"{found.cost.gpu_power_w:,.0f} W"
    if found.cost.price_usd_per_hour is not None:
        yield "Price of all", f"{found.cost.price_usd_per_hour:,.2f} US dollars per hour"
    yield "Output tokens", f"{found.prediction.output_tokens_per_s:,.0f} per second"


# --- files


def _downloads(case: form.Case, found: Plan) -> None:
    name = found.model.id.replace("/", "-")
    scenario, written, report = st.columns(3)
    scenario.download_button(
        "Scenario (TOML)",
        form.scenario_file(case),
        f"{name}.toml",
        key="scenario-file",
        width="stretch",
    )
    written.download_button(
        "Plan (JSON)", to_json(found), f"{name}-plan.json", key="plan-file", width="stretch"
    )
    report.download_button(
        "Report (HTML, zip)",
        lambda: _report(found),
        f"{name}-report.zip",
        key="report-file",
        width="stretch",
        help="The page of `sizing plan --html`; it is made when you ask for it, in 10 seconds",
    )


def _report(found: Plan) -> bytes:
    """Return the page of a plan with the script of its charts."""
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as files:
        files.writestr("plan.html", render(plan_page(found)))
        files.write(plotly_script(), SCRIPT)
    return packed.getvalue()


# --- charts


def chart(figure: Figure) -> None:
    """Draw a chart of the page kit in the colours of this page."""
    st.markdown(f"**{figure.title}**")
    colours = palette(dark=st.context.theme.type == "dark")
    shared = {
        "height": CHART_HEIGHT,
        "margin": {"l": 8, "r": 8, "t": 32, "b": 8},  # the toolbar stands above
        "legend": {"orientation": "h", "x": 0, "y": -0.25, "yanchor": "top"},
        "showlegend": len(figure.traces) > 1,
    }
    drawn = {"data": list(figure.traces), "layout": {**shared, **figure.layout}}
    st.plotly_chart(
        coloured(drawn, colours),
        key=figure.title,
        config={"displaylogo": False},
        alt=figure.caption,
    )
    st.caption(figure.caption)


def _distributions(case: form.Case, found: Plan) -> None:
    with st.spinner(f"Simulating {REQUESTS:,} requests", show_time=True):
        outcome, slowed = _simulated(case)
    drawn = list(latency_figures(found, outcome, slowed))
    for figure, column in zip(drawn, st.columns(len(drawn)), strict=True):
        with column:
            chart(figure)


@lru_cache(maxsize=16)
def _simulated(case: form.Case) -> tuple[Outcome, Outcome | None]:
    """Simulate a plan that there is, with steps as predicted, and as its confidence allows for."""
    found = planned(case)
    assert not isinstance(found, NoPlan)  # noqa: S101  (drawn for plans only)
    outcome = simulate(found, requests=REQUESTS)
    slow = None if found.confidence is None else simulate(as_confident(found), requests=REQUESTS)
    return outcome, slow


# --- questions that take longer


def _questions(case: form.Case, found: Plan) -> None:
    """Offer what takes longer, each by a button; what was asked stays."""
    st.markdown("**Further questions**, each a search of its own")
    name = case.base
    counts = sorted({max(1, round(found.cost.gpus * share)) for share in SHARES})
    questions: tuple[tuple[str, str, Callable[[Progress], Page]], ...] = (
        (
            "What do other numbers of GPUs carry?",
            "The highest rate within the limits, about 10 s",
            lambda said: capacity_page(name, capacity(found.inputs, counts, progress=said)),
        ),
        (
            "When does splitting prefill and decode pay?",
            "Lengths of prompts over answers, and the speed of the link: about a minute",
            lambda said: split_map_page(name, split_map(found.inputs, progress=said)),
        ),
        (
            "What does each decision cost?",
            "Router, percentile, confidence, precision and more: about two minutes",
            lambda said: decisions_page(name, decisions(found.inputs, progress=said)),
        ),
    )
    for question, takes, ask in questions:
        _question(case, question, takes, ask)


def _question(case: form.Case, question: str, takes: str, ask: Callable[[Progress], Page]) -> None:
    known: dict[tuple[form.Case, str], Page] = st.session_state.setdefault("answers", {})
    if (case, question) not in known:
        button = st.empty()
        if not button.button(question, help=takes):
            return
        button.empty()
        bar = st.progress(0.0, question)

        def said(done: int, total: int) -> None:
            bar.progress(done / total, f"{question} {done} of {total}")

        try:
            known[case, question] = ask(said)
        except MiniclusterError as error:
            st.error(str(error))
            return
        finally:
            bar.empty()
    page = known[case, question]
    st.markdown(f"**{page.headline}**")
    for figure in page.figures:
        chart(figure)
    sections = [part for part in page.parts if isinstance(part, Section)]
    st.html(kit(*sections, Section("", tuple(Text(line) for line in page.lines))))

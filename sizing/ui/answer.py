"""What the page answers: a plan with its figures, charts and files, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING
from zipfile import ZIP_DEFLATED, ZipFile

import streamlit as st

from minicluster.errors import InputError, MiniclusterError
from minicluster.pages.page import FactTable, Section, Tile
from minicluster.pages.write import render, render_tiles
from minicluster.plan import Plan, to_json
from sizing.planner.explanation import explain_plan
from sizing.planner.plan import ClassPlans, NoPlan
from sizing.planner.predict import predict, prediction_runs
from sizing.report.acceptance import acceptance, acceptance_files, acceptance_page
from sizing.report.plan_charts import latency_figures, layout_grid
from sizing.report.plan_page import plan_page, plan_tiles
from sizing.report.plan_screen import (
    answer_facts,
    choice_sections,
    detail_facts,
    evidence_facts,
    headline,
)
from sizing.report.tables import explanation_sections, latency_table, layout_table
from sizing.report.today import today_table
from sizing.scenario import Scenario
from sizing.stacks.formats import FORMATS, export
from sizing.ui import form
from sizing.ui.plans import planned, priced
from sizing.ui.questions import QUESTIONS, Subject, draw_question
from sizing.ui.style import chart, kit, lines, no_formula

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sizing.planner.configuration import Configuration
    from sizing.planner.predict import PoolPrediction
    from sizing.planner.result import Infeasible
    from sizing.simulation.outcome import Outcome

ALL = "All classes"
"""Tab of the questions about classes of requests together, where each has pools of its own."""
FACTS_OF = {
    "GPUs": ("Compared", "Network", "Routing", "Deployment"),
    "confidence": ("Confidence", "Simulated", "Measured", "Step times"),
    "headroom": ("Headroom", "Saturation"),
    "energy": ("Cost",),
    "price": ("Cost",),
}
"""Facts of a plan's screen that say where a figure comes from, by the figure's name."""
TABLES_OF = {
    "TTFT": ("Mean TTFT", "Prefill"),
    "TPOT": ("Decode",),
    "E2E": ("Mean TTFT", "Prefill", "Decode"),
}
"""How tables of `sizing explain` begin that say what a latency is made of, by its name."""


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """
    A plan that is shown; equal where case and class are.

    Attributes:
        case: what was asked.
        class_name: of the class of requests on these pools; empty: all requests share them.
        plan: of these pools.
    """

    case: form.Case
    class_name: str
    plan: Plan = field(compare=False)


def warm() -> None:
    """Answer the page's first scenario, for whoever opens it next."""
    plans = planned(form.Case())
    if not isinstance(plans, NoPlan):
        for name, plan in plans.chosen.items():
            _simulated(ShownPlan(form.Case(), name, plan))


def draw(case: form.Case, compared: Callable[[], None], press: Callable[[], None]) -> str:
    """
    Draw the answer to one case, and return it in a few words; empty: there is no plan.

    Args:
        compared: draws what stands beside the answer, below its figures.
        press: plans what the fields say.
    """
    answers, plans = _answers(case, press)
    heading = _headline(answers)
    if answers:
        st.subheader(heading, anchor="answer")
    if len(answers) == 1:
        _draw_figures(answers[0])
    compared()
    _today(case, {answer.class_name: answer.plan for answer in answers})
    if plans is not None and plans.own:
        st.html(kit(*choice_sections(plans)))
    if len(answers) == 1:
        _draw_tabs(answers[0])
    elif answers:
        *tabs, together = st.tabs([*(f"Pools of {answer.class_name}" for answer in answers), ALL])
        for answer, tab in zip(answers, tabs, strict=True):
            with tab:
                st.markdown(f"#### {headline(answer.plan)}")
                _draw_figures(answer)
                _draw_tabs(answer)
        with together:
            gpus = sum(answer.plan.cost.gpus for answer in answers)
            subject = Subject(case, "", case.scenario(), gpus)
            for question, tab in zip(QUESTIONS, st.tabs([*QUESTIONS]), strict=True):
                with tab:
                    draw_question(question, subject)
    return heading.rpartition(": ")[2]


def _headline(answers: Sequence[ShownPlan]) -> str:
    if not answers:
        return ""
    if len(answers) == 1:
        return headline(answers[0].plan)
    gpus = sum(answer.plan.cost.gpus for answer in answers)
    return f"{gpus} GPUs, pools of its own for each class"


def _draw_figures(answer: ShownPlan) -> None:
    pools = " + ".join(
        f"{pool.replicas} x {pool.slicing} {pool.role}" for pool in answer.plan.pools
    )
    st.markdown(f"**{pools}**: {_binds(answer.plan)}")
    _tiles(answer)


def _draw_tabs(answer: ShownPlan) -> None:
    """Draw what stands behind a plan, its files, and a tab for each further question."""
    plan = answer.plan
    inputs = priced(plan).inputs
    subject = Subject(answer.case, answer.class_name, inputs, plan.cost.gpus)
    latency, charts, layout, *questions, files, evidence = st.tabs(
        ["Latency", "Charts", "Layout", *QUESTIONS, "Files", "Evidence"]
    )
    with layout:
        pools = layout_table(plan.pools, plan.prediction)
        st.html(kit(Section("", (layout_grid(plan),)), pools))
    with files:
        _downloads(answer)
        _other_stacks(answer)
    with evidence:
        st.html(kit(Section("", (FactTable(tuple(_facts(plan))),))))
    with latency:
        st.html(kit(latency_table(plan.prediction, plan.promises)))
    for question, tab in zip(QUESTIONS, questions, strict=True):
        with tab:
            draw_question(question, subject)
    with charts:
        _distributions(answer)


def _today(case: form.Case, plans: Mapping[str, Plan]) -> None:
    """Draw what the pools that run today are predicted to do, beside the plan."""
    if not case.today:
        return
    layout = " and ".join(f"{role} {size}" for role, size in case.today.items())
    try:
        with st.spinner(f"Predicting {layout}"):
            shown = today_table(_predicted(case), case.scenario(), plans)
    except MiniclusterError as error:
        reason = form.beside(error) if isinstance(error, InputError) else str(error)
        st.error(no_formula(f"**Today, {layout}**: {reason}"))
    else:
        st.html(kit(shown, kind="today"))
    if notes := case.texts()[form.NOTES[form.RUNNING]]:
        st.html(lines(notes))


@lru_cache(maxsize=64)
def _predicted(case: form.Case) -> PoolPrediction:
    return predict(case.scenario(), **case.today)


def _answers(
    case: form.Case, press: Callable[[], None]
) -> tuple[list[ShownPlan], ClassPlans | None]:
    so_far = st.empty()

    def told(holds: Configuration) -> None:
        kinds = " and ".join(f"{gpus} {kind}" for kind, gpus in holds.gpus_by_kind.items())
        so_far.markdown(
            f"### {kinds} hold the limits\n{form.in_words(f'{holds}')}, so far: fewer are looked"
            " for, and the figures follow"
        )

    try:
        with st.spinner("Searching layouts; each is simulated", show_time=True):
            plans = planned(case, told)
    except MiniclusterError as error:
        st.error(no_formula(form.in_words(str(error))))
        return [], None
    so_far.empty()
    if not isinstance(plans, NoPlan):
        return [ShownPlan(case, name, plan) for name, plan in plans.chosen.items()], plans
    _draw_none(plans.infeasible, press)
    return [], None


def _draw_none(none: Infeasible, press: Callable[[], None]) -> None:
    """Say why there is no plan, and offer to plan with as many GPUs as the nearest miss has."""
    st.error(no_formula(f"**No plan**: {form.in_words(none.reason)}"))
    rows = []
    if none.nearest:
        rows.append(("Nearest miss", f"{form.in_words(none.nearest)} ({none.nearest_gpus} GPUs)"))
    rows += [("Missed by", none.missed_by), ("To change", none.way_out)]
    shown = tuple((name, form.in_words(text)) for name, text in rows)
    st.html(kit(Section("", (FactTable(shown),))))
    if none.binds == "max_gpus" and none.nearest_gpus:
        st.button(
            f"Plan with {none.nearest_gpus} GPUs",
            on_click=_allow_gpus,
            args=(none.nearest_gpus, press),
        )


def _allow_gpus(gpus: int, press: Callable[[], None]) -> None:
    st.session_state["cluster.max_gpus"] = f"{gpus}"
    press()


def _binds(plan: Plan) -> str:
    used = plan.prediction.utilisation_fraction
    parts = [
        f"{role} takes {used[role]:.0%} of its capacity and is bound by {bound}"
        for role, bound in plan.prediction.bottleneck.items()
    ]
    return f"{'; '.join(parts)}. First limit beyond this load: {plan.headroom.binds}."


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from answer_facts(plan)
    yield from evidence_facts(plan)
    yield from detail_facts(plan)


# --- figures, each with its terms


def _tiles(answer: ShownPlan) -> None:
    """Draw the figures, and below each a button that opens the terms it is made of."""
    plan = answer.plan
    nodes = plan.cost.nodes
    below = f"on {nodes} node{'' if nodes == 1 else 's'}"
    tiles = [Tile(name="GPUs", value=f"{plan.cost.gpus}", below=below), *plan_tiles(priced(plan))]
    with st.container(key=f"tiles{answer.class_name}"):
        for tile in tiles:
            with st.container(gap=None):
                st.html(f'<div class="kit">{render_tiles([tile])}</div>')
                with st.popover(f"{tile.name}: how?", type="tertiary"):
                    st.html(kit(*_terms(answer, tile.name)))


def _terms(answer: ShownPlan, figure: str) -> Iterator[Section]:
    """Yield what a figure is made of: terms of `sizing explain`, or what it is divided from."""
    plan = answer.plan
    if figure not in FACTS_OF:
        groups = next(titles for name, titles in TABLES_OF.items() if name in figure.split())
        for section in _explained(answer):
            if section.title.startswith((*groups, "Interference")) or not section.title:
                yield section
        yield latency_table(plan.prediction, plan.promises)
        return
    kept = tuple(row for row in _facts(plan) if row[0] in FACTS_OF[figure])
    yield Section("", (FactTable(kept),))
    if figure in {"GPUs", "headroom"}:
        yield layout_table(plan.pools, plan.prediction)
    elif figure != "confidence":
        yield Section("Terms (docs/model.md, eq. E2)", (FactTable(tuple(_cost_terms(plan))),))


@lru_cache(maxsize=64)
def _explained(answer: ShownPlan) -> list[Section]:
    return list(explanation_sections(explain_plan(answer.plan)))


def _cost_terms(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "GPUs", f"{plan.cost.gpus}"
    if plan.cost.gpu_power_w is not None:
        yield "Power of all", f"{plan.cost.gpu_power_w:,.0f} W"
    if plan.cost.price_usd_per_hour is not None:
        yield "Price of all", f"{plan.cost.price_usd_per_hour:,.2f} US dollars per hour"
    yield "Output tokens", f"{plan.prediction.output_tokens_per_s:,.0f} per second"


# --- files


def _downloads(answer: ShownPlan) -> None:
    plan, own = answer.plan, answer.class_name
    name = "-".join(filter(None, [plan.model.id.replace("/", "-"), own]))
    scenario, written, report = st.columns(3)
    asked = Scenario.of(plan.inputs.scenario, name, None) if own else answer.case.scenario()
    text = form.scenario_file(asked, answer.case.config)
    scenario.download_button(
        "Scenario (TOML)", text, f"{name}.toml", key=f"{own}:scenario-file", width="stretch"
    )
    written.download_button(
        "Plan (JSON)", to_json(plan), f"{name}-plan.json", key=f"{own}:plan-file", width="stretch"
    )
    report.download_button(
        "Report (HTML)",
        lambda: render(plan_page(plan, alternatives=False)),
        f"{name}.html",
        key=f"{own}:report-file",
        width="stretch",
        help="One file to pass on: the page of `sizing plan --html`, without its alternatives",
    )


def _other_stacks(answer: ShownPlan) -> None:
    """Offer the plan as files of another serving stack, and as a test for who delivers it."""
    plan, own = answer.plan, answer.class_name
    with st.popover("Run it elsewhere", width="stretch"):
        imaged = [name for name, form in FORMATS.items() if form.needs_image]
        stack = st.selectbox("Serving stack", list(FORMATS), key=f"{own}:stack")
        image = st.text_input(
            "Container image",
            key=f"{own}:image",
            help=f"{' and '.join(imaged)} need one, such as NAME:TAG",
        )
        if stack in imaged and not image.strip():
            st.info(f"Its files name the container image that {stack} starts: write it above.")
        else:
            _stack_files(answer, stack, image.strip())
    st.download_button(
        "Acceptance test (zip)",
        lambda: _zipped(_acceptance(plan)),
        "acceptance.zip",
        key=f"{own}:acceptance-file",
        width="stretch",
        help="The load, the count of requests that proves the limits, and alert rules",
    )


def _stack_files(answer: ShownPlan, stack: str, image: str) -> None:
    try:
        files = export(answer.plan, stack, image=image)
    except InputError as error:  # a layout that the stack lacks
        st.info(no_formula(form.beside(error)))
        return
    st.download_button(
        f"Files for {stack} (zip)",
        _zipped(files),
        f"{stack}.zip",
        key=f"{answer.class_name}:stack-file",
        width="stretch",
    )
    for name, text in files.items():
        st.caption(name)
        st.code(text, language=None)


def _acceptance(plan: Plan) -> dict[str, str]:
    test = acceptance(plan)
    return {**acceptance_files(test), "index.html": render(acceptance_page(test))}


def _zipped(files: Mapping[str, str]) -> bytes:
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


# --- charts


def _distributions(answer: ShownPlan) -> None:
    with st.spinner("Simulating the requests of the prediction", show_time=True):
        outcome, slowed = _simulated(answer)
    drawn = list(latency_figures(answer.plan, outcome, slowed))
    for figure, column in zip(drawn, st.columns(len(drawn)), strict=True):
        with column:
            chart(figure, answer.class_name)


@lru_cache(maxsize=16)
def _simulated(answer: ShownPlan) -> tuple[Outcome, Outcome | None]:
    return prediction_runs(answer.plan)

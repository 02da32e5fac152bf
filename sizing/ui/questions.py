"""The further questions of the page: buttons that run a study of the plan and show its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import streamlit as st

import sizing.report.questions  # noqa: F401  (registers the sections of the answers)
from minicluster.errors import MiniclusterError
from minicluster.pages.page import ChartRow
from minicluster.pages.shown import sections_of
from minicluster.plan import Inputs
from minicluster.workload.day_profile import COLUMNS, read_profile
from sizing.catalog import find_profile
from sizing.planner.plan import at_planned_rate
from sizing.planner.studies.capacity import capacity
from sizing.planner.studies.day import Day, DayOptions, day
from sizing.planner.studies.decisions import decisions
from sizing.planner.studies.split_map import split_map
from sizing.ui.dropped import as_file
from sizing.ui.form import Case, in_words
from sizing.ui.style import chart, kit, no_formula

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[int, int], None]
    Ask = Callable[[Progress], object]

COLD_START_S = 120.0
"""Seconds until a new replica answers, in the day of the further questions."""
SHARES = (0.25, 0.5, 1.0, 2.0)
"""GPUs of the capacity curve, as shares of the plan's."""


@dataclass(frozen=True, slots=True)
class Subject:
    """
    What further questions are about; equal where case and class are.

    Attributes:
        class_name: class of requests of the inputs; empty: all of them.
        gpus: number of GPUs of the plan.
    """

    case: Case
    class_name: str
    inputs: Inputs = field(compare=False)
    gpus: int = field(compare=False)


def draw_question(name: str, about: Subject) -> None:
    """Draw the tab of a question: what it asks and takes, a button, and then the answer."""
    if name == DAY:
        _day_question(about)
        return
    question, takes, ask = STUDIES[name]
    _question(about, question, takes, lambda progress: ask(about, progress))


def _sizes(about: Subject, progress: Progress) -> object:
    counts = sorted({max(1, round(about.gpus * share)) for share in SHARES})
    return capacity(about.inputs, counts, progress=progress)


DAY = "A day"
STUDIES: dict[str, tuple[str, str, Callable[[Subject, Progress], object]]] = {
    "Other sizes": (
        "What do other numbers of GPUs carry?",
        "The highest rate within the limits: a few seconds",
        _sizes,
    ),
    "Splitting": (
        "When does splitting prefill and decode pay?",
        "Lengths of prompts over answers, and the speed of the link: about half a minute",
        lambda about, progress: split_map(about.inputs, progress=progress),
    ),
    "Decisions": (
        "What does each decision cost?",
        "Router, percentile, confidence, precision and more: about two minutes",
        lambda about, progress: decisions(about.inputs, progress=progress),
    ),
}
"""Question, what it takes, and its study, by the name of the tab."""
QUESTIONS = (*STUDIES, DAY)
"""Names of all tabs of questions."""


def _day_question(about: Subject) -> None:
    """Offer autoscaling over a day that is dropped in, or a made-up one."""
    file = st.file_uploader(
        "Requests over a day",
        key=f"{about.class_name}:day",
        max_upload_size=1,
        help=f"CSV of {COLUMNS}; without it a made-up day that peaks at the rate",
    )

    def ask(progress: Progress) -> Day:
        inputs = at_planned_rate(about.inputs)
        rate = inputs.scenario.workload.requests_per_s
        if file is None:
            profile = read_profile(find_profile("sine-day"), rate)
        else:
            profile = as_file(file.getvalue(), file.name, lambda path: read_profile(path, rate))
        return day(inputs, profile, DayOptions(cold_start_s=COLD_START_S), progress=progress)

    question = "How many GPU-hours does autoscaling save over a day?"
    takes = f"Static pools against autoscaled ones, with cold starts of {COLD_START_S:.0f} s"
    _question(about, question, takes, ask, of="" if file is None else file.file_id)


def _question(about: Subject, question: str, takes: str, ask: Ask, *, of: str = "") -> None:
    """
    Answer a question that was asked; another that is asked meanwhile only delays it.

    Args:
        of: what a question is about beside *about*: one of something else is not answered yet.
    """
    answers: dict[tuple[Subject, str], object] = st.session_state.setdefault("answers", {})
    asked: set[tuple[Subject, str]] = st.session_state.setdefault("asked", set())
    key = about, question + of
    if key not in asked:
        st.caption(takes)
        st.button(question, key=f"{about.class_name}:{question}", on_click=asked.add, args=(key,))
        return
    st.markdown(f"**{question}**")
    if key not in answers:
        bar = st.progress(0.0, question)

        def progress(done: int, total: int) -> None:
            bar.progress(done / total, f"{question} {done} of {total}")

        try:
            answers[key] = ask(progress)
        except MiniclusterError as error:
            asked.discard(key)
            st.error(no_formula(in_words(str(error))))
            return
        finally:
            bar.empty()
    for part in sections_of(answers[key]):
        if isinstance(part, ChartRow):
            for figure in part.figures:
                chart(figure, about.class_name)
        else:
            st.html(in_words(kit(part)))

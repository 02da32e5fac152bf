"""The further questions of the page: buttons that run a study of the plan and show its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import streamlit as st

from minicluster.errors import MiniclusterError
from minicluster.pages.page import Section, Text
from minicluster.plan import Inputs
from minicluster.workload.day_profile import COLUMNS, read_profile
from sizing.catalog import find_profile
from sizing.planner.plan import at_planned_rate
from sizing.planner.studies.capacity import capacity
from sizing.planner.studies.day import DayOptions, day
from sizing.planner.studies.decisions import decisions
from sizing.planner.studies.split_map import split_map
from sizing.report.questions import capacity_page, day_page, decisions_page, split_map_page
from sizing.ui.dropped import as_file
from sizing.ui.form import Case
from sizing.ui.style import chart, kit

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.pages.page import Page

    Progress = Callable[[int, int], None]

COLD_START_S = 120.0
"""Seconds until a new replica answers, in the day of the further questions."""
SHARES = (0.25, 0.5, 1.0, 2.0)
"""GPUs of the capacity curve, as shares of the plan's."""


@dataclass(frozen=True, slots=True)
class Subject:
    """
    What further questions are about; equal where case and class are.

    Attributes:
        class_name: of the class of requests that `inputs` are of; empty: those of all.
        inputs: the scenario.
        gpus: of its plan.
    """

    case: Case
    class_name: str
    inputs: Inputs = field(compare=False)
    gpus: int = field(compare=False)


def draw_questions(about: Subject) -> None:
    """Offer what takes longer, each by a button; what was asked stays."""
    st.markdown("**Further questions**, each a search of its own")
    name, inputs = about.class_name or about.case.base, about.inputs
    counts = sorted({max(1, round(about.gpus * share)) for share in SHARES})
    questions: tuple[tuple[str, str, Callable[[Progress], Page]], ...] = (
        (
            "What do other numbers of GPUs carry?",
            "The highest rate within the limits, a few seconds",
            lambda said: capacity_page(name, capacity(inputs, counts, progress=said)),
        ),
        (
            "When does splitting prefill and decode pay?",
            "Lengths of prompts over answers, and the speed of the link: about half a minute",
            lambda said: split_map_page(name, split_map(inputs, progress=said)),
        ),
        (
            "What does each decision cost?",
            "Router, percentile, confidence, precision and more: about two minutes",
            lambda said: decisions_page(name, decisions(inputs, progress=said)),
        ),
    )
    for question, takes, ask in questions:
        _question(about, question, takes, ask)
    _day_question(about, name)


def _day_question(about: Subject, name: str) -> None:
    """Offer autoscaling over a day that is dropped in, or a made-up one."""
    given = st.file_uploader(
        "Requests over a day",
        key=f"{about.class_name}:day",
        max_upload_size=1,
        help=f"CSV of {COLUMNS}; without it a made-up day that peaks at the rate",
    )

    def ask(said: Progress) -> Page:
        inputs = at_planned_rate(about.inputs)
        rate = inputs.scenario.workload.requests_per_s
        if given is None:
            profile = read_profile(find_profile("sine-day"), rate)
        else:
            profile = as_file(given.getvalue(), given.name, lambda path: read_profile(path, rate))
        options = DayOptions(cold_start_s=COLD_START_S)
        return day_page(name, day(inputs, profile, options, progress=said))

    question = "How many GPU-hours does autoscaling save over a day?"
    takes = f"With cold starts of {COLD_START_S:.0f} s: `sizing day`"
    _question(about, question, takes, ask, of="" if given is None else given.file_id)


def _question(
    about: Subject, question: str, takes: str, ask: Callable[[Progress], Page], *, of: str = ""
) -> None:
    """
    Answer a question that was asked; another that is asked meanwhile only delays it.

    Args:
        of: what a question is about beside *about*: one of something else is not answered yet.
    """
    known: dict[tuple[Subject, str], Page] = st.session_state.setdefault("answers", {})
    asked: set[tuple[Subject, str]] = st.session_state.setdefault("asked", set())
    key = about, question + of
    if key not in asked:
        st.button(
            question,
            key=f"{about.class_name}:{question}",
            help=takes,
            on_click=asked.add,
            args=(key,),
        )
        return
    if key not in known:
        bar = st.progress(0.0, question)

        def said(done: int, total: int) -> None:
            bar.progress(done / total, f"{question} {done} of {total}")

        try:
            known[key] = ask(said)
        except MiniclusterError as error:
            asked.discard(key)
            st.error(str(error))
            return
        finally:
            bar.empty()
    page = known[key]
    st.markdown(f"**{page.headline}**")
    for figure in page.figures:
        chart(figure, about.class_name)
    sections = [part for part in page.parts if isinstance(part, Section)]
    st.html(kit(*sections, Section("", tuple(Text(line) for line in page.lines))))

"""Other GPUs, engines and kept answers beside the answer of the page, in one table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import streamlit as st

from minicluster.errors import MiniclusterError
from minicluster.pages.page import Cell, DataTable, Section, Text
from minicluster.units import seconds
from sizing import catalog
from sizing.planner.plan import NoPlan
from sizing.planner.studies.result import Figures, figures
from sizing.ui import form
from sizing.ui.plans import planned, priced
from sizing.ui.style import kit, no_formula

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GPUS, ENGINES = "compare.gpu", "compare.engine"
"""What is ticked, in the session and in the address."""
OWN_PRICE = "cluster.price_usd_per_gpu_hour"


def begin(state: Any, query: Mapping[str, str]) -> None:  # noqa: ANN401  (Streamlit's session)
    """Tick what an address has ticked."""
    for key, known in ((GPUS, _gpus()), (ENGINES, _engines())):
        state[key] = [name for name in query.get(key, "").split(",") if name in known]


def query(state: Any) -> dict[str, str]:  # noqa: ANN401  (Streamlit's session)
    """Return what is ticked as parameters of an address."""
    return {key: ",".join(state[key]) for key in (GPUS, ENGINES) if state[key]}


def _gpus() -> tuple[str, ...]:
    return next(field.choices for field in form.fields() if field.key == "cluster.gpu")


def _engines() -> dict[str, dict[str, str]]:
    """Return the keys of a scenario that choose an engine, by its name and version."""
    return {
        f"{engine.name} {engine.version}": {
            "engine.name": engine.name,
            "engine.version": json.dumps(engine.version),
        }
        for engine in catalog.engines()
    }


def draw_comparison(case: form.Case, kept: list[form.Case]) -> None:
    """
    Offer GPUs and engines to tick, and draw a table of those ticked and kept below the answer's.

    Args:
        kept: cases kept before; "Keep this answer" adds *case*.
    """
    with st.container(key="ticks"):
        gpus, engines = st.columns(2, wrap=False)
    own = case.scenario()
    ticked_gpus = gpus.multiselect(
        "Other GPUs",
        [name for name in _gpus() if name != own.gpu.name],
        key=GPUS,
        placeholder="compare",
    )
    names = [name for name in _engines() if name != f"{own.engine.name} {own.engine.version}"]
    ticked_engines = engines.multiselect("Other engines", names, key=ENGINES, placeholder="compare")
    st.button(
        "Keep this answer to compare",
        disabled=case in kept or len(kept) >= form.MOST_CASES - 1,
        on_click=kept.append,
        args=(case,),
        help="It stays in the table while you change the fields",
    )
    others = {gpu: _changed(case, {"cluster.gpu": gpu, OWN_PRICE: ""}) for gpu in ticked_gpus}
    others |= {name: _changed(case, _engines()[name]) for name in ticked_engines}
    for number, other in enumerate(kept, start=1):
        if other != case:
            others[f"kept {number}: {', '.join(form.changed_labels(case, other))}"] = other
    if others:
        _table({"this answer": case} | others)
    if kept:
        st.button("Forget the kept answers", on_click=kept.clear)


def _changed(case: form.Case, texts: Mapping[str, str]) -> form.Case:
    return form.Case.typed(case.base, {**case.texts(), **texts}, case.config)


def _table(cases: Mapping[str, form.Case]) -> None:
    """Draw a row for each case; the first is the answer that the others are set against."""
    rows: list[tuple[str | Cell, ...]] = []
    bar, place = st.empty(), st.empty()
    notes: dict[str, None] = {}
    answer: Figures | None = None
    for number, (name, case) in enumerate(cases.items()):
        bar.progress(number / len(cases), no_formula(f"Planning {name}"))
        row = _figures(case)
        if isinstance(row, str):
            rows.append((name, "", Cell("no plan", "bad"), *[""] * 5))
            notes[f"{name}: {row}"] = None
        else:
            difference = _difference(answer, row) if answer else ""
            rows.append((name, *_cells(row), difference))
            if source := row.running.price_source:
                notes[f"$: {source}"] = None
            answer = row if number == 0 else answer
        heads = ("", "GPUs", "layout", "TTFT", "TPOT", "headroom", "$/hour", "against this answer")
        drawn = DataTable(heads, tuple(rows), words=("layout", "against this answer"))
        place.html(kit(Section("Compared", (drawn, *map(Text, notes)))))
    bar.empty()


def _figures(case: form.Case) -> Figures | str:
    """Return the figures of a case's plan, or why there is none."""
    try:
        plans = planned(case)
    except MiniclusterError as error:
        return form.in_words(str(error))
    if isinstance(plans, NoPlan):
        return form.in_words(plans.infeasible.reason)
    return figures({name: priced(plan) for name, plan in plans.chosen.items()})


def _cells(row: Figures) -> Iterator[str]:
    yield str(row.gpus)
    yield row.layout
    yield "" if row.ttft_s is None else seconds(row.ttft_s)
    yield "" if row.tpot_s is None else seconds(row.tpot_s)
    yield f"{row.headroom_factor:.2f}"
    yield "" if row.running.usd_per_hour is None else f"{row.running.usd_per_hour:,.2f}"


def _difference(answer: Figures, other: Figures) -> str:
    """Say what another answer takes more or less: GPUs, dollars."""
    parts = [f"{other.gpus - answer.gpus:+d} GPUs" if other.gpus != answer.gpus else "same GPUs"]
    before, after = answer.running.usd_per_hour, other.running.usd_per_hour
    if before is not None and after is not None:
        dollars = f"{'+' if after > before else '-'}${abs(after - before):,.2f}/hour"
        more = f"{dollars} ({after / before - 1:+.0%})"
        parts.append("same price" if after == before else more)
    return ", ".join(parts)

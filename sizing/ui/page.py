"""The page of `sizing ui`: Streamlit runs this file anew at every change."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import streamlit as st

from minicluster.errors import InputError
from sizing.planner.plan import budgets
from sizing.ui import answer, compare, dropped, form
from sizing.ui.plans import is_quick
from sizing.ui.style import ENTER, STALE, STYLE, lines, no_formula

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Of the session: the case that is answered, those kept beside it, what a file or the address has
# wrong by the place that says it, and how often Plan was pressed. (No docstring: Streamlit would
# show it.)
CASE, KEPT, FAULTS, PRESSED = "case", "kept", "faults", "pressed"
ADDRESS = ""  # the place of what no field says, such as a fault of the address
# The names of files, which are those of the uploaders, and of texts.
CONFIG, DEPLOYMENT, COMMAND, LOG, RATIO = "file", "deployment", "command", "log", "ratio"
FILES = {form.MODEL_FILE: (CONFIG,), form.RUNNING: (DEPLOYMENT, COMMAND), form.TRAFFIC: (LOG,)}


def main() -> None:
    """Draw the fields, and beside them (on a phone above them) the answer."""
    st.set_page_config(
        page_title="sizing", layout="wide", initial_sidebar_state="collapsed", menu_items={}
    )
    st.html(f"<style>{STYLE}</style>")
    st.html(f"<script>{ENTER}</script>", unsafe_allow_javascript=True)
    st.title("Size an inference cluster", anchor=False)
    state: Any = st.session_state
    if CASE not in state:
        _begin(state)
    typed = _typed(state)
    errors = _errors(state, typed)
    if not errors and is_quick(state[CASE]):
        state[CASE] = typed
    with st.container(key="sides"):
        asked, answer_side = st.columns([3, 7], gap="large")
    with asked:
        with st.container(key="fields"):
            st.html('<div id="fields"></div>')
            _form(state, errors)
        with st.container(key="bar"):
            status = st.empty()
            st.button("Plan", key="plan", type="primary", width="stretch", on_click=_press)
    state["stood"] = _texts(state)
    with answer_side:
        _answer(state, typed, errors, status)
    _say_address(state)


def _begin(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    """Take the cases of the address; without any the first scenario."""
    state[FAULTS], state[PRESSED] = {}, 0
    query = st.query_params.to_dict()
    try:
        first, *kept = form.cases_of(query) or [form.Case()]
    except InputError as error:
        first, kept, state[FAULTS] = form.Case(), [], {ADDRESS: f"The address: {error}"}
    _fill(state, first)
    state[CASE], state[KEPT] = _typed(state), kept
    compare.begin(state, query)


def _fill(state: Any, case: form.Case) -> None:  # noqa: ANN401  (Streamlit's session)
    state["base"], state["config"] = case.base, case.config
    _change_texts(state, case.texts())


def _change_texts(state: Any, texts: Mapping[str, str]) -> None:  # noqa: ANN401
    for key, text in texts.items():
        state[key] = text


def _texts(state: Any) -> dict[str, str]:  # noqa: ANN401  (Streamlit's session)
    keys = form.keys_of(form.class_count({form.CLASSES: state[form.CLASSES]}))
    return {key: state[key] or "" for key in keys}


def _typed(state: Any) -> form.Case:  # noqa: ANN401  (Streamlit's session)
    return form.Case.typed(state["base"], _texts(state), state["config"])


def _errors(state: Any, typed: form.Case) -> dict[str, str]:  # noqa: ANN401
    """Return what is wrong, by field or file."""
    fault = _fault(typed)
    return {**state[FAULTS], **({} if fault is None else dict([fault]))}


@lru_cache(maxsize=64)
def _fault(case: form.Case) -> tuple[str, str] | None:
    """Return the field of what cannot be planned, and why; `None`: everything can."""
    try:
        budgets(case.scenario())
    except InputError as error:
        known = form.field_of(error, case.texts())
        return known, form.in_words(form.beside(error) if known else str(error))
    return None


# --- the fields


def _form(state: Any, errors: Mapping[str, str]) -> None:  # noqa: ANN401
    st.selectbox(
        "Start from",
        form.bases(),
        key="base",
        on_change=_start_from,
        help="A shipped scenario, whose values fill the fields",
    )
    _say(errors, ADDRESS)
    classes = form.class_count(_texts(state))
    for group in form.groups(classes):
        _group(state, group, errors)
    _class_buttons(state, classes)


def _group(state: Any, group: form.FieldGroup, errors: Mapping[str, str]) -> None:  # noqa: ANN401
    notes = form.NOTES.get(group.title, "")
    files = FILES.get(group.title, ())
    places = {*(field.key for field in group.fields), *files}
    is_open = any(place in errors for place in places) or bool(notes and state[notes])
    with st.expander(group.title, expanded=is_open) if group.folded else st.container():
        if not group.folded and len(group.fields) > 1:
            st.markdown(f"**{group.title}**")
        if group.title == form.RUNNING:
            _deployment_fields()
        if group.title == form.TRAFFIC:
            _traffic_fields()
        if group.title == form.MODEL_FILE:
            st.file_uploader(
                "The config.json of another model",
                key=CONFIG,
                max_upload_size=1,
                on_change=_take,
                args=(CONFIG, _take_config),
                help="The config.json of a model on Hugging Face; weights are not needed",
            )
        for place in files:
            _say(errors, place)
        if notes and state[notes]:
            st.html(lines(state[notes]))
        _fields(state, group.fields, errors)


def _fields(state: Any, fields: tuple[form.Field, ...], errors: Mapping[str, str]) -> None:  # noqa: ANN401
    for at_pair in range(0, len(fields), 2):
        pair = fields[at_pair : at_pair + 2]
        for field, place in zip(pair, st.columns(len(pair), wrap=False), strict=True):
            with place:
                _field(state, field, form.help_text(field.key))
        for field in pair:
            _say(errors, field.key, field.label)


def _deployment_fields() -> None:
    st.file_uploader(
        "Script of `vllm serve`, Dynamo graph or InferenceX record",
        key=DEPLOYMENT,
        max_upload_size=1,
        on_change=_take,
        args=(DEPLOYMENT, _take_deployment),
        help="It fills the fields; its pools are predicted beside the plan",
    )
    st.text_area(
        "or paste the command",
        key=COMMAND,
        placeholder="# 4 replicas\nvllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2",
        on_change=_take,
        args=(COMMAND, _take_command),
        help="It fills the fields; a comment `N replicas` above a command says how often it runs",
    )


def _traffic_fields() -> None:
    st.file_uploader(
        "Access log, trace, OpenTelemetry spans, vLLM metrics or ShareGPT conversations",
        key=LOG,
        on_change=_take,
        args=(LOG, _take_traffic),
        help="It fills rate and lengths of the load",
    )
    st.text_input(
        "Characters per token",
        key=RATIO,
        on_change=_take,
        args=(LOG, _take_traffic),
        help="Only conversations need it, whose texts are not tokenised here; English has about 4",
    )


def _class_buttons(state: Any, classes: int) -> None:  # noqa: ANN401  (Streamlit's session)
    """Draw what makes the load one of several classes of requests; what was typed stays."""
    if classes < form.MOST_CLASSES:
        st.button(
            "Add a class of requests",
            width="stretch",
            on_click=lambda: _change_texts(state, form.with_class(_texts(state))),
            help="Requests of another kind: a rate, lengths and limits of their own. It begins"
            " as a copy of the last one, so the load grows by that one's rate",
        )
    for removed in range(classes):
        st.button(
            f"Remove class {removed + 1}",
            width="stretch",
            on_click=lambda which=removed: _change_texts(
                state, form.without_class(_texts(state), which)
            ),
        )


def _say(errors: Mapping[str, str], place: str, label: str = "") -> None:
    """Say what is wrong with a field."""
    if place in errors:
        fault = errors[place]
        st.error(no_formula(f"**{label}**: {fault}" if label else fault))


def _field(state: Any, field: form.Field, help_text: str) -> None:  # noqa: ANN401
    if not field.choices:
        st.text_input(field.label, key=field.key, help=help_text)
        return
    choices = field.choices
    if state[field.key] not in choices:  # of an address, or a model that was dropped in
        choices = (*choices, state[field.key])
    of = "model" if field.key.startswith("model.") else "engine"
    st.selectbox(
        field.label,
        choices,
        key=field.key,
        help=help_text,
        on_change=_choose_cluster if field.key == form.PRESET else None,
        format_func=lambda value: _shown_choice(value) or f"as the {of} has it",
    )


def _shown_choice(value: str) -> str:
    name = value.removeprefix(form.DROPPED)
    return value if name == value else f"{name} (config.json)"


# --- what fields and buttons do


def _start_from() -> None:
    """Fill the fields; files that are still there say again what they say."""
    state: Any = st.session_state
    _fill(state, form.Case(base=state["base"]))
    state[FAULTS] = {}
    for place, read in (
        (CONFIG, _take_config),
        (DEPLOYMENT, _take_deployment),
        (COMMAND, _take_command),
        (LOG, _take_traffic),
    ):
        _take(place, read)


def _choose_cluster() -> None:
    state: Any = st.session_state
    _change_texts(state, form.with_cluster(_texts(state), state["stood"]))


def _press() -> None:
    """Plan what was typed, where it can be; then the view goes to the answer."""
    state: Any = st.session_state
    state[FAULTS].pop(ADDRESS, None)  # the fields have taken its place
    typed = _typed(state)
    if not _errors(state, typed):
        state[CASE] = typed
        state[PRESSED] += 1


def _take(place: str, read: Callable[[Any], None]) -> None:
    """Fill the fields from what was dropped in or pasted, or note what is wrong with it."""
    state: Any = st.session_state
    state[FAULTS].pop(place, None)
    try:
        read(state)
    except InputError as error:
        state[FAULTS][place] = form.in_words(str(error))


def _take_config(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    if (file := state[CONFIG]) is not None:
        config = form.checked_config(file.getvalue(), file.name)
        state["config"] = config
        state[form.MODEL] = form.DROPPED + form.config_name(config)


def _take_deployment(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    if (file := state[DEPLOYMENT]) is not None:
        texts = dropped.deployment_texts(file.getvalue(), file.name, _texts(state))
        _change_texts(state, texts)


def _take_command(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    if typed := state[COMMAND]:
        texts = dropped.deployment_texts(typed.encode(), "the command", _texts(state))
        _change_texts(state, texts)


def _take_traffic(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    if (file := state[LOG]) is not None:
        texts = dropped.traffic_texts(file.getvalue(), file.name, state[RATIO], _texts(state))
        _change_texts(state, texts)


def _say_address(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    """Keep the address one that shows the same."""
    query = compare.query(state)
    for number, case in enumerate((state[CASE], *state[KEPT]), start=1):
        query |= case.query(number)
    if query != st.query_params.to_dict():
        st.query_params.from_dict(query)


# --- the answer


def _answer(state: Any, typed: form.Case, errors: Mapping[str, str], status: Any) -> None:  # noqa: ANN401
    """Draw the answer, and say in the bar whether it is that of the fields."""
    changed = form.changed_labels(state[CASE], typed)
    if errors:
        place, fault = next(iter(errors.items()))
        label = form.label_of(place)
        _tell(status, "red", f"**{label}**: {fault}" if label else fault)
    elif changed:
        _tell(status, "orange", f"**Changed**: {', '.join(changed)}. Plan answers anew.")
    else:
        _tell(status, "blue", "**Planning …**")
    if ADDRESS in state[FAULTS] or _fault(state[CASE]) is not None:
        st.info("Nothing is planned: what stands in red says what is needed.")
        return
    if changed or errors:
        st.html(f"<style>{STALE}</style>")
        what = "What stands in red is not planned" if errors else f"Changed: {', '.join(changed)}"
        st.warning(no_formula(f"{what}. Below is the answer to what was planned before."))
    with st.container(key="answer"):
        summary = answer.draw(
            state[CASE], lambda: compare.draw_comparison(state[CASE], state[KEPT]), _press
        )
    if not changed and not errors:
        colour, what = ("green", summary) if summary else ("red", "No plan")
        _tell(status, colour, f"**{what}**. This is the answer to the fields.")
    if state[PRESSED]:
        to_top = "document.querySelector('[data-testid=stMain]').scrollTo(0, 0)"
        script = f"<script>/* {state[PRESSED]} */ {to_top}</script>"
        st.html(script, unsafe_allow_javascript=True)


def _tell(status: Any, colour: str, text: str) -> None:  # noqa: ANN401  (a place of Streamlit's)
    words = no_formula(text).replace("[", r"\[").replace("]", r"\]")
    status.markdown(f":{colour}[{words}] [Fields](#fields) [Answer](#answer)")


if __name__ == "__main__":
    main()

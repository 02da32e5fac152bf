"""The page of `sizing ui`: Streamlit runs this file anew at every change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from minicluster.errors import InputError
from sizing.planner.plan import budgets
from sizing.ui import answer, dropped, form
from sizing.ui.style import STYLE, lines

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of the session: cases that were asked for (`None`: not yet), errors by case and field, and the
# tab in front. (No docstring: Streamlit would show it.)
CASES, ERRORS, TAB = "cases", "errors", "tab"
# Of one case: the names of its files, which are those of the uploaders, and of a text.
CONFIG, DEPLOYMENT, COMMAND, LOG, RATIO = "file", "deployment", "command", "log", "ratio"


def main() -> None:
    """Draw the page: side by side what was planned, then fields and answer of one scenario."""
    st.set_page_config(
        page_title="sizing", layout="wide", initial_sidebar_state="collapsed", menu_items={}
    )
    st.html(f"<style>{STYLE}</style>")
    st.title("Size an inference cluster", anchor=False)
    state: Any = st.session_state
    if CASES not in state:
        _begin(state)
    asked, answer_side = st.columns([3, 7], gap="large")
    with asked:
        chosen = _forms(state)
    _compare(state)
    with answer_side:
        _answer(state, chosen)


def _begin(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    """Take the cases of the address; without any show the first scenario, not planned yet."""
    state[ERRORS] = {}
    try:
        found = form.cases_of(st.query_params.to_dict())
    except InputError as error:
        found, state[ERRORS] = [], {(0, ""): f"The address: {error}"}
    state[CASES] = [*found] if found else [None]
    for at, case in enumerate(found or [form.Case()]):
        _fill(state, at, case)
        _check(state, at)


def _fill(state: Any, at: int, case: form.Case) -> None:  # noqa: ANN401  (Streamlit's session)
    state[f"{at}:base"], state[f"{at}:config"] = case.base, case.config
    state[f"{at}:stood"] = case.texts()
    _change_texts(state, at, case.texts())


def _change_texts(state: Any, at: int, texts: dict[str, str]) -> None:  # noqa: ANN401
    for key, text in texts.items():
        state[f"{at}:{key}"] = text


def _texts(state: Any, at: int) -> dict[str, str]:  # noqa: ANN401  (Streamlit's session)
    classes = state[f"{at}:{form.CLASSES}"]
    keys = form.keys_of(form.class_count({form.CLASSES: classes}))
    return {key: state[f"{at}:{key}"] or "" for key in keys}


def _check(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    """Note what is wrong with a case; it is not planned then."""
    case = state[CASES][at]
    try:
        if case is not None:
            budgets(case.scenario())
    except InputError as error:
        known = form.field_of(error, case.texts())
        state[ERRORS][at, known] = form.beside(error) if known else str(error)


# --- the fields


def _forms(state: Any) -> int:  # noqa: ANN401  (Streamlit's session)
    """Draw a form for every case, and return the number of the one in front."""
    names = [f"Scenario {at + 1}" for at in range(len(state[CASES]))]
    if len(names) == 1:
        _form(state, 0)
        return 0
    for name, tab in zip(names, st.tabs(names, key=TAB, on_change="rerun"), strict=True):
        with tab:
            _form(state, names.index(name))
    return names.index(state[TAB]) if state.get(TAB) in names else 0


def _form(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    st.selectbox(
        "Start from",
        form.bases(),
        key=f"{at}:base",
        on_change=_start_from,
        args=(state, at),
        help="A shipped scenario, whose values fill the fields",
    )
    with st.form(f"{at}:form", border=False):
        _said(state, at, "")
        classes = form.class_count(_texts(state, at))
        for group in form.groups(classes):
            _group(state, at, group)
        # The first button is the one that Enter presses.
        st.form_submit_button(
            "Plan", type="primary", width="stretch", on_click=_submit, args=(state, at)
        )
        _class_buttons(state, at, classes)
    if state[CASES][at] is not None:
        st.markdown("[To the answer](#answer)")
    if len(state[CASES]) < form.MOST_CASES:
        st.button(
            "Compare with another",
            key=f"{at}:more",
            on_click=_more,
            args=(state, at),
            width="stretch",
        )
    if len(state[CASES]) > 1:
        st.button(
            "Remove this one",
            key=f"{at}:less",
            on_click=_less,
            args=(state, at),
            width="stretch",
        )


def _group(state: Any, at: int, group: form.FieldGroup) -> None:  # noqa: ANN401
    notes = form.NOTES.get(group.title, "")
    places = {*(field.key for field in group.fields), group.title}
    is_open = any((at, place) in state[ERRORS] for place in places) or bool(
        notes and state[f"{at}:{notes}"]
    )
    with st.expander(group.title, expanded=is_open) if group.folded else st.container():
        if not group.folded:
            st.markdown(f"**{group.title}**")
        if group.title == form.RUNNING:
            _deployment_fields(at)
        if group.title == form.TRAFFIC:
            _traffic_fields(at)
        _said(state, at, group.title)
        if notes and state[f"{at}:{notes}"]:
            st.html(lines(state[f"{at}:{notes}"]))
        _fields(state, at, group.fields)
        if group.title == "Model":
            st.file_uploader(
                "or the config.json of another model",
                key=f"{at}:{CONFIG}",
                max_upload_size=1,
                help="The config.json of a model on Hugging Face; weights are not needed",
            )
            _said(state, at, CONFIG)


def _fields(state: Any, at: int, fields: tuple[form.Field, ...]) -> None:  # noqa: ANN401
    for at_pair in range(0, len(fields), 2):
        pair = fields[at_pair : at_pair + 2]
        for field, place in zip(pair, st.columns(len(pair), wrap=False), strict=True):
            with place:
                _field(state, at, field, form.help_text(field.key))
        for field in pair:
            _said(state, at, field.key, field.label)


def _deployment_fields(at: int) -> None:
    st.file_uploader(
        "Script of `vllm serve`, Dynamo graph or InferenceX record",
        key=f"{at}:{DEPLOYMENT}",
        max_upload_size=1,
        help="Plan reads it into the fields, predicts its pools, and shows them beside the plan",
    )
    st.text_area(
        "or paste the command",
        key=f"{at}:{COMMAND}",
        placeholder="# 4 replicas\nvllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2",
        help="Plan reads it; a comment `N replicas` above a command says how often it runs",
    )


def _traffic_fields(at: int) -> None:
    st.file_uploader(
        "Access log, trace, OpenTelemetry spans, vLLM metrics or ShareGPT conversations",
        key=f"{at}:{LOG}",
        help="Plan reads rate and lengths into the fields of the load",
    )
    st.text_input(
        "Characters per token",
        key=f"{at}:{RATIO}",
        help="Only conversations need it, whose texts are not tokenised here; English has about 4",
    )


def _class_buttons(state: Any, at: int, classes: int) -> None:  # noqa: ANN401
    """Draw what makes the load one of several classes of requests; what was typed stays."""
    if classes < form.MOST_CLASSES:
        st.form_submit_button(
            "Add a class of requests",
            width="stretch",
            on_click=lambda: _change_texts(state, at, form.with_class(_texts(state, at))),
            help="Requests of another kind: a rate, lengths and limits of their own",
        )
    for removed in range(classes):
        st.form_submit_button(
            f"Remove class {removed + 1}",
            width="stretch",
            on_click=lambda which=removed: _change_texts(
                state, at, form.without_class(_texts(state, at), which)
            ),
        )


def _said(state: Any, at: int, field: str, label: str = "") -> None:  # noqa: ANN401
    """Say what is wrong with a field; between two dollars Markdown would see a formula."""
    if (at, field) in state[ERRORS]:
        said = state[ERRORS][at, field]
        st.error((f"**{label}**: {said}" if label else said).replace("$", r"\$"))


def _field(state: Any, at: int, field: form.Field, help_text: str) -> None:  # noqa: ANN401
    key = f"{at}:{field.key}"
    if not field.choices:
        st.text_input(field.label, key=key, help=help_text)
        return
    choices = field.choices
    if state[key] not in choices:  # of an address, or a model that was dropped in
        choices = (*choices, state[key])
    of = "model" if field.key.startswith("model.") else "engine"
    st.selectbox(
        field.label,
        choices,
        key=key,
        help=help_text,
        format_func=lambda value: _shown_choice(value) or f"as the {of} has it",
    )


def _shown_choice(value: str) -> str:
    name = value.removeprefix(form.DROPPED)
    return value if name == value else f"{name} (config.json)"


# --- what the buttons do


def _start_from(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    """Fill the fields; files that are still there are read again by the next plan."""
    _fill(state, at, form.Case(base=state[f"{at}:base"]))
    _forget(state, at)
    state[ERRORS] = {}


def _forget(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    for each in (CONFIG, DEPLOYMENT, COMMAND, LOG):
        state[f"{at}:{each}:taken"] = None


def _submit(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    """Take what was typed: it is planned where it can be, and else said what is wrong."""
    state[ERRORS] = {where: said for where, said in state[ERRORS].items() if where[0] != at}
    for place, take in (
        (CONFIG, _take_config),
        (form.RUNNING, _take_deployment),
        (form.TRAFFIC, _take_traffic),
    ):
        try:
            take(state, at)
        except InputError as error:
            state[ERRORS][at, place] = str(error)
    if any(where[0] == at for where in state[ERRORS]):
        return
    chosen = form.with_cluster(_texts(state, at), state[f"{at}:stood"])
    _change_texts(state, at, chosen)
    state[f"{at}:stood"] = chosen
    state[CASES][at] = _typed(state, at)
    _check(state, at)
    _say_address(state)


def _take_config(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    for name, content in _untaken(state, at, CONFIG):
        config = form.checked_config(content, name)
        state[f"{at}:config"] = config
        state[f"{at}:{form.MODEL}"] = form.DROPPED + form.config_name(config)


def _take_deployment(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    for name, content in (*_untaken(state, at, DEPLOYMENT), *_untaken(state, at, COMMAND)):
        texts = dropped.deployment_texts(content, name, _texts(state, at))
        _change_texts(state, at, texts)


def _take_traffic(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    for name, content in _untaken(state, at, LOG):
        texts = dropped.traffic_texts(content, name, state[f"{at}:{RATIO}"], _texts(state, at))
        _change_texts(state, at, texts)


def _untaken(state: Any, at: int, key: str) -> Iterator[tuple[str, bytes]]:  # noqa: ANN401
    """Yield the name and content of a file or text that is new, and note it when it was taken."""
    found = state.get(f"{at}:{key}")
    if not found:
        return
    name, content, number = (
        ("the command", found.encode(), found)
        if isinstance(found, str)
        else (found.name, found.getvalue(), found.file_id)
    )
    if state.get(f"{at}:{key}:taken") != number:
        yield name, content
        state[f"{at}:{key}:taken"] = number


def _typed(state: Any, at: int) -> form.Case:  # noqa: ANN401  (Streamlit's session)
    return form.Case.typed(state[f"{at}:base"], _texts(state, at), state[f"{at}:config"])


def _more(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    new = len(state[CASES])
    _fill(state, new, state[CASES][at] or form.Case(base=state[f"{at}:base"]))
    _forget(state, new)
    state[CASES].append(None)
    state[TAB] = f"Scenario {new + 1}"


def _less(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    kept = [_typed(state, each) for each in range(len(state[CASES])) if each != at]
    del state[CASES][at]
    state[ERRORS] = {}
    for each, case in enumerate(kept):
        _fill(state, each, case)
        _check(state, each)
    state[TAB] = "Scenario 1"
    _say_address(state)


def _say_address(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    """Keep the address one that shows the same."""
    query: dict[str, str] = {}
    for number, case in enumerate((case for case in state[CASES] if case is not None), start=1):
        query |= case.query(number)
    st.query_params.from_dict(query)


# --- the answers


def _compare(state: Any) -> None:  # noqa: ANN401  (Streamlit's session)
    ready = [
        (at, case)
        for at, case in enumerate(state[CASES])
        if case is not None and not any(where[0] == at for where in state[ERRORS])
    ]
    if len(ready) > 1:
        st.divider()
        st.subheader("Side by side", anchor=False)
        answer.side_by_side([(f"Scenario {at + 1}", case) for at, case in ready])


def _answer(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    case = state[CASES][at]
    if any(where[0] == at for where in state[ERRORS]):
        st.info("Nothing is planned: what stands in red says what is needed.")
    elif case is None:
        st.info(
            "Say which model, load and latency limits, and press **Plan**: the answer is the"
            " fewest GPUs that hold the limits, and their layout."
        )
    else:
        answer.draw(case)


if __name__ == "__main__":
    main()

"""The page of `sizing ui`: Streamlit runs this file anew at every change."""

from __future__ import annotations

from typing import Any

import streamlit as st

from minicluster.errors import InputError
from sizing.planner.budget import budgets
from sizing.ui import answer, form
from sizing.ui.answer import STYLE

# Of the session: cases that were asked for (`None`: not yet), errors by case and field, and the
# tab in front. (No docstring: Streamlit would show it.)
CASES, ERRORS, TAB = "cases", "errors", "tab"


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
    _change_texts(state, at, case.texts())


def _change_texts(state: Any, at: int, texts: dict[str, str]) -> None:  # noqa: ANN401
    for key, text in texts.items():
        state[f"{at}:{key}"] = text


def _texts(state: Any, at: int) -> dict[str, str]:  # noqa: ANN401  (Streamlit's session)
    classes = state[f"{at}:{form.CLASSES}"]
    keys = [each.key for each in form.fields(form.class_count({form.CLASSES: classes}))]
    return {form.CLASSES: classes} | {key: state[f"{at}:{key}"] or "" for key in keys}


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
    wrong = any((at, field.key) in state[ERRORS] for field in group.fields)
    with st.expander(group.title, expanded=wrong) if group.folded else st.container():
        if not group.folded:
            st.markdown(f"**{group.title}**")
        for at_pair in range(0, len(group.fields), 2):
            pair = group.fields[at_pair : at_pair + 2]
            for field, place in zip(pair, st.columns(len(pair), wrap=False), strict=True):
                with place:
                    _field(state, at, field, form.help_text(field.key))
            for field in pair:
                _said(state, at, field.key, field.label)
        if group.title == "Model":
            st.file_uploader(
                "or the config.json of another model",
                key=f"{at}:file",
                help="The config.json of a model on Hugging Face; weights are not needed",
            )
            _said(state, at, "file")


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
    st.selectbox(field.label, choices, key=key, help=help_text, format_func=_shown_choice)


def _shown_choice(value: str) -> str:
    if value.startswith(form.DROPPED):
        return f"{value.removeprefix(form.DROPPED)} (config.json)"
    return value or "as the model has it"


# --- what the buttons do


def _start_from(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    _fill(state, at, form.Case(base=state[f"{at}:base"]))
    state[ERRORS] = {}


def _submit(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    """Take what was typed: it is planned where it can be, and else said what is wrong."""
    state[ERRORS] = {where: said for where, said in state[ERRORS].items() if where[0] != at}
    dropped = state[f"{at}:file"]
    if dropped is not None and state.get(f"{at}:taken") != dropped.file_id:
        try:
            state[f"{at}:config"] = form.checked_config(dropped.getvalue())
        except InputError as error:
            state[ERRORS][at, "file"] = f"{dropped.name}: {form.beside(error)}"
            return
        state[f"{at}:taken"] = dropped.file_id
        state[f"{at}:{form.MODEL}"] = form.DROPPED + form.config_name(state[f"{at}:config"])
    state[CASES][at] = _typed(state, at)
    _check(state, at)
    _say_address(state)


def _typed(state: Any, at: int) -> form.Case:  # noqa: ANN401  (Streamlit's session)
    return form.Case.typed(state[f"{at}:base"], _texts(state, at), state[f"{at}:config"])


def _more(state: Any, at: int) -> None:  # noqa: ANN401  (Streamlit's session)
    new = len(state[CASES])
    _fill(state, new, state[CASES][at] or form.Case(base=state[f"{at}:base"]))
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

"""Classes of requests on the page, and further questions about plans."""

from __future__ import annotations

import pytest

from minicluster.errors import InputError
from sizing.ui import form
from tests.sizing.ui.opened import FEW, MIX, QUICK, opened, press, write

CLASS = "workload.classes"


def test_a_second_class_of_requests_is_planned_and_taken_away_again() -> None:
    """The first class is the load as it stood; the link shows the mix; one class is a load."""
    page = opened({"scenario": form.FIRST, **QUICK})
    press(page, "Add a class of requests")
    assert page.get_by_key(f"{CLASS}.0.requests_per_s").value == "2"
    write(page, {"workload.classes.1.requests_per_s": "1", "workload.classes.1.slo.ttft_s": "3"})
    [headline] = [each.value for each in page.subheader]
    assert headline.startswith("llama-3.1-8b at 3 requests/s of 2 classes: 1 h100-sxm GPU")
    shown = " ".join(each.value for each in page.html)
    assert "own of class-2" in shown
    again = opened(dict(page.query_params))
    assert [each.value for each in again.subheader] == [headline]
    press(again, "Remove class 1")
    assert again.get_by_key("workload.requests_per_s").value == "1"
    assert again.get_by_key("slo.ttft_s").value == "3"
    write(again, {})
    assert "workload.classes" not in again.query_params


def test_classes_on_pools_of_their_own_are_shown_each() -> None:
    """Both plans have their figures and files; the file of a class is an ordinary scenario."""
    page = opened(FEW)
    of_pools = [each.label for each in page.tabs if "ools" in each.label or "All" in each.label]
    assert of_pools == ["Pools of chat", "Pools of summaries", "All classes"]
    assert {"chat:plan-file", "summaries:scenario-file"} <= {
        each.key for each in page.get("download_button")
    }


@pytest.mark.parametrize(
    ("key", "text", "says"),
    [
        ("name", "summaries", "no name twice"),
        ("name", "Chat!", "lower-case letters"),
        ("requests_per_s", "", "a value"),
        ("think_s", "5", "without users"),
        ("requests_per_s", "0.001", "at least 2%"),
        ("input_tokens", "x", "a whole number"),
        ("input_tokens", "200000", "at most 131072"),
        ("input_tokens", '{ distribution = "uniform", low = 9, high = 2 }', "at least 9"),
        ("slo.ttft_s", "-1", "positive"),
    ],
)
def test_what_is_wrong_with_a_class_is_said_beside_its_field(
    key: str, text: str, says: str
) -> None:
    case = form.Case(base=MIX, changes=((f"workload.classes.0.{key}", text),))
    with pytest.raises(InputError) as raised:
        case.scenario()
    where = 1 if "twice" in says else 0
    assert form.field_of(raised.value, case.texts()) == f"workload.classes.{where}.{key}"
    assert says in f"{raised.value}"


@pytest.mark.parametrize("count", ["many", "-1", "99"])
def test_an_address_with_no_number_of_classes(count: str) -> None:
    page = opened({"scenario": form.FIRST, "workload.classes": count})
    assert "a number from 1 to 6" in page.error[0].value


def test_classes_are_added_and_removed_as_texts() -> None:
    """Names stay apart; what a class says moves up with it; the last class is the load again."""
    two = form.Case(base=MIX).texts()
    three = form.with_class(two)
    assert three["workload.classes.2.input_tokens"] == two["workload.classes.1.input_tokens"]
    assert three["workload.classes.2.name"] == "class-3"
    assert form.without_class(three, 2) == two
    first_gone = form.without_class(three, 0)
    assert first_gone["workload.classes.0.name"] == "summaries"
    one = form.without_class(first_gone, 1)
    assert one["workload.requests_per_s"] == "10"
    assert one["slo.e2e_s"] == "20"
    assert form.class_count(one) == 0
    again = form.with_class(one)
    assert again["workload.classes.0.input_tokens"] == one["workload.input_tokens"]
    assert again["workload.classes.1.name"] == "class-2"


def test_questions_about_all_classes_weigh_pools_of_their_own() -> None:
    """The curve has the rates of the mix, and those of each class below them."""
    page = opened(FEW)
    page.get_by_key(":What do other numbers of GPUs carry?").click().run()
    assert not page.exception
    assert any("requests/s within the SLO" in each.value for each in page.html)
    assert any("own pools of each class" in each.value for each in page.html)


def test_a_day_with_autoscaling_is_asked_by_a_button() -> None:
    """Its answer stays where the page is drawn again."""
    page = opened({"scenario": form.FIRST, **QUICK, "workload.requests_per_s": "30"})
    asked = "How many GPU-hours does autoscaling save over a day?"
    next(button for button in page.button if button.label == asked).click()
    page.run()
    assert not page.exception
    for _ in range(2):
        assert any("GPU-hours a day" in each.value for each in page.html)
        assert asked not in [button.label for button in page.button]
        page.run()

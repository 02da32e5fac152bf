"""The page of `sizing ui`, and the values behind its form."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from minicluster.config import read_toml
from minicluster.errors import InputError
from sizing import catalog
from sizing.scenario import Scenario
from sizing.ui import form
from sizing.ui.plans import planned
from tests.sizing.ui.opened import MIX, QUICK, opened, press, shown, write

CONFIG = catalog.models()["qwen2.5-7b"].config


def test_a_plan_from_nothing_and_its_link() -> None:
    """What was typed is planned and stands in the address; the address alone shows the same."""
    page = opened()
    assert page.subheader[0].value.startswith("llama-3.1-8b at 20 requests/s: 3 h100-sxm GPUs")
    write(page, QUICK)
    [headline] = [each.value for each in page.subheader]
    assert headline.startswith("llama-3.1-8b at 2 requests/s: 1 h100-sxm GPU on 1 node")
    query = dict(page.query_params)
    assert query == {"scenario": form.FIRST, **QUICK}
    again = opened(query)
    assert [each.value for each in again.subheader] == [headline]
    assert shown(again) == shown(page)


def test_what_cannot_be_used_is_said_beside_its_field_and_stays() -> None:
    page = opened()
    write(page, {"workload.requests_per_s": "fast", "slo.ttft_s": "0.7"})
    [said] = [each.value for each in page.error]
    assert said == "**Requests/s**: 'fast' cannot be used: expected a number"
    assert page.get_by_key("workload.requests_per_s").value == "fast"
    assert page.get_by_key("slo.ttft_s").value == "0.7"
    assert "what was planned before" in page.warning[0].value
    assert page.subheader[0].value.startswith("llama-3.1-8b at 20 requests/s")


def test_a_changed_field_is_said_until_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of before stays, and says so; where plans are quick the change is planned."""
    page = opened({"scenario": form.FIRST, **QUICK})
    [headline] = [each.value for each in page.subheader]
    for limit_s, said in ((0.0, ["Changed: Requests/s 2 → 3"]), (1e9, [])):
        monkeypatch.setattr("sizing.ui.plans.QUICK_S", limit_s)
        page.get_by_key("workload.requests_per_s").set_value("3").run()
        assert [each.value.partition(".")[0] for each in page.warning] == said
        assert ([each.value for each in page.subheader] == [headline]) == bool(said)


def test_a_bad_file_is_said_and_a_good_one_becomes_the_model() -> None:
    """The model stays until a file is one; then the address holds the file, and shows the same."""
    page = opened()
    page.get_by_key("file").set_value(
        ("config.json", b'{"model_type": "bert"}', "application/json")
    )
    write(page, QUICK)
    assert "bert" in page.error[0].value
    assert page.get_by_key("model.id").value == "llama-3.1-8b"
    assert page.get_by_key("search.pools").value == "mixed"
    page.get_by_key("file").set_value(
        ("config.json", json.dumps(CONFIG).encode(), "application/json")
    )
    write(page, {})
    [headline] = [each.value for each in page.subheader]
    assert headline.startswith("qwen2-")
    again = opened(dict(page.query_params))
    assert [each.value for each in again.subheader] == [headline]


def test_no_plan_names_the_nearest_miss_and_what_to_change() -> None:
    page = opened({"scenario": form.FIRST, **QUICK, "slo.ttft_s": "0.001"})
    [said] = [each.value for each in page.error]
    assert "TTFT p99 of a request without any load" in said
    text = shown(page)
    assert "Nearest miss" in text
    assert "a limit well above" in text


def test_gpus_engines_and_a_kept_answer_in_one_table() -> None:
    """The first answer remains; each other one has its price, and what it takes more or less."""
    page = opened({"scenario": form.FIRST, **QUICK})
    headline = page.subheader[0].value
    press(page, "Keep this answer to compare")
    write(page, {"workload.requests_per_s": "3"})
    page.get_by_key("compare.gpu").set_value(["h200-sxm", "rtx-4090"])
    page.get_by_key("compare.engine").set_value(["sglang 0.5"])
    page.run()
    assert not page.exception
    assert page.subheader[0].value == headline.replace("at 2 ", "at 3 ")
    [table] = [each.value for each in page.html if "against this answer" in each.value]
    for words in ("this answer", "h200-sxm", "rtx-4090", "sglang 0.5", "Requests/s 3 → 2",
                  "same GPUs, +$0.90/hour (+20%)", "list prices"):  # fmt: skip
        assert words in table, words
    again = opened(dict(page.query_params))
    assert table in [each.value for each in again.html]
    press(again, "Forget the kept answers")
    assert "2.scenario" not in again.query_params


def test_nothing_is_set_against_an_answer_without_a_plan() -> None:
    """The row of a GPU that has a plan is not the answer that the others are compared with."""
    none = {"cluster.gpu": "rtx-4090", "cluster.max_gpus": "1"}
    page = opened({"scenario": form.FIRST, **QUICK, **none, "compare.gpu": "h200-sxm,b200-sxm"})
    [table] = [each.value for each in page.html if "against this answer" in each.value]
    assert "no plan" in table
    assert table.count("1xTP1 mixed") == 2
    assert "same GPUs" not in table


def test_every_figure_has_its_terms() -> None:
    """Below each figure a button opens where it comes from: TTFT by phase, steps by term."""
    page = opened({"scenario": form.FIRST, **QUICK, "cluster.price_usd_per_gpu_hour": "2.5"})
    text = shown(page)
    for words in ("Mean TTFT", "Prefill of 2000 tokens", "Decode step of", "attention", "eq. E2",
                  "2.50 US dollars per hour", "90% that the SLO holds"):  # fmt: skip
        assert words in text


def test_the_plan_is_taken_to_another_stack() -> None:
    """Its files are shown and offered; a stack that needs an image says so until it has one."""
    page = opened({"scenario": form.FIRST, **QUICK})
    assert any("vllm serve" in each.value for each in page.code)
    page.get_by_key(":stack").set_value("dynamo").run()
    assert "image that dynamo starts" in page.info[0].value
    page.get_by_key(":image").set_value("dynamo:1").run()
    assert any("DynamoGraphDeployment" in each.value for each in page.code)
    offered = {each.key for each in page.get("download_button")}
    assert {":stack-file", ":acceptance-file"} <= offered


@pytest.mark.parametrize(
    "query", [{"scenario": "none"}, {"scenario": form.FIRST, "config": "nonsense"}]
)
def test_an_address_that_says_nothing_we_know(query: dict[str, str]) -> None:
    """The error is shown, and the page begins anew: Plan plans what the fields say."""
    page = opened(query)
    assert page.error[0].value.startswith("The address: ")
    assert page.get_by_key("base").value == form.FIRST
    write(page, QUICK)
    assert not page.error
    assert page.subheader[0].value.startswith("llama-3.1-8b at 2 requests/s: 1 h100-sxm GPU")


def test_sessions_that_ask_at_once_share_one_search() -> None:
    """All get the very same result; the interpreter switches threads as often as it can."""
    together, usual_s = Barrier(8), sys.getswitchinterval()

    def ask(case: form.Case) -> object:
        together.wait()
        return planned(case)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as sessions:
            for rate in range(1, 31):
                changes = (("workload.requests_per_s", f"{rate}"), ("slo.ttft_s", "0.001"))
                answers = set(sessions.map(ask, [form.Case(changes=changes)] * 8))
                assert len(answers) == 1
    finally:
        sys.setswitchinterval(usual_s)


@pytest.mark.parametrize("base", form.bases())
def test_fields_say_what_a_scenario_says(base: str) -> None:
    """Typed again as they stand, they change nothing; its file is the same scenario."""
    texts = form.base_texts(base)
    assert form.Case.typed(base, texts, "") == form.Case(base=base)
    typed = form.Case(base=base, changes=tuple(texts.items())).scenario()
    asked = Scenario.load(base)
    assert (typed.scenario.workload, typed.scenario.slo) == (
        asked.scenario.workload,
        asked.scenario.slo,
    )
    assert (typed.model, typed.gpu) == (asked.model, asked.gpu)


def test_the_scenario_file_is_what_was_typed(tmp_path: Path) -> None:
    lengths = '{ distribution = "uniform", low = 64, high = 192 }'
    changes = (("workload.input_tokens", lengths), ("model.weight_dtype", "fp8"))
    case = form.Case(changes=changes)
    path = tmp_path / "typed.toml"
    path.write_text(form.scenario_file(case.scenario(), case.config))
    assert Scenario.load(path) == case.scenario()
    assert read_toml(path)["workload"]["input_tokens"]["high"] == 192


def test_users_are_planned_in_place_of_a_rate() -> None:
    """The rate that they send is in the headline; with a rate beside them the field says so."""
    page = opened()
    write(page, {"workload.users": "20", "workload.think_s": "8", "search.pools": "mixed"})
    assert page.error[0].value.startswith("**Users, if no rate**: '20' cannot be used")
    write(page, {"workload.requests_per_s": ""})
    [headline] = [each.value for each in page.subheader]
    assert "(20 users, 8 s think time)" in headline
    again = opened(dict(page.query_params))
    assert [each.value for each in again.subheader] == [headline]


def test_users_of_a_class_are_planned_in_place_of_its_rate() -> None:
    keys = {"requests_per_s": "", "users": "400", "think_s": "9"}
    typed = tuple((f"workload.classes.0.{key}", text) for key, text in keys.items())
    case = form.Case(base=MIX, changes=typed)
    load = case.scenario().scenario.workload
    assert [(each.users, each.think_s) for each in load.classes] == [(400, 9), (None, 0)]
    assert form.cases_of(case.query(1)) == [case]


def test_routing_caches_drafts_and_adapters_have_fields() -> None:
    """Values that are typed reach the scenario, and a link restores them."""
    texts = dict(form.base_texts(form.FIRST)) | {
        "search.routing": "prefix-aware",
        "engine.kv_offload_host_bytes": "2e11",
        "engine.kv_offload_disk_bytes": "1e12",
        "engine.kv_offload_disk_bytes_per_s": "3e9",
        "engine.kv_offload_disk_path": "/nvme",
        "workload.lora_adapters": "40",
        "engine.max_loras": "8",
        "engine.max_lora_rank": "32",
    }
    case = form.Case.typed(form.FIRST, texts, "")
    scenario = case.scenario().scenario
    assert scenario.search.routing == "prefix-aware"
    assert scenario.engine.kv_offload_host_bytes == 2e11
    assert scenario.engine.kv_offload_disk_path == "/nvme"
    assert scenario.workload.lora_adapters == 40
    assert (scenario.engine.max_loras, scenario.engine.max_lora_rank) == (8, 32)
    assert form.cases_of(case.query(1)) == [case]


def test_a_dropped_file_goes_with_the_server() -> None:
    """Its folder is there while the server runs, and not after it."""
    made = (
        "from sizing.ui import form; folder = form.config_folder('{}');"
        " assert (folder / 'config.json').exists(); print(folder)"
    )
    done = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).parent.exists()


def test_list_prices_and_a_budget_are_asked_for() -> None:
    """A list price gives the price of the plan; a budget below it is why there is none."""
    asked = {"scenario": form.FIRST, **QUICK, "cost.prices": "catalog"}
    text = shown(opened(asked))
    assert "list prices" in text
    page = opened({**asked, "cost.max_usd_per_hour": "1"})
    assert "\\$ per hour at most” is \\$1.00/h" in page.error[0].value


def test_a_budget_without_a_price_is_said_beside_its_field() -> None:
    page = opened({"scenario": form.FIRST, **QUICK, "cost.max_usd_per_hour": "9"})
    [said] = [each.value for each in page.error]
    assert said.startswith(
        "**\\$ per hour at most**: 9.0 cannot be used: expected beside it a price"
    )
    assert "what stands in red" in page.info[0].value


def test_files_that_are_no_models() -> None:
    for content, says in (
        (b"\xff\xfe", "JSON"),
        (b"[" * 50_000, "JSON"),
        (b"[]", "an object"),
        (b" " * 200_000, "at most 100,000"),
        (b'{"model_type": "../../x"}', "model_type"),
    ):
        with pytest.raises(InputError, match=says):
            form.checked_config(content)

"""The page of `sizing ui`, run by Streamlit without a browser, and the values behind it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import sizing.ui
from minicluster.config import read_toml
from minicluster.errors import InputError
from sizing import catalog
from sizing.scenario import Scenario
from sizing.stacks.read import read_deployment_file
from sizing.ui import answer, dropped, form
from tests.sizing.stacks.test_read import RECORD, SERVE
from tests.sizing.stacks.test_traffic import log_lines

PAGE = Path(sizing.ui.__file__).parent / "page.py"
QUICK = {"workload.requests_per_s": "2", "search.pools": "mixed"}
CONFIG = catalog.models()["qwen2.5-7b"].config


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw distributions of fewer requests: no test here reads them off."""
    monkeypatch.setattr(answer, "REQUESTS", 300)


def opened(query: dict[str, str] | None = None) -> AppTest:
    """Open the page at an address."""
    page = AppTest.from_file(PAGE, default_timeout=120)
    for name, value in (query or {}).items():
        page.query_params[name] = value
    page.run()
    assert not page.exception
    return page


def write(page: AppTest, texts: dict[str, str], case: int = 0) -> None:
    """Type into fields, and press Plan."""
    for key, text in texts.items():
        page.get_by_key(f"{case}:{key}").set_value(text)
    next(b for b in page.button if b.label == "Plan" and f"{case}:form" in b.form_id).click()
    page.run()
    assert not page.exception, page.exception[0].value


def test_a_plan_from_nothing_and_its_link() -> None:
    """What was typed is planned and stands in the address; the address alone shows the same."""
    page = opened()
    assert page.subheader == []
    write(page, QUICK)
    [headline] = [each.value for each in page.subheader]
    assert headline.startswith("llama-3.1-8b at 2 requests/s: 1 h100-sxm GPU on 1 node")
    query = dict(page.query_params)
    assert query == {"scenario": form.FIRST, **QUICK}
    again = opened(query)
    assert [each.value for each in again.subheader] == [headline]
    assert [each.value for each in again.html] == [each.value for each in page.html]


def test_what_cannot_be_used_is_said_beside_its_field_and_stays() -> None:
    page = opened()
    write(page, {"workload.requests_per_s": "fast", "slo.ttft_s": "0.7"})
    [said] = [each.value for each in page.error]
    assert said == "**Requests/s**: 'fast' cannot be used: expected a valid number"
    assert page.get_by_key("0:workload.requests_per_s").value == "fast"
    assert page.get_by_key("0:slo.ttft_s").value == "0.7"
    assert page.subheader == []


def test_a_bad_file_is_said_and_a_good_one_becomes_the_model() -> None:
    """The model stays until a file is one; then the address holds the file, and shows the same."""
    page = opened()
    page.get_by_key("0:file").set_value(
        ("config.json", b'{"model_type": "bert"}', "application/json")
    )
    write(page, QUICK)
    assert "bert" in page.error[0].value
    assert page.get_by_key("0:model.id").value == "llama-3.1-8b"
    assert page.get_by_key("0:search.pools").value == "mixed"
    page.get_by_key("0:file").set_value(
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
    shown = " ".join(each.value for each in page.html)
    assert "Nearest miss" in shown
    assert "a limit well above" in shown


def test_scenarios_side_by_side() -> None:
    """A copy is changed beside the first one; both are in the address; either can be removed."""
    page = opened({"scenario": form.FIRST, **QUICK})
    page.get_by_key("0:more").click().run()
    assert page.get_by_key("1:workload.requests_per_s").value == "2"
    write(page, {"cluster.gpu": "h200-sxm"}, case=1)
    assert "Side by side" in [each.value for each in page.subheader]
    shown = [each.value for each in page.markdown]
    assert any("1 h100-sxm GPU" in text for text in shown)
    assert any("1 h200-sxm GPU" in text for text in shown)
    assert page.query_params["2.cluster.gpu"] == "h200-sxm"
    page.get_by_key("0:less").click().run()
    assert not page.exception
    assert page.query_params["cluster.gpu"] == "h200-sxm"
    assert "2.scenario" not in page.query_params


def test_every_figure_has_its_terms() -> None:
    """Below each figure a button opens where it comes from: TTFT by phase, steps by term."""
    page = opened({"scenario": form.FIRST, **QUICK, "cluster.price_usd_per_gpu_hour": "2.5"})
    shown = " ".join(each.value for each in page.html)
    for words in ("Mean TTFT", "Prefill of 2000 tokens", "Decode step of", "attention", "eq. E2",
                  "2.50 US dollars per hour", "90% that the SLO holds"):  # fmt: skip
        assert words in shown


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
    """The error is shown, and the page begins anew."""
    page = opened(query)
    assert page.error[0].value.startswith("The address: ")
    assert page.get_by_key("0:base").value == form.FIRST


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
    shown = " ".join(each.value for each in opened(asked).html)
    assert "list prices" in shown
    page = opened({**asked, "cost.max_usd_per_hour": "1"})
    assert "cost.max_usd_per_hour is $1.00/h" in page.error[0].value


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


MIX = "chat-and-summaries-8b"
CLASS = "0:workload.classes"


def press(page: AppTest, label: str) -> None:
    next(each for each in page.button if each.label == label).click()
    page.run()
    assert not page.exception


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
    assert again.get_by_key("0:workload.requests_per_s").value == "1"
    assert again.get_by_key("0:slo.ttft_s").value == "3"
    write(again, {})
    assert "workload.classes" not in again.query_params


def test_classes_on_pools_of_their_own_are_shown_each() -> None:
    """Both plans have their figures and files; the file of a class is an ordinary scenario."""
    page = opened({"scenario": MIX, "search.pools": "mixed"})
    assert [each.label for each in page.tabs] == [
        "Pools of chat",
        "Pools of summaries",
        "All classes",
    ]
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
    page = opened({"scenario": MIX, "search.pools": "mixed"})
    page.get_by_key(":What do other numbers of GPUs carry?").click().run()
    assert not page.exception
    assert any("requests/s of chat-and-summaries-8b" in each.value for each in page.markdown)
    assert any("own pools of each class" in each.value for each in page.html)


def test_a_day_with_autoscaling_is_asked_by_a_button() -> None:
    """Its answer stays where the page is drawn again."""
    page = opened({"scenario": form.FIRST, **QUICK, "workload.requests_per_s": "30"})
    asked = "How many GPU-hours does autoscaling save over a day?"
    next(button for button in page.button if button.label == asked).click()
    page.run()
    assert not page.exception
    for _ in range(2):
        assert any("GPU-hours a day" in each.value for each in page.markdown)
        assert asked not in [button.label for button in page.button]
        page.run()


def test_a_day_is_dropped_in() -> None:
    """Its peak is planned for; what is no day is said by its name and line, and can be mended."""
    page = opened({"scenario": form.FIRST, **QUICK})
    asked = "How many GPU-hours does autoscaling save over a day?"
    hours = [f"{hour},{60 if hour == 12 else 1}" for hour in range(24)]
    for bad in (True, False):
        lines = ["hour,requests_per_s", *(["0,many"] if bad else hours)]
        content = "\n".join(lines).encode()
        page.get_by_key(":day").set_value((f"day-{bad}.csv", content, "text/csv"))
        page.run()
        next(button for button in page.button if button.label == asked).click()
        page.run()
        assert not page.exception
        assert any("day-True.csv:2" in each.value for each in page.error) == bad
    [said] = [each.value for each in page.markdown if "GPU-hours a day" in each.value]
    assert "with autoscaling" in said


def shown(page: AppTest) -> str:
    """Return all tables and notes of a page."""
    return " ".join(each.value for each in page.html)


def drop(page: AppTest, key: str, name: str, content: str) -> None:
    """Drop a file in; Plan takes it."""
    page.get_by_key(f"0:{key}").set_value((name, content.encode(), "text/plain"))


FLAGS = (
    f"{SERVE} -tp 2 --max-model-len 65536 --block-size 32 --max-num-seqs 64"
    " --max-num-batched-tokens 4096 --long-prefill-token-threshold 1024"
    " --gpu-memory-utilization 0.85 --kv-cache-dtype fp8 --enable-lora --max-loras 4"
    " --max-lora-rank 32 --max-cpu-loras 8 --lora-target-modules qkv_proj o_proj"
)
EXPERTS = (
    "vllm serve deepseek-ai/DeepSeek-V3 -tp 8 --enable-expert-parallel --enable-eplb"
    """ --eplb-config '{"num_redundant_experts": 32}' --all2all-backend deepep_low_latency"""
    """ --enable-dbo --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
    """ --kv-transfer-config '{"kv_role": "%s"}'"""
)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (FLAGS, {"workload.lora_adapters": "8"}),
        (
            f"{EXPERTS % 'kv_producer'}\n{EXPERTS % 'kv_consumer'}",
            {"search.pools": "split", "engine.mean_accepted_tokens": "0.7"},
        ),
        (json.dumps(RECORD), {}),
    ],
)
def test_a_deployment_is_read_as_the_command_reads_it(
    text: str, keys: dict[str, str], tmp_path: Path
) -> None:
    """Every key that it gives has a field; what engine and model were before is gone."""
    before = form.Case(base="llama-2-70b-long", changes=(("engine.max_num_seqs", "7"),)).texts()
    read = dropped.deployment_texts(text.encode(), "run.sh", before | keys)
    case = form.Case.typed("llama-2-70b-long", before | keys | read, "")
    file = tmp_path / "run.sh"
    file.write_text(text)
    found = read_deployment_file(
        file, [f"{key}={value}" for key, value in keys.items()], base="llama-2-70b-long"
    )
    asked = case.scenario()
    assert (asked.model, asked.gpu, asked.engine) == (
        found.scenario.model,
        found.scenario.gpu,
        found.scenario.engine,
    )
    assert asked.cluster == found.scenario.cluster
    assert asked.scenario.engine == found.scenario.scenario.engine
    assert asked.scenario.workload == found.scenario.scenario.workload
    assert case.today == found.pools
    assert set(found.notes) <= set(read["today.notes"].splitlines())


@pytest.mark.parametrize(
    "before", [{"scenario": MIX}, {"workload.requests_per_s": "", "workload.users": "9"}]
)
def test_a_rate_that_was_read_is_in_place_of_classes_and_users(before: dict[str, str]) -> None:
    page = opened({"scenario": form.FIRST, **before})
    drop(page, "deployment", "record.json", json.dumps(RECORD))
    write(page, {})
    assert not page.error
    assert page.get_by_key("0:workload.requests_per_s").value == "2"
    assert page.get_by_key("0:workload.users").value == ""
    assert "64 users in a closed loop became the rate" in shown(page)


def test_pools_that_run_today_have_the_rate_that_their_users_send() -> None:
    """Faster pools are sent more."""
    case = {"workload.requests_per_s": "", "workload.users": "40", "workload.think_s": "5"}
    page = opened({"scenario": form.FIRST, **case, "search.pools": "mixed", "today.mixed": "1xTP8"})
    [row] = re.findall(r"<td>load</td><td>(\S+) requests/s</td><td>(\S+) req", shown(page))
    assert float(row[0]) > float(row[1]) > 4


def test_what_runs_today_is_predicted_beside_the_plan() -> None:
    """A pasted command fills fields; the link shows the same, with what was not read."""
    page = opened({"scenario": form.FIRST, **QUICK})
    command = f"# 4 replicas\n{SERVE} -tp 2 --max-num-seqs 64 --enforce-eager"
    write(page, {"command": command})
    assert page.get_by_key("0:today.mixed").value == "4xTP2"
    assert page.get_by_key("0:engine.max_num_seqs").value == "64"
    assert page.get_by_key("0:workload.requests_per_s").value == "2"
    for words in ("Today and better", "<td>4xTP2 mixed</td><td>1xTP1 mixed</td>",
                  "<td>GPUs</td><td>8</td><td>1</td>", "as the fields say: load, limits, GPUs",
                  "not part of the prediction: --enforce-eager"):  # fmt: skip
        assert words in shown(page)
    again = opened(dict(page.query_params))
    assert shown(again) == shown(page)
    write(page, {"today.mixed": "2xTP2"})  # the command is not read again
    assert "<td>2xTP2 mixed</td><td>1xTP1 mixed</td>" in shown(page)


def test_pools_that_run_today_and_saturate_or_are_none() -> None:
    """The plan stands beside the error."""
    for pool, says in (
        ("1xTP1", "saturate --mixed 1xTP1: queues grow without end"),
        ("1xTPx", "'1xTPx' cannot be used: expected replicas x TP"),
    ):
        case = {**QUICK, "workload.requests_per_s": "90", "today.mixed": pool}
        page = opened({"scenario": form.FIRST, **case})
        [said] = [each.value for each in page.error]
        assert said.startswith(f"**Today, mixed {pool}**: ")
        assert says in said
        assert len(page.subheader) == 1


def test_pools_that_run_today_stand_beside_own_pools_of_classes_and_no_plan() -> None:
    """Each class has its limits in a row; without a plan there is one column."""
    page = opened({"scenario": MIX, "search.pools": "mixed", "today.mixed": "6xTP1"})
    assert "<td>layout</td><td>6xTP1 mixed</td><td>chat: " in shown(page)
    assert "chat TTFT p99 &lt; 300.0 ms" in shown(page)
    case = {**QUICK, "slo.ttft_s": "0.001", "today.mixed": "1xTP1"}
    page = opened({"scenario": form.FIRST, **case})
    assert "<th></th><th>today</th></tr>" in shown(page)
    assert "missed" in shown(page)


def test_a_log_becomes_the_load() -> None:
    """Rate and lengths fill the fields; the page says what the traffic was."""
    page = opened({"scenario": form.FIRST, **QUICK})
    drop(page, "log", "access.log", "\n".join(log_lines(7200.0)))
    write(page, {"slo.ttft_s": "0.7"})
    rate = page.get_by_key("0:workload.requests_per_s").value
    assert page.query_params["workload.requests_per_s"] == rate != "2"
    assert "lognormal" in page.get_by_key("0:workload.input_tokens").value
    for words in ("access.log:", "2,000 requests, 30 without tokens", "prompts: median 1,0",
                  "requests/s over 1,", "a hole of 7,2"):  # fmt: skip
        assert words in shown(page)
    assert shown(opened(dict(page.query_params))) == shown(page)


TALK = json.dumps(
    [{"conversations": [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 80}]}]
)


def test_conversations_need_characters_per_token() -> None:
    """They have lengths and no rate, which stays."""
    page = opened({"scenario": form.FIRST, **QUICK})
    drop(page, "log", "talk.json", TALK)
    write(page, {})
    [said] = [each.value for each in page.error]
    assert said.startswith("Characters per token is missing; expected characters of a token")
    write(page, {"ratio": "four"})
    assert "Characters per token is 'four'; expected a number" in page.error[0].value
    write(page, {"ratio": "4"})
    assert page.get_by_key("0:workload.input_tokens").value == "100"
    assert page.get_by_key("0:workload.requests_per_s").value == "2"
    assert "no arrivals in it" in shown(page)


@pytest.mark.parametrize(
    ("key", "content", "says"),
    [
        ("deployment", f"{SERVE} -tp two", "bad: --tensor-parallel-size is 'two'; expected a num"),
        ("deployment", "hello", "bad is 'neither'; expected a command `vllm serve …`"),
        ("log", '{"time": "x", "prompt_tokens": 1, "output_tokens": 1}', "bad:1 is"),
        ("log", "", "an empty file"),
    ],
)
def test_a_file_that_cannot_be_read_is_said_and_what_was_typed_stays(
    key: str, content: str, says: str
) -> None:
    page = opened()
    drop(page, key, "bad", content)
    write(page, {"workload.requests_per_s": "3"})
    [said] = [each.value for each in page.error]
    assert says in said
    assert "sizing-ui-" not in said
    assert page.get_by_key("0:workload.requests_per_s").value == "3"
    assert page.subheader == []


def test_another_scenario_has_the_file_read_again() -> None:
    """The scenario gives what the file does not."""
    page = opened({"scenario": form.FIRST, **QUICK})
    drop(page, "deployment", "run.sh", f"{SERVE} -tp 2")
    write(page, {})
    page.get_by_key("0:base").set_value("llama-3.1-70b-h100").run()
    assert page.get_by_key("0:today.mixed").value == ""
    write(page, {"workload.requests_per_s": "1"})
    assert page.get_by_key("0:today.mixed").value == "1xTP2"
    assert page.get_by_key("0:workload.input_tokens").value == "4000"


def test_a_model_that_is_not_known_is_said_beside_the_model() -> None:
    page = opened()
    write(page, {"command": "vllm serve our/own-7b -tp 2"})
    [said] = [each.value for each in page.error]
    assert said.startswith("**Model**: 'our/own-7b' cannot be used")
    assert page.get_by_key("0:today.mixed").value == "1xTP2"


def test_a_cluster_has_its_gpus() -> None:
    """Another one fills its own GPU and nodes, unless they were typed beside it."""
    stood = form.Case().texts()
    chosen = form.with_cluster(stood | {"cluster.preset": "talk-32k"}, stood)
    preset = catalog.clusters()["talk-32k"]
    case = form.Case.typed(form.FIRST, chosen, "")
    assert (case.scenario().gpu.name, case.scenario().cluster.tiers) == (preset.gpu, preset.tiers)
    typed = stood | {"cluster.preset": "h200-8", "cluster.gpu": "a100-sxm"}
    assert form.with_cluster(typed, stood)["cluster.gpu"] == "a100-sxm"
    assert (
        form.with_cluster(stood | {"cluster.gpu": "h200-sxm"}, stood)["cluster.gpu"] == "h200-sxm"
    )

"""Files that are dropped on the page: deployments, records, logs and days."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sizing import catalog
from sizing.stacks.read import read_deployment
from sizing.ui import dropped, form
from tests.sizing.stacks.test_read import RECORD, SERVE
from tests.sizing.stacks.test_traffic import log_lines
from tests.sizing.ui.opened import FEW, MIX, QUICK, drop, opened, shown, write


def test_a_day_is_dropped_in() -> None:
    """Its peak is planned for; what is no day is said by its name and line, and can be mended."""
    page = opened({"scenario": form.FIRST, **QUICK})
    asked = "How many GPU-hours does autoscaling save over a day?"
    hours = [f"{hour},{60 - 5 * abs(hour - 12) + 1}" for hour in range(24)]
    for bad in (True, False):
        lines = ["hour,requests_per_s", *(["0,many"] if bad else hours)]
        content = "\n".join(lines).encode()
        page.get_by_key(":day").set_value((f"day-${bad}.csv", content, "text/csv"))
        page.run()
        next(button for button in page.button if button.label == asked).click()
        page.run()
        assert not page.exception
        assert any(r"day-\$True.csv:2" in each.value for each in page.error) == bad
    [said] = [each.value for each in page.html if "GPU-hours a day" in each.value]
    assert "with autoscaling" in said


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
    given, found = read_deployment(
        file, [f"{key}={value}" for key, value in keys.items()], base="llama-2-70b-long"
    )
    asked = case.scenario()
    assert (asked.model, asked.gpu, asked.engine) == (
        given.model,
        given.gpu,
        given.engine,
    )
    assert asked.cluster == given.cluster
    assert asked.scenario.engine == given.scenario.engine
    assert asked.scenario.workload == given.scenario.workload
    assert case.today == found.pools
    assert set(found.notes) <= set(read["today.notes"].splitlines())


@pytest.mark.parametrize(
    ("base", "changes"),
    [(MIX, ()), (form.FIRST, (("workload.requests_per_s", ""), ("workload.users", "9")))],
)
def test_a_rate_that_was_read_is_in_place_of_classes_and_users(
    base: str, changes: tuple[tuple[str, str], ...]
) -> None:
    before = form.Case(base=base, changes=changes).texts()
    read = dropped.deployment_texts(json.dumps(RECORD).encode(), "record.json", before)
    load = form.Case.typed(base, before | read, "").scenario().scenario.workload
    assert (load.requests_per_s, load.users, load.classes) == (2, None, ())
    assert "64 users in a closed loop became the rate" in read["today.notes"]


def test_pools_that_run_today_have_the_rate_that_their_users_send() -> None:
    """Faster pools are sent more."""
    case = {"workload.requests_per_s": "", "workload.users": "40", "workload.think_s": "5"}
    page = opened({"scenario": form.FIRST, **case, "search.pools": "mixed", "today.mixed": "1xTP8"})
    [row] = re.findall(r"<td>load</td><td>(\S+) requests/s</td><td>(\S+) req", shown(page))
    assert float(row[0]) > float(row[1]) > 4


def test_what_runs_today_is_predicted_beside_the_plan() -> None:
    """A pasted command fills fields; the link shows the same, with what was not read."""
    page = opened({"scenario": form.FIRST, **QUICK})
    command = f"# 4 replicas\n{SERVE} -tp 2 --max-num-seqs 64 --port 9"
    write(page, {"command": command})
    assert page.get_by_key("today.mixed").value == "4xTP2"
    assert page.get_by_key("engine.max_num_seqs").value == "64"
    assert page.get_by_key("workload.requests_per_s").value == "2"
    for words in ("Today and better", "<td>4xTP2 mixed</td><td>1xTP1 mixed</td>",
                  "<td>GPUs</td><td>8</td><td>1</td>", "as the fields say: load, limits, GPUs",
                  "without effect on the plan: --port"):  # fmt: skip
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
    page = opened({**FEW, "today.mixed": "6xTP1"})
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
    rate = page.get_by_key("workload.requests_per_s").value
    assert page.query_params["workload.requests_per_s"] == rate != "2"
    assert not page.get_by_key("workload.input_tokens").value
    assert page.get_by_key("workload.lengths").value.startswith("[")
    for words in ("access.log:", "2,000 requests", "left out: 30 lines without token counts",
                  "prompts: median 1,0", "requests/s over 1,", "a hole of 7,2"):  # fmt: skip
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
    assert said.startswith("Characters per token is missing; it has to be characters of a token")
    write(page, {"ratio": "four"})
    assert "Characters per token is 'four'; it has to be a number" in page.error[0].value
    write(page, {"ratio": "4"})
    assert page.get_by_key("workload.input_tokens").value == "100"
    assert page.get_by_key("workload.requests_per_s").value == "2"
    assert "no arrivals are in it" in shown(page)


@pytest.mark.parametrize(
    ("key", "content", "says"),
    [
        (
            "deployment",
            f"{SERVE} -tp two",
            "bad:1: --tensor-parallel-size is 'two'; it has to be a",
        ),
        (
            "deployment",
            "hello",
            "bad starts no engine of vLLM; it has to be a command `vllm serve …`",
        ),
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
    assert page.get_by_key("workload.requests_per_s").value == "3"
    assert "is not planned" in page.warning[0].value


def test_another_scenario_has_the_file_read_again() -> None:
    """The scenario gives what the file does not."""
    page = opened({"scenario": form.FIRST, **QUICK})
    drop(page, "deployment", "run.sh", f"{SERVE} -tp 2")
    write(page, {})
    page.get_by_key("base").set_value("llama-3.1-70b-h100").run()
    assert page.get_by_key("today.mixed").value == "1xTP2"
    assert page.get_by_key("workload.input_tokens").value == "4000"


def test_a_model_that_is_not_known_is_said_beside_the_model() -> None:
    page = opened()
    write(page, {"command": "vllm serve our/own-7b -tp 2"})
    [said] = [each.value for each in page.error]
    assert said.startswith("**Model**: 'our/own-7b' cannot be used")
    assert page.get_by_key("today.mixed").value == "1xTP2"


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

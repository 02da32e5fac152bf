"""Deployments of other stacks, read as a scenario: engines, pools, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minicluster.errors import InputError
from minicluster.specs.slicing import Slicing
from sizing.planner.layout import LayoutShape, kv_space
from sizing.scenario import Scenario
from sizing.stacks.formats import export
from sizing.stacks.read import ReadDeployment, read_deployment
from tests.sizing.conftest import Sizing
from tests.sizing.scenarios import proposed

BASE = "llama-3.1-8b-h100"
SERVE = "vllm serve meta-llama/Llama-3.1-8B-Instruct"

RECORD = {
    "hw": "h200-nv", "conc": 64, "model": "meta-llama/Llama-3.1-70B-Instruct", "framework": "vllm",
    "precision": "fp8", "isl": 1024, "osl": 512, "tp": 4, "ep": 1, "dp_attention": "false",
    "disagg": False, "output_tput_per_gpu": 256.0,
}  # fmt: skip


def graph(**keys: object) -> str:
    """Return a DynamoGraphDeployment of one worker with some keys of its own."""
    run = {"args": ["dynamo.vllm", "--model", "meta-llama/Llama-3.1-8B-Instruct"]}
    worker = {"componentType": "worker", "extraPodSpec": {"mainContainer": run}} | keys
    return f"kind: DynamoGraphDeployment\nspec: {json.dumps({'services': {'W': worker}})}\n"


@pytest.fixture
def read(tmp_path: Path) -> Any:  # noqa: ANN401  (a function of a text)
    """Return a reader of a text with the load of `BASE`."""

    def of(
        text: str, *, base: str | None = BASE, **overrides: object
    ) -> tuple[Scenario, ReadDeployment]:
        file = tmp_path / "file"
        file.write_text(text)
        keys = {name.replace("__", "."): value for name, value in overrides.items()}
        return read_deployment(file, keys, base=base)

    return of


def test_flags_become_keys(read: Any) -> None:  # noqa: ANN401
    """Short flags, `=`, units and continued lines are as vLLM's parser takes them."""
    asked, found = read(
        f"{SERVE} -tp 2 --max-model-len=8k \\\n  --max-num-seqs 64 --kv-cache-dtype fp8_e4m3"
        " --gpu-memory-utilization 0.85 --quantization fp8 --port 9000 > log 2>&1 &\n"
    )
    scenario = asked.scenario
    assert found.pools == {"mixed": "1xTP2"}
    assert scenario.model.max_context_tokens == 8000
    assert scenario.model.kv_dtype == scenario.model.weight_dtype == "fp8"
    assert (scenario.engine.max_num_seqs, scenario.engine.gpu_memory_utilization) == (64, 0.85)
    assert found.notes == ("without effect on the plan: --port",)


@pytest.mark.parametrize("given", ["command", "-"])
def test_a_command_needs_no_file(
    sizing: Sizing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    """The way that most run vLLM, in quotes or on standard input."""
    command = (
        "docker run --gpus all vllm/vllm-openai --model meta-llama/Llama-3.1-8B-Instruct -tp 2"
    )
    file = tmp_path / "stdin"
    file.write_text(command)
    monkeypatch.setattr("sizing.cli.stacks.STDIN", file)
    done = sizing("read", command if given == "command" else given, "--scenario", BASE, "--json")
    assert (done.code, json.loads(done.out)["pools"]) == (0, {"mixed": "1xTP2"})


def test_what_runs_beside_what_would_be_better(sizing: Sizing) -> None:
    """`--better`: eight GPUs that hold the SLO, and the fewer that do so, too."""
    command = f"{SERVE} -tp 8"
    quick = ("--set", "search.pools=mixed", "--set", "search.confidence_fraction=0.5")
    done = sizing("read", command, "--scenario", BASE, *quick, "--better")
    assert done.code == 0
    gpus = next(line.split() for line in done.out.splitlines() if line.startswith("GPUs"))
    assert gpus[1] == "8"
    assert int(gpus[2]) < 8
    assert "judged by [slo]: TTFT < 500.0 ms and TPOT < 30.0 ms at p99" in done.out


@pytest.mark.parametrize("as_json", [False, True])
def test_what_runs_is_predicted_where_nothing_is_better(
    sizing: Sizing,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Of an SLO that no plan holds, today's pools are still predicted, with the reason."""
    limits = ("--set", "slo.ttft_s=0.0001", "--set", "search.pools=mixed")
    flags = ("--scenario", BASE, *limits, "--better", *(["--json"] if as_json else []))
    done = sizing("read", f"{SERVE} -tp 8", *flags)
    assert done.code == 3
    if as_json:
        answer = json.loads(done.out)
        assert (answer["better"], answer["infeasible"]["binds"]) == ({}, "SLO floor")
        assert answer["today"]["prediction"]["capacity_requests_per_s"] > 0
    else:
        assert "saturates at" in done.out
        assert "no plan:" in done.err


@pytest.mark.parametrize("words", ["my launch.sh", "no vllm here.sh", "python run.py"])
def test_a_missing_file_is_named_as_one(sizing: Sizing, words: str) -> None:
    """Of words that start no engine; a command that starts another is told so."""
    assert f"{words} does not exist" in sizing("read", words, "--scenario", BASE).err
    other = sizing("read", "trtllm-serve some/model", "--scenario", BASE)
    assert "the command starts another engine, trtllm-serve" in other.err


def test_experts_are_whole_on_all_gpus_of_a_replica(read: Any) -> None:  # noqa: ANN401
    """`--enable-expert-parallel` has no width of its own in vLLM."""
    asked, found = read(
        "vllm serve deepseek-ai/DeepSeek-V3 -tp 2 -dp 4 --enable-expert-parallel --enable-eplb"
        """ --eplb-config '{"num_redundant_experts": 32}'""",
        base="deepseek-v3-h200",
    )
    assert found.pools == {"mixed": "1xTP2xDP4xEP8"}
    assert asked.scenario.engine.redundant_experts == 32


def test_commands_with_different_roles_are_split_pools(read: Any) -> None:  # noqa: ANN401
    """Equal commands count, and a comment above one says how often it runs."""
    role = """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "%s"}'"""
    text = "\n".join(
        [f"{SERVE} -tp 2 --max-num-seqs 8 {role % 'kv_producer'}"] * 3
        + ["# 2 replicas", f"{SERVE} -tp 4 --max-num-seqs 99 {role % 'kv_consumer'}"]
    )
    asked, found = read(text)
    assert found.pools == {"prefill": "3xTP2", "decode": "2xTP4"}
    assert asked.scenario.engine.max_num_seqs == 99


def test_what_is_not_modelled_is_refused_by_name(read: Any) -> None:  # noqa: ANN401
    """All flags at once that may change latencies and are not in the model, with the place."""
    with pytest.raises(InputError, match=r"--cpu-offload-gb, --enforce-eager are not"):
        read(f"{SERVE} --enforce-eager --cpu-offload-gb 4 --no-enforce-eager --enforce-eager")
    _, found = read(
        f"{SERVE} --no-enforce-eager --cpu-offload-gb 0 --host x --disable-log-requests"
    )
    flags = "--host, --disable-log-requests, --enforce-eager, --cpu-offload-gb"
    assert found.notes == (f"without effect on the plan: {flags}",)


def test_bytes_of_the_kv_cache_become_a_share_of_memory(read: Any) -> None:  # noqa: ANN401
    """The share leaves as much; that of a plan's own export stays; more than fits is refused."""
    asked, found = read(f"{SERVE} --gpu-memory-utilization 0.5 --kv-cache-memory-bytes 40G")
    scenario, kv_bytes = asked.scenario, found.kv_bytes
    assert kv_bytes == 40 * 2**30
    shape = LayoutShape(slicing=Slicing(), gpu=asked.gpu.name)
    left = kv_space(asked, shape, sequences=asked.engine_on(asked.gpu.name).max_num_seqs)
    assert left == pytest.approx(kv_bytes, rel=1e-3)
    assert (
        f"engine.gpu_memory_utilization {scenario.engine.gpu_memory_utilization}" in found.notes[-1]
    )
    plan = proposed(Scenario.load(BASE))
    exported, found = read(export(plan, "vllm")["vllm.sh"])
    assert exported.scenario.engine.gpu_memory_utilization == plan.engine.gpu_memory_utilization
    with pytest.raises(InputError, match="what fits beside the weights"):
        read(f"{SERVE} --kv-cache-memory-bytes 80G")


def test_a_record_gives_load_and_gpus(read: Any) -> None:  # noqa: ANN401
    """Users of a closed loop become the rate that was measured: 4 GPUs x 256 / 512."""
    asked, found = read(json.dumps(RECORD), base=None, cluster__max_gpus=16)
    scenario = asked.scenario
    assert found.pools == {"mixed": "1xTP4"}
    assert scenario.workload.requests_per_s == 2.0
    assert (asked.gpu.name, scenario.model.weight_dtype) == ("h200-sxm", "fp8")
    assert "64 users in a closed loop" in found.notes[0]


def test_a_measured_rate_is_taken_in_place_of_a_scenarios_users(read: Any, tmp_path: Path) -> None:  # noqa: ANN401
    base = tmp_path / "users.toml"
    asked = Scenario.load(BASE, {"workload.users": 90, "workload.think_s": 3.0})
    base.write_text(asked.to_toml())
    load = read(json.dumps(RECORD), base=str(base))[0].scenario.workload
    assert (load.users, load.think_s, load.requests_per_s) == (None, 0, 2.0)
    load = read("vllm serve meta-llama/Llama-3.1-8B-Instruct", base=str(base))[0].scenario
    assert load.workload.users == 90


def test_a_split_record_counts_its_workers(read: Any) -> None:  # noqa: ANN401
    """Workers of each role, with attention spread over the GPUs of one where it says so."""
    split = RECORD | {
        "disagg": True, "model": "deepseek-ai/DeepSeek-R1", "framework": "dynamo-sglang",
        "prefill_tp": 4, "prefill_ep": 4, "prefill_dp_attention": "true", "prefill_num_workers": 2,
        "decode_tp": 8, "decode_ep": 1, "decode_dp_attention": "false", "decode_num_workers": 1,
    }  # fmt: skip
    asked, found = read(json.dumps([split]), base=None, cluster__max_gpus=64)
    assert found.pools == {"prefill": "2xTP1xDP4xEP4", "decode": "1xTP8"}
    assert asked.scenario.workload.requests_per_s == 16 * 256 / 512
    assert "predicted as vLLM" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "it has to be a command `vllm serve …`"),
        ("{}", "framework is missing; it has to be a field of an InferenceX record"),
        (f"{SERVE} -tp two", "--tensor-parallel-size is 'two'; it has to be a number"),
        ("vllm serve --port 1", "it has to be a model, as its first argument or as --model"),
        (f"{SERVE} 'open", "it has to be a shell command"),
        (f"{SERVE} --quantization awq", "--quantization is 'awq'; it has to be fp8, or none"),
        (f"{SERVE}\nvllm serve other/model", "it has to be a file with one model"),
        (f"{SERVE} -tp 2\n{SERVE} -tp 4", "kv_role"),
        (f"{SERVE} --kv-cache-dtype fp8\n{SERVE} --kv-cache-dtype auto", "one in all engines"),
        (
            f"{SERVE} --kv-cache-dtype auto_x",
            "--kv-cache-dtype is 'auto_x'; it has to be one of auto",
        ),
        ("kind: DynamoGraphDeployment\nspec: 3\n", "it has to be spec.services with a worker"),
        ("[" * 50_000, "it has to be a command `vllm serve …`"),
        (
            json.dumps(RECORD | {"precision": "int4"}),
            "precision is 'int4'; it has to be one of fp8",
        ),
        (
            json.dumps(RECORD | {"spec_decoding": "mtp"}),
            "spec_decoding is 'mtp'; it has to be none",
        ),
        (json.dumps(RECORD | {"osl": 0}), "osl is 0; it has to be a whole number from 1"),
        (json.dumps(RECORD | {"tp": [4]}), "tp is [4]; it has to be a whole number from 1"),
        (json.dumps(RECORD | {"precision": ["fp8"], "isl": "x"}), "workload.input_tokens is 'x'"),
        (
            json.dumps(RECORD | {"disagg": True}),
            "prefill_num_workers is missing; it has to be a whole",
        ),
        (graph(replicas="two"), "spec.services.W: replicas is 'two'; it has to be a whole number"),
        (graph(extraPodSpec=3), "spec.services.W: extraPodSpec is"),
        (
            graph(subComponentType=["x"]),
            "subComponentType is no text; it has to be prefill or decode",
        ),
        (
            "kind: DynamoGraphDeployment\n"
            + json.dumps({"spec": {"services": {"W": {"componentType": "worker"}}}})[1:-1],
            "spec.services.W is missing; it has to be a worker of dynamo.vllm",
        ),
    ],
)
def test_bad_files_are_refused(read: Any, text: str, message: str) -> None:  # noqa: ANN401
    """The message names the place, the value and what was expected."""
    with pytest.raises(InputError) as refused:
        read(text)
    assert message in str(refused.value)


def test_what_is_missing_is_asked_for(read: Any) -> None:  # noqa: ANN401
    """A command line says nothing of load and GPUs: they are not made up."""
    with pytest.raises(InputError, match="--scenario NAME gives load, SLO and GPUs"):
        read(SERVE, base=None)


def test_the_command_says_what_to_do_next(sizing: Sizing, tmp_path: Path) -> None:
    """It writes the scenario, which `sizing predict` takes with the pools that it prints."""
    script, scenario = tmp_path / "run.sh", tmp_path / "now.toml"
    script.write_text(f"{SERVE} -tp 1\n" * 3)
    said = sizing("read", str(script), "--scenario", BASE, "-o", str(scenario))
    assert f"sizing predict {scenario} --mixed 3xTP1" in said.err
    said = sizing("predict", str(scenario), "--mixed", "3xTP1", "--json")
    assert said.code == 0

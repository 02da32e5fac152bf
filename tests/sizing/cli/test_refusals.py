"""What no command can use: one line on stderr that says why, nothing on stdout, exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sizing.conftest import QUICK, Sizing

SCENARIO = QUICK[0]
LARGE = "llama-3.1-70b-h100"
DEEP = "[" * 100_000
OPTIONS: dict[tuple[str, ...], list[tuple[str, str]]] = {
    (): [
        ("modles", "No such command"),
        ("models --jsno", "No such option"),
        ("init nope", "one of chat-and-summaries-8b, deepseek-v3-h200"),
        ("losses nowhere.json", "nowhere.json"),
        ("train gpt-3-175", "did you mean gpt-3-175b?"),
        (f"train {'x' * 300}", "a TOML file or a shipped training scenario"),
        ("decisions nowhere", "a TOML file or a shipped scenario"),
        ("capacity llama-3.1-8b-h100 --gpus 0", "whole numbers above 0"),
        ("capacity llama-3.1-8b-h100 --gpus 64..8", "8..64"),
        ("capacity llama-3.1-8b-h100 --gpus 8 --think-seconds -1", "seconds, 0 or more"),
        ("capacity llama-3.1-8b-h100 --gpus 1000000", "131,072"),
        ("day llama-3.1-8b-h100 --profile sine-day", "--cold-start-seconds"),
        ("day llama-3.1-8b-h100 --profile sin-day --cold-start-seconds 9", "sine-day?"),
        (
            "day llama-3.1-8b-h100 --profile no.csv --cold-start-seconds 9",
            "no.csv does not exist; it has to be a CSV",
        ),
        *(
            (f"day llama-3.1-8b-h100 --profile sine-day --cold-start-seconds {options}", says)
            for options, says in (
                ("-1", "--cold-start-seconds is -1.0"),
                ("9 --interval-seconds 7000", "seconds that divide a day"),
                ("9 --interval-seconds 0", "seconds that divide a day"),
                ("9 --forecast-error 1", "--forecast-error is 1.0"),
                ("9 --attainment 0", "--attainment is 0.0"),
                ("9 --margin -1", "--margin is -1.0"),
                ("9 --hold-seconds nan", "--hold-seconds is nan"),
            )
        ),
        ("split-map llama-3.1-8b-h100 --x workload.requests_per_s", "key=value,value"),
        ("split-map llama-3.1-8b-h100 --x prompt_answer_ratio=no", "a number above 0"),
        ("split-map llama-3.1-8b-h100 --x nowhere.key=1,2", "no such key"),
        (
            "split-map llama-3.1-8b-h100 --x slo.ttft_s=1 --y slo.ttft_s=2",
            "another key than that of --x",
        ),
        ("calibrate -o x.json", "SCENARIO is missing"),
        ("calibrate laptop --from x -o x.json", "no SCENARIO"),
        (
            "calibrate laptop --hold-out x -o x.json",
            "--hold-out is set, but there is no such option without --from",
        ),
        (
            "calibrate laptop --keep -o x.json",
            "--keep is set, but there is no such option without --engine",
        ),
    ],
    ("plan", *QUICK): [
        ("--set search.confidence_fraction=1", "from 0.5 to 0.99"),
        ("--set search.layouts=[]", "search.layouts"),
        ("--set search.tp=[3]", "attention heads"),
        (f"--set workload.input_tokens={DEEP}", "workload.input_tokens"),
        ("--set slo.ttft=1", f"{SCENARIO} with --set search.pools=split"),
        ("--html no/plan.html", "an existing folder"),
    ],
    ("predict", LARGE): [
        ("--prefill 2x4 --decode 1xTP4", "2xTP4"),
        ("--prefill 1xTP8", "--prefill and --decode, or --mixed alone"),
        ("--mixed 1xTP8 --decode 1xTP8", "--prefill and --decode, or --mixed alone"),
        ("--prefill 1xTP1 --decode 1xTP8", "GB of weights"),
        ("--mixed 1xTP8@l4", "one of search.gpus: h100-sxm"),
    ],
    ("predict", "deepseek-v3-h200"): [
        ("--mixed 1xTP3", "--mixed is 'TP3'; it has to be TP 2 or 4: the number of attention"),
        ("--mixed 1xTP8xEP7", "--mixed: ep is 7; it has to be a divisor of tp x dp = 8"),
        ("--mixed 1xTP8xEP4", "--mixed is 'TP8xEP4'; it has to be ep 1, or 8: vLLM divides"),
        ("--mixed 1xTP8xDP3xEP24", "an ep that divides the model's 256 experts"),
        ("--mixed 1xTP1xDP3", "it has to be tp x dp 2 or 4: an expert's width 2,048"),
        ("--mixed 1xTP1xDP256xEP256", "it has to be at most cluster.max_gpus = 128 GPUs"),
        ("--prefill 1xTP8xPP2 --decode 1xTP8", "--prefill, --decode is 'prefill TP8xPP2"),
        ("--mixed 1xTP8xPP62 --set search.layouts=any", "at most 61 stages"),
        ("--mixed 1xTP8 --set engine.speculative_tokens=40", "a number from 0 to 32"),
        ("--mixed 1xTP8 --set engine.speculative_tokens=1", "mean_accepted_tokens is missing"),
        (
            "--mixed 1xTP1xDP8xEP8 --set engine.all_to_all=pplx",
            "engine.all_to_all is 'pplx'; it has to be a library that vllm 0.29.0 sends tokens",
        ),
        (
            "--mixed 1xTP1xDP8xEP8 --set engine.two_batch_overlap=true",
            "but there is no such key without engine.all_to_all, one of deepep",
        ),
        (
            "--mixed 1xTP1xDP8xEP8 --set engine.all_to_all=deepep",
            "it has to be --prefill and --decode: deepep has other kernels for each phase",
        ),
        (
            (
                "--prefill 1xTP8 --decode 1xTP1xDP8xEP8 --set engine.all_to_all=deepep"
                " --set search.local_threshold_tokens=99"
            ),
            "it has to be pools of their own for prefill and decode",
        ),
        (
            (
                "--prefill 1xTP8 --decode 1xTP8 --set engine.all_to_all=deepep"
                " --set cluster.preset=mi300x-8"
            ),
            "no such key on mi300x: it runs on h100-sxm, h200-sxm",
        ),
        ("--mixed 1xTP8xEP8 --set engine.redundant_experts=4", "256 experts and their 4 copies"),
        ("--mixed 1xTP8 --set engine.redundant_experts=-1", "a number from 0 to 4,096"),
        (
            (
                "--mixed 1xTP1 --set engine.redundant_experts=8 --set cluster.preset=laptop"
                " --set cluster.max_gpus=2"
            ),
            "no such key: vllm balances no experts on a CPU",
        ),
    ],
    ("predict", "llama-3.1-8b-h100"): [
        ("--mixed 1xTP1xDP2xEP2", "dp 1 and ep 1: the model has no experts (more replicas"),
        ("--mixed 1xTP1 --set engine.redundant_experts=0", "llama-3.1-8b has no experts"),
        ("--mixed 1xTP1 --set engine.all_to_all=deepep", "llama-3.1-8b has no experts"),
    ],
    ("simulate", "PLAN"): [
        ("--requests 0", "--requests is 0"),
        ("--requests 99999999", "at most 10,000,000"),
        ("--rate -1", "--rate is -1"),
        ("--seed -1", "--seed is -1"),
        ("--arrivals bursty", "one of poisson, gamma, constant"),
        ("--turns 9999 --requests 9999", "engine.max_model_len"),
        ("--trace /none --users 5", "no options about arrivals besides it"),
        ("--trace /none --set workload.requests_per_s=1", "no --set workload.… besides it"),
        ("--time-unit s", "--trace is missing"),
        (
            "--trace /none --time-unit min",
            "--time-unit is 'min'; it has to be one of s, ms, us, ns",
        ),
        ("-o /none/x.csv --requests 10", "an existing folder"),
        ("--set cluster.max_gpus=3", "plan again"),
        ("--set workload.input_tokens=100000", "engine.max_model_len"),
    ],
    ("place",): [
        ("", "a plan, or --tp"),
        ("--tp 8", "--cluster is missing"),
        ("--tp 8 --cluster dgx-h100 -o x.json", "a plan to write the placement into"),
        ("--tp 8 --cluster dgx-h100 --spare-nodes -1", "--spare-nodes is -1"),
        ("--tp 8 --cluster dgx-h100 --replica-within room", "one of hb, rack, unit"),
    ],
    ("place", "PLAN"): [
        ("--tp 8", "a plan, or --tp"),
        ("--cluster dgx-h100 -o x.json", "no such option beside --out"),
        ("--cluster dgx-h100 --emit ranks", "a training job"),
        ("--cluster dgx-h100 --spread rack", "a tier and a number"),
    ],
    ("compare", SCENARIO): [
        ("", "two scenarios, or several GPUs"),
        ("llama-3.1-70b-h10", "did you mean llama-3.1-70b-h100?"),
        ("--gpu h100,h20x", "did you mean"),
        ("--gpu h100,h200 --by usd", "no default price"),
        ("--gpu h100,h200 --by gold", "gpus, usd, watts"),
        ("--gpu h100,h200 --price h100", "GPU=USD"),
        ("--gpu h100,h200 --price h100=-1", "GPU=USD"),
        ("--gpu h100,h200 --calibration x.json", "it timed one engine on one machine"),
    ],
    ("sweep", SCENARIO): [
        ("", "at least one"),
        ("--key slo.ttft_s=", "key=value"),
        ("--key slo.ttft=1,2", "no such key"),
        ("--key slo.ttft_s=1 --key slo.ttft_s=2", "each key once"),
    ],
    ("pareto", SCENARIO): [("--by usd", "--set cluster.price_usd_per_gpu_hour=PRICE")],
    ("long-context",): [
        ("--tokens 200000", "assumed_context_tokens=N"),
        ("--tokens 0", "it has to be 1 to"),
        ("--slicing PP2", "TP8xPP2"),
        ("--slicing TP8xPP81", "at most 80 stages"),
        ("--preset tlak", "did you mean talk?"),
        ("--set cluster.gpu=h100-sxn", "did you mean h100-sxm?"),
        ("--set model.assumed_context_tokens=4096", "more than 4096"),
    ],
    ("fabric",): [
        ("bom --gpus 16384 --radix 8", "8 ports reach 128 (42 ports would do)"),
        ("bom --gpus 64 --radix 1", "2 ports or more"),
        ("bom --gpus 100", "whole HB domains"),
        ("bom --gpus 0", "positive"),
        ("bom --gpus 64 --kind ring", "one of clos"),
        ("bom --gpus 64 --price-ratio 0", "--price-ratio"),
        ("bom", "how many endpoints"),
        ("bom --preset h100-8", "switches tier by tier"),
        ("bom --preset nosuch", "a cluster preset"),
        ("collective --bytes -1", "--bytes"),
        ("collective --sending-fraction 2", "--sending-fraction"),
        ("collective --pattern ring", "one of all-reduce"),
        ("collective --library nosuch", "one of custom"),
        ("ecmp --uplinks 0", "--uplinks"),
        ("rail-only --set hb_sizes=[0]", "hb_sizes"),
        ("rail-only --set flops_per_s=-1.0", "flops_per_s"),
        ("rail-only --set nosuch=1", "nosuch"),
        ("rail-only --set gpus=[16384]=2", "gpus"),
    ],
    ("export", "PLAN"): [
        ("--to nim", "--to is 'nim'; it has to be one of vllm, sglang"),
        ("--to dynamo", "--image is missing; it has to be the container image that dynamo starts"),
        ("--to vllm -o /dev/null", "--out /dev/null is a file; it has to be a writable folder"),
    ],
    ("accept", "PLAN"): [
        ("-o /dev/null", "--out /dev/null is a file; it has to be a writable folder")
    ],
    ("plan", "llama-3.1-8b-h100"): [
        ("--set engine.max_lora_rank=0", "engine.max_lora_rank"),
        ("--set engine.max_loras=4", "workload.lora_adapters"),
        ("--set workload.lora_adapters=4", "engine.max_loras"),
        ("--set engine.max_cpu_loras=4", "engine.max_loras and workload.lora_adapters"),
        ("--set workload.lora_popularity_exponent=1", "engine.max_loras and workload"),
        ("--set workload.lora_popularity_exponent=-1", "workload.lora_popularity_exponent"),
        ("--set engine.kv_offload_host_bytes=-1", "kv_offload_host_bytes"),
        ("--set engine.kv_offload_disk_bytes=1e12", "kv_offload_disk_bytes"),
    ],
    ("plan", "llama-3.1-8b-h100", "--set", "workload.lora_adapters=8"): [
        ("--set engine.max_loras=2 --set engine.max_cpu_loras=4", "8 or more"),
        ("--set engine.max_loras=0", "from 1 to 1,000"),
        ("--set engine.max_loras=2 --set engine.max_lora_rank=12", "one of 1, 8, 16"),
        ('--set engine.max_loras=2 --set engine.lora_target_modules=["lm_head"]', "one of qkv"),
        ("--set engine.max_loras=2 --set cluster.gpu=mi300x", "configs/host_links.toml"),
        ("--set engine.max_loras=2 --set model.id=mixtral-8x7b", "adapters of experts"),
        ("--set engine.max_loras=2 --set model.id=deepseek-v3", "latent attention"),
        ("--set engine.max_loras=2 --set engine.name=sglang", "engine"),
    ],
    ("plan", "llama-3.1-8b-h100", "--set", "engine.kv_offload_host_bytes=2e11"): [
        ("--set engine.kv_offload_disk_bytes=1e12", "kv_offload_disk_bytes_per_s"),
        ("--set engine.kv_offload_disk_path=/x", "no such key without a disk"),
        ("--set engine.kv_offload_disk_bytes=1e11", "more than engine.kv_offload_host_bytes"),
        ("--set cluster.gpu=mi300x", "configs/host_links.toml"),
    ],
}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("plan llama-3.1-8b-h100 --set slo.ttft=1", "did you mean slo.ttft_s?"),
        ("plan llama-3.1-8b-h100 --set requests_per_s=1", "did you mean workload.requests_per_s?"),
        ("plan llama-3.1-8b-h100 --set workload.tpot_s=1", "did you mean slo.tpot_s?"),
        ("plan llama-3.1-8b-h100 --set cluster.preset=rtx-4090", "rtx-4090 is a GPU: cluster.gpu"),
        ("plan llama-3.1-8b-h100 --set cluster.gpu=h100-8", "h100-8 is a preset: cluster.preset"),
        ("plan llama-3.1-8b-h100 --set cluster.gpu=rtx-3090", "rtx-4090? known: a100-pcie"),
        ("plan llama-3.1-8b-h100 --set model.id=google/gemma-3-27b-it", "curl -fL"),
        ("plan llama-3.1-8b-h100 --set model.id=no/config.json", "which does not exist; it has"),
        ("plan nothing.toml", "nothing.toml does not exist; it has to be a readable TOML file"),
        ("fit llama-3.1-8b --gpu cpu", "--gpu is 'cpu'; it has to be a GPU"),
        ("export", "(`sizing export -h` shows how)"),
    ],
)
def test_what_was_meant_is_said(sizing: Sizing, command: str, says: str) -> None:
    """A slip is answered by the name, the key or the command that gets on; also as JSON."""
    assert says in refused(sizing, *command.split())
    done = sizing(*command.split(), *([] if command == "export" else ["--json"]))
    if command != "export":
        error = json.loads(done.out)["error"]
        assert (error["exit_code"], says in error["message"]) == (2, True)


def refused(sizing: Sizing, *arguments: str) -> str:
    """Run a command that cannot be run; return the line that it says."""
    done = sizing(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("sizing: ")
    assert done.err.count("\n") == 1
    return done.err


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [(command, *each) for command, rows in OPTIONS.items() for each in rows],
    ids=lambda each: str(each)[:60],
)
def test_options_that_cannot_be(
    sizing: Sizing, plan_of: Callable[..., Path], command: tuple[str, ...], options: str, says: str
) -> None:
    """The line has what is expected, before anything is planned."""
    plan = str(plan_of(*QUICK)) if "PLAN" in command else ""
    known = [plan if each == "PLAN" else each for each in command]
    assert says in refused(sizing, *known, *options.split())


@pytest.mark.parametrize(
    ("name", "content", "arguments"),
    [
        ("deep.toml", f"a={DEEP}".encode(), ("plan", "FILE")),
        ("[b]nul.toml", bytes(100), ("plan", "FILE")),
        ("utf-16.toml", "[model]\nid = 'x'".encode("utf-16"), ("plan", "FILE")),
        ("snowman.toml", "[model]\nid = '☃'".encode(), ("plan", "FILE")),
        ("deep.json", DEEP.encode(), ("losses", "FILE")),
        ("deep.json", DEEP.encode(), ("plan", SCENARIO, "--calibration", "FILE")),
        ("bytes.json", bytes(range(256)), ("simulate", "FILE")),
    ],
)
def test_files_that_are_none(
    sizing: Sizing, name: str, content: bytes, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """The line names the file."""
    path = tmp_path / name
    path.write_bytes(content)
    said = refused(sizing, *(str(path) if each == "FILE" else each for each in arguments))
    assert said.startswith(f"sizing: {path}")

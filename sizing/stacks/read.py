"""`sizing read`: what runs in another stack as a scenario and pools."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from minicluster.config import Overrides, read_toml
from minicluster.errors import InputError
from minicluster.files import read_text
from minicluster.plan.vllm_args import DTYPES, KV_ROLES
from minicluster.specs.slicing import Slicing
from sizing.catalog.cluster import clusters
from sizing.catalog.folder import find_file
from sizing.catalog.scenario import scenario_from
from sizing.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
         "-dp": "--data-parallel-size", "-q": "--quantization"}  # fmt: skip
"""Short flags of vLLM."""

SETTINGS = {
    "max_model_len": "model.max_context_tokens",
    "block_size": "engine.block_size",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "long_prefill_token_threshold": "engine.chunked_prefill_tokens",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
}
"""Scenario keys of vLLM's flags that are one number in both."""

WITHOUT_EFFECT = {
    "served_model_name", "host", "port", "api_key", "trust_remote_code", "dtype", "seed",
    "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "master_addr",
    "nnodes", "node_rank", "headless", "data_parallel_start_rank", "uvicorn_log_level",
    "tokenizer", "download_dir", "load_format", "disable_log_requests", "kv_cache_memory_bytes",
}  # fmt: skip
"""Flags that no prediction depends on, or that follow from others."""

DEEPEP = ("deepep_low_latency", "deepep_high_throughput")
"""vLLM's ways of tokens to their experts that are one library; in one pool neither is predicted."""

LORA_FLAGS = ("max_loras", "max_lora_rank", "max_cpu_loras")
SEVERAL = {"lora_target_modules", "lora_modules"}
"""Flags with several values."""

FILES = "a command `vllm serve …`, a DynamoGraphDeployment of vLLM, or an InferenceX record"
"""Files that can be read, as errors name them."""

RUNS = ("vllm serve ", "vllm.entrypoints.openai.api_server ")
"""Begins of a command line of vLLM's server, after the interpreter."""

REPLICAS = re.compile(r"(\d+) replicas?\b")
"""Words of a comment above a command that say how often it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEngine:
    """
    One kind of engine that a file starts.

    Attributes:
        role: `prefill`, `decode` or `mixed`.
        keys: scenario keys that its arguments set.
        unread: its arguments that nothing here depends on knowingly.
    """

    role: str
    model: str
    slicing: Slicing
    keys: dict[str, Any]
    unread: tuple[str, ...]
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """
    What a file says of a deployment.

    Attributes:
        keys: scenario keys that it gives.
        pools: `RxTPn` by role, as `sizing predict` takes them.
        notes: what was left out or assumed, a sentence each.
    """

    keys: dict[str, Any]
    pools: dict[str, str]
    notes: tuple[str, ...] = ()


def read_deployment_file(
    path: Path, overrides: Overrides = (), *, base: str | None = None
) -> tuple[Scenario, Deployed]:
    """
    Return a file's deployment, as `read_deployed` reads it, and the scenario that it serves.

    Args:
        overrides: scenario keys that the file does not say, such as the load.
        base: scenario that gives what neither says; `None`: nothing.

    Raises:
        InputError: as `read_deployed`, or a key that neither the file nor *overrides* nor *base*
            gives.
    """
    found = read_deployed(path)
    raw: dict[str, Any] = {}
    if base is not None:
        expectation = "a TOML file or a shipped scenario"
        raw = read_toml(find_file("scenarios", base, place="--scenario", expectation=expectation))
        raw.pop("model", None)
    if "workload.requests_per_s" in found.keys:  # measured: in place of the base's users
        for key in ("users", "think_s"):
            raw.get("workload", {}).pop(key, None)
    for key, value in found.keys.items():
        table, _, name = key.partition(".")
        raw.setdefault(table, {})[name] = value
    try:
        scenario = Scenario.of(scenario_from(raw, overrides, place=str(path)), str(path), None)
    except InputError as error:
        if error.value is None and error.way_out is None:
            way_out = (
                "--scenario NAME gives load, SLO and GPUs; --set KEY=VALUE one key (`sizing schema`"
                " lists them)"
            )
            raise InputError(error.place, None, error.expectation, way_out) from None
        raise
    return scenario, found


def read_deployed(path: Path) -> Deployed:
    """
    Read a script of `vllm serve`, a DynamoGraphDeployment of vLLM, or a record of InferenceX.

    Raises:
        InputError: a file of none of these kinds, or contradictory engines.
    """
    text = read_text(path, FILES)
    record = _record(text)
    if record is not None:
        return _inferencex(record, str(path))
    return _together(_engines(text, str(path)), str(path))


def _record(text: str) -> dict[str, Any] | None:
    """Return an InferenceX record, the first of a list of one; `None`: it is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, dict) else None


def _engines(text: str, place: str) -> list[ReadEngine]:
    dynamo = re.search(r"^kind:\s*DynamoGraphDeployment\s*$", text, re.MULTILINE)
    found = _dynamo(text, place) if dynamo else _script(text, place)
    if not found:
        raise InputError(place, "neither", FILES)
    return found


def _script(text: str, place: str) -> list[ReadEngine]:
    """Read the commands of a shell script; other nodes of a replica say nothing new."""
    found, replicas = [], 1
    for line in re.sub(r"\\\n", " ", text).splitlines():
        said = REPLICAS.search(line) if line.lstrip().startswith("#") else None
        replicas = int(said[1]) if said else replicas
        begin = next((line.find(each) + len(each) for each in RUNS if each in line), None)
        if begin is None or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line[begin:], comments=True)
        except ValueError as error:
            raise InputError(
                f"{place}: {line.strip()[:60]}", str(error), "a shell command"
            ) from None
        if "--headless" in words:
            continue
        found.append(read_vllm(words, place, replicas=replicas))
        replicas = 1
    return found


def _dynamo(text: str, place: str) -> list[ReadEngine]:
    try:
        services = yaml.safe_load(text)["spec"]["services"]
        workers = {
            name: each for name, each in services.items() if each.get("componentType") == "worker"
        }
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise InputError(place, repr(error), "spec.services with a worker") from None
    found = []
    for name, worker in workers.items():
        where = f"{place}: spec.services.{name}"
        try:
            ran = worker.get("extraPodSpec", {}).get("mainContainer", {})
            words = [str(each) for each in (*ran.get("command", ()), *ran.get("args", ()))]
        except (AttributeError, TypeError) as error:
            expected = "a mainContainer with lists of command and args"
            raise InputError(f"{where}: extraPodSpec", str(error), expected) from None
        if "dynamo.vllm" not in words:
            raise InputError(where, " ".join(words[:3]) or None, "a worker of dynamo.vllm")
        own = words[words.index("dynamo.vllm") + 1 :]
        flag = next((f"{role}" for role in KV_ROLES if f"--is-{role}-worker" in own), None)
        role = str(worker.get("subComponentType") or flag or "mixed")
        own = [each for each in own if not re.fullmatch(r"--is-(prefill|decode)-worker", each)]
        replicas = _count(worker.get("replicas", 1), f"{where}: replicas")
        found.append(read_vllm(own, where, replicas=replicas, role=role))
    return found


def read_vllm(
    words: Sequence[str], place: str, *, replicas: int = 1, role: str | None = None
) -> ReadEngine:
    """
    Read the arguments of `vllm serve`.

    Args:
        words: after `vllm serve`.
        replicas: engines that are started so.
        role: in a split deployment; `None`: as the KV transfer says.

    Raises:
        InputError: no model, a value of another kind, or weights in a format that is not known.
    """
    arguments = _arguments(words, place)
    model = arguments.pop("model", None)
    if not isinstance(model, str):
        raise InputError(place, "vllm serve", "a model, as its first argument or as --model")
    slicing = _slicing(arguments, place)
    keys: dict[str, Any] = {}
    for name, key in SETTINGS.items():
        if name in arguments:
            keys[key] = _number(arguments.pop(name), f"{place}: --{name.replace('_', '-')}")
    keys |= _dtypes(arguments, place)
    keys |= _drafts(arguments, place)
    keys |= _lora(arguments, place)
    copies = _table(arguments, "eplb_config", place).get("num_redundant_experts", 0)
    if arguments.pop("enable_eplb", False):
        keys["engine.redundant_experts"] = copies
    transfer = _table(arguments, "kv_transfer_config", place)
    roles = {kv: role for role, kv in KV_ROLES.items()}
    found = role or roles.get(str(transfer.get("kv_role", "")), "mixed")
    backend = str(arguments.get("all2all_backend", ""))
    if found != "mixed" and backend in DEEPEP:
        del arguments["all2all_backend"]
        keys["engine.all_to_all"] = "deepep"
        if arguments.pop("enable_dbo", False):
            keys["engine.two_batch_overlap"] = True
    unread = sorted(set(arguments) - WITHOUT_EFFECT)
    return ReadEngine(
        role=found, model=model, slicing=slicing, keys=keys, replicas=replicas,
        unread=tuple(f"--{name.replace('_', '-')}" for name in unread),
    )  # fmt: skip


def _arguments(words: Sequence[str], place: str) -> dict[str, Any]:
    """Return flags by name, with their values; a word before the first flag is the model."""
    found: dict[str, Any] = {}
    rest = list(words)
    if rest and not rest[0].startswith("-"):
        found["model"] = rest.pop(0)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if not flag.startswith("--"):
            if word in {"&", "|", ";", "&&"} or ">" in word:
                break
            raise InputError(place, word, "a flag such as --max-num-seqs")
        name = flag.removeprefix("--").replace("-", "_")
        if equals:
            found[name] = value
        elif rest and not re.match(r"-{1,2}[a-zA-Z]", rest[0]) and rest[0] not in {"&", "|"}:
            found[name] = rest.pop(0)
            while name in SEVERAL and rest and not rest[0].startswith("-"):
                found[name] += f" {rest.pop(0)}"
        else:
            found[name] = True
    return found


def _slicing(arguments: dict[str, Any], place: str) -> Slicing:
    """Return how a replica is sliced: experts are whole on all its GPUs, or sliced as the rest."""
    tp, pp, dp = (
        int(_number(arguments.pop(name, "1"), f"{place}: --{name.replace('_', '-')}"))
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    )
    ep = tp * dp if arguments.pop("enable_expert_parallel", False) else 1
    return Slicing(tp=tp, pp=pp, dp=dp, ep=ep)


def _dtypes(arguments: dict[str, Any], place: str) -> dict[str, str]:
    keys = {}
    quantised = arguments.pop("quantization", None)
    if quantised not in {None, "fp8"}:
        raise InputError(
            f"{place}: --quantization", quantised, "fp8, or none", "model.weight_dtype names others"
        )
    if quantised:
        keys["model.weight_dtype"] = "fp8"
    cached = str(arguments.pop("kv_cache_dtype", "auto"))
    names = {name: ours for ours, name in DTYPES.items()}
    if cached != "auto":
        keys["model.kv_dtype"] = "fp8" if cached.startswith("fp8") else names.get(cached, cached)
    return keys


def _drafts(arguments: dict[str, Any], place: str) -> dict[str, Any]:
    """Return how many tokens are drafted; how many are accepted is nowhere in a command."""
    config = _table(arguments, "speculative_config", place)
    if not config:
        return {}
    method, drafts = config.get("method"), config.get("num_speculative_tokens")
    if method not in {"mtp", "eagle3", "deepseek_mtp"} or not isinstance(drafts, int):
        expected = '"method" mtp or eagle3 with "num_speculative_tokens"'
        raise InputError(f"{place}: --speculative-config", config, expected)
    return {"engine.speculative_tokens": drafts}


def _lora(arguments: dict[str, Any], place: str) -> dict[str, Any]:
    """Return slots for adapters; how many adapters there are is nowhere in a command."""
    given = {name: arguments.pop(name, None) for name in LORA_FLAGS}
    modules = str(arguments.pop("lora_target_modules", "")).split()
    if not arguments.pop("enable_lora", False):
        return {}
    keys: dict[str, Any] = {
        f"engine.{name}": _number(value, f"{place}: --{name.replace('_', '-')}")
        for name, value in ({"max_loras": 1} | {n: v for n, v in given.items() if v}).items()
    }
    return keys | ({"engine.lora_target_modules": modules} if modules else {})


def _table(arguments: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    text = arguments.pop(name, None)
    if text is None:
        return {}
    try:
        found = json.loads(str(text))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{place}: --{name.replace('_', '-')}", text, "a JSON object")
    return found


def _number(text: object, place: str) -> float:
    """Return a number; `8k` and `1.5K` as vLLM takes them."""
    units = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", str(text))
    if not found:
        raise InputError(place, text, "a number")
    value = float(found[1]) * units.get(found[2], 1)
    return int(value) if value.is_integer() else value


def _count(value: object, place: str) -> int:
    """Return a whole number above 0, which may be a text."""
    try:
        found = int(str(value))
    except ValueError:
        found = 0
    if found < 1:
        raise InputError(place, value, "a whole number from 1")
    return found


def _together(engines: Sequence[ReadEngine], place: str) -> Deployed:
    """Return the keys and pools of engines that serve one model; limits are the widest pool's."""
    models = {each.model for each in engines}
    if len(models) > 1:
        raise InputError(place, ", ".join(sorted(models)), "engines of one model", "split the file")
    counts: Counter[tuple[str, Slicing]] = Counter()
    keys: dict[str, Any] = {"model.id": models.pop(), "engine.name": "vllm"}
    for each in engines:
        counts[each.role, each.slicing] += each.replicas
        for key, value in each.keys.items():
            known = keys.get(key, value)
            if known != value and not isinstance(value, int | float):
                raise InputError(f"{place}: {key}", f"{known} and {value}", "one in all engines")
            keys[key] = value if isinstance(value, str) else max(known, value)
    roles = [role for role, _ in counts]
    if sorted(roles) not in (["mixed"], ["decode", "prefill"]):
        raise InputError(
            place,
            ", ".join(f"{role} {slicing}" for role, slicing in counts),
            "engines of one layout, or of one for prefill and one for decode",
            'kv_role "kv_producer" and "kv_consumer" tell the pools of a script apart',
        )
    pools = {role: f"{count}x{slicing}" for (role, slicing), count in counts.items()}
    unread = sorted({flag for each in engines for flag in each.unread})
    notes = (f"not read, and not part of the prediction: {', '.join(unread)}",) if unread else ()
    return Deployed(keys=keys, pools=pools, notes=notes)


def _inferencex(record: Mapping[str, Any], place: str) -> Deployed:
    """
    Return the keys and pools of a record of InferenceX.

    Its closed loop of users becomes the rate that it measured.

    Source:
        utils/process_result.py of InferenceX, which writes these fields.
    """
    missing = {"model", "framework", "isl", "osl"} - record.keys()
    if missing:
        raise InputError(f"{place}: {min(missing)}", None, "a field of an InferenceX record")
    keys: dict[str, Any] = {
        "model.id": record["model"],
        "engine.name": "vllm",
        "workload.input_tokens": record["isl"],
        "workload.output_tokens": record["osl"],
    }
    if str(record.get("precision")) in {"fp8", "fp4", "bf16"}:
        keys["model.weight_dtype"] = record["precision"]
    preset = f"{str(record.get('hw', '')).partition('-')[0]}-8"
    if preset in clusters():
        keys["cluster.preset"] = preset
    pools, gpus = _inferencex_pools(record, place)
    tokens_per_s = record.get("output_tput_per_gpu")
    notes = []
    if str(record["framework"]) not in {"vllm", "dynamo-vllm"}:
        notes.append(f"measured on {record['framework']}; predicted as vLLM, which plans are for")
    if isinstance(tokens_per_s, int | float) and tokens_per_s > 0:
        rate = gpus * float(tokens_per_s) / _count(record["osl"], f"{place}: osl")
        keys["workload.requests_per_s"] = float(f"{rate:.4g}")
        notes.append(
            f"{record.get('conc')} users in a closed loop became the rate that was measured;"
            " InferenceX draws lengths from 0.8 to 1 of the nominal ones"
        )
    return Deployed(keys=keys, pools=pools, notes=tuple(notes))


def _inferencex_pools(record: Mapping[str, Any], place: str) -> tuple[dict[str, str], int]:
    split = str(record.get("disagg", "false")).lower() == "true"
    pools, gpus = {}, 0
    for role in ("prefill", "decode") if split else ("mixed",):
        before = f"{role}_" if split else ""
        tp, ep = (
            _count(record.get(f"{before}{name}") or 1, f"{place}: {before}{name}")
            for name in ("tp", "ep")
        )
        workers = f"{before}num_workers"
        count = _count(record.get(workers), f"{place}: {workers}") if split else 1
        spread = str(record.get(f"{before}dp_attention", "false")).lower() == "true"
        slicing = Slicing(tp=1, dp=tp, ep=max(ep, tp)) if spread else Slicing(tp=tp, ep=ep)
        pools[role] = f"{count}x{slicing}"
        gpus += count * slicing.gpus
    return pools, gpus

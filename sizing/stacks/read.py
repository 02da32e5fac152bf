"""`sizing read`: what runs in another stack as a scenario and pools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from minicluster.config import Overrides, read_toml
from minicluster.errors import InputError
from minicluster.files import read_text
from minicluster.plan.vllm_args import DTYPES, KV_ROLES, OFFLOADING, SCHEDULER_OPTIONS
from minicluster.specs.checks import one_of
from minicluster.specs.slicing import Slicing
from sizing.catalog.cluster import clusters
from sizing.catalog.folder import find_file
from sizing.catalog.scenario import scenario_from
from sizing.planner.layout import LayoutShape, kv_space
from sizing.planner.predict import PoolSize
from sizing.scenario import Scenario
from sizing.stacks.flags import UNKNOWN, arguments, effects, only, table, undecided
from sizing.stacks.launch import Launch, manifest, positive, script

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SETTINGS = {
    "max_model_len": "model.max_context_tokens",
    "block_size": "engine.block_size",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    **{argument: f"engine.{name}" for name, argument in SCHEDULER_OPTIONS.items()},
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
}
"""Scenario keys of vLLM's flags that are one number in both; the last is no key of a scenario."""

OWNERS = {
    "engine.max_num_seqs": "decode", "engine.max_num_batched_tokens": "prefill",
    "engine.chunked_prefill_tokens": "prefill", "workload.prefix_tokens": "prefill",
    "engine.kv_offload_host_bytes": "prefill", "engine.kv_offload_disk_path": "prefill",
    "--kv-cache-memory-bytes": "decode",
}  # fmt: skip
"""Keys on which the prediction of one pool depends: of split pools that one's is taken."""

ROUTED = ("engine.all_to_all", "engine.two_batch_overlap", "engine.redundant_experts")
"""Keys of pools whose ranks share experts."""

SPLIT = (re.compile(r"(?<!chunked.)(?<!partial.)prefill(?!.token)"), re.compile("decod"))
"""Words of a file that tells pools apart, in lower case."""

ROLES = 'write "kv_role" kv_producer for prefill and kv_consumer for decode'

UNSAID = ("mean_accepted_tokens", "version", "kv_offload_disk_bytes", "kv_offload_disk_bytes_per_s")
"""Keys of an engine that no command says; the first goes with drafts."""

DEEPEP = ("deepep_low_latency", "deepep_high_throughput")
"""vLLM's ways of tokens to their experts that are one library; predicted in split pools."""

HALF = {"auto", "bfloat16", "float16", "half"}
"""`--dtype` of two bytes: what is not quantised is as published."""

KV_DTYPES = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"} | {v: k for k, v in DTYPES.items()}
"""Ours of vLLM's `--kv-cache-dtype`."""

FOLLOWS = ("headless", "node_rank", "data_parallel_start_rank", "data_parallel_rank")
"""Arguments of an engine that is a further node, or rank, of a replica."""

DYNAMO_ROLES = ("is_prefill_worker", "is_decode_worker", "disaggregation_mode", "connector")
"""Arguments of Dynamo's workers that are read."""

MODES = {"prefill": "prefill", "decode": "decode", "agg": None, "aggregated": None}
"""Roles by Dynamo's --disaggregation-mode."""

SHARE = "engine.gpu_memory_utilization"
"""Key of the share of memory, which both pools have."""

SAME_SHARE = 1e-3
"""Of a GPU's memory: KV caches that differ by less are what the same share leaves."""

OTHER_ENGINES = re.compile(r"sglang\.launch_server|trtllm-serve|text-generation-launcher|lmdeploy")
"""Commands that start engines which are not vLLM's."""

FILES = "a command `vllm serve …`, a manifest that starts one, or an InferenceX record"
"""Files that can be read, as errors name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEngine:
    """
    One kind of engine that a file starts.

    Attributes:
        role: `prefill`, `decode` or `mixed`.
        keys: scenario keys that its arguments set.
        follows: whether it is a further node, or rank, of a replica.
        unused: its arguments without effect on the plan.
    """

    launch: Launch
    role: str
    model: str
    slicing: Slicing
    keys: dict[str, Any]
    unused: tuple[str, ...]
    follows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """
    What a file says of a deployment.

    Attributes:
        keys: scenario keys that it gives.
        pools: `RxTPn` by role, as `sizing predict` takes them.
        kv_bytes: of the KV cache on a GPU where answers are generated; `None`: not said.
        notes: what was left out or assumed, a sentence each.
    """

    keys: dict[str, Any]
    pools: dict[str, str]
    kv_bytes: int | None = None
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
    raw = {} if base is None else _around(base, found.keys)
    for key, value in found.keys.items():
        of, _, name = key.partition(".")
        raw.setdefault(of, {})[name] = value
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
    return _with_kv_cache(scenario, found)


def _with_kv_cache(scenario: Scenario, found: Deployed) -> tuple[Scenario, Deployed]:
    """Return the scenario with the share of memory that leaves the KV cache that the file says."""
    if found.kv_bytes is None or scenario.gpu.kind == "cpu":
        return scenario, found
    size, engine = list(found.pools.values())[-1], scenario.engine_on(scenario.gpu.name)
    shape = LayoutShape(slicing=PoolSize.parse(size, "pools").slicing, gpu=scenario.gpu.name)
    left = kv_space(scenario, shape, sequences=engine.max_num_seqs)
    more = (found.kv_bytes - left) / scenario.gpu.require("hbm_bytes")
    if abs(more) < SAME_SHARE:
        return scenario, found
    share = round(engine.gpu_memory_utilization + more, 4)
    if not 0 < share <= 1:
        expected = f"what fits beside the weights of {size} on {scenario.gpu.name}"
        raise InputError("--kv-cache-memory-bytes", found.kv_bytes, expected)
    note = f"engine.gpu_memory_utilization {share} is taken: it leaves that KV cache"
    changed = scenario.with_({"engine.gpu_memory_utilization": share})
    return changed, replace(found, notes=(*found.notes, note))


def _around(base: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scenario says of load, SLO and GPUs: the engine is the file's alone."""
    expectation = "a TOML file or a shipped scenario"
    raw = read_toml(find_file("scenarios", base, place="--scenario", expectation=expectation))
    raw.pop("model", None)
    kept = UNSAID if "engine.speculative_tokens" in keys else UNSAID[1:]
    raw["engine"] = {key: value for key, value in raw.get("engine", {}).items() if key in kept}
    load = raw.get("workload", {})
    if "workload.requests_per_s" in keys:  # measured: in place of the base's users
        for key in ("users", "think_s"):
            load.pop(key, None)
    if "workload.prefix_tokens" in keys:  # nothing is cached of any class
        for each in load.get("classes", ()):
            each.pop("prefix_tokens", None)
    return raw


def read_deployed(path: Path) -> Deployed:
    """
    Read a script of `vllm serve`, a manifest of vLLM, or a record of InferenceX.

    Raises:
        InputError: a file of none of these kinds, contradictory engines, or anything that may
            change the plan and is not read.
    """
    text, place, notes = read_text(path, FILES), str(path), list[str]()
    record = _record(text)
    if record is not None and "kind" not in record:
        return _inferencex(record, place)
    begin = next((each for each in text.splitlines() if re.match(r"(?!---)[^#\s]", each)), "")
    if record is not None or re.match(r"[\w.'\"-]+\s*:(\s|$)", begin):  # a key of YAML
        launches = manifest(text, place, notes)
    else:
        launches = script(text, place, notes)
    other = OTHER_ENGINES.search(text)
    if other or not launches:
        raise InputError(place, other[0] if other else "neither", FILES)
    engines = [read_vllm(each) for each in launches]
    told_apart = engines[1:] and all(each.search(text.lower()) for each in SPLIT)
    if told_apart and all(each.role == "mixed" for each in engines):
        shown = "engines that are told apart as prefill and decode, but not by themselves"
        raise InputError(place, shown, "the role of each", ROLES)
    return _together(engines, place, notes)


def _record(text: str) -> dict[str, Any] | None:
    """Return an InferenceX record, the first of a list of one; `None`: it is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return found if isinstance(found, dict) else None


def read_vllm(launch: Launch) -> ReadEngine:
    """
    Read the arguments of an engine: each is read, without effect on the plan, or refused.

    Raises:
        InputError: no model, a value of another kind, or what is not modelled.
    """
    place = launch.place
    given = arguments(launch.words, place, dynamo=launch.dynamo)
    unused = {name: given.pop(name) for name in list(given) if _without_effect(name)}
    for name, value in (given | unused).items():
        if UNKNOWN in str(value) and (name in given or (isinstance(value, list) and value[1:])):
            texts = value if isinstance(value, list) else [str(value)]
            shown = next(text for text in texts if UNKNOWN in text)
            raise undecided(shown, f"{place}: {_flag(name)}", "a value")
    model = given.pop("model", None)
    if not isinstance(model, str):
        raise InputError(place, "vllm serve", "a model, as its first argument or as --model")
    follows = any([given.pop(name, 0) for name in FOLLOWS])  # noqa: C419  (takes all out)
    slicing = _slicing(given, launch)
    if given.get("max_model_len") == -1:
        raise InputError(f"{place}: --max-model-len", "auto", "a number of tokens")
    keys = {key: given.pop(name) for name, key in SETTINGS.items() if name in given}
    keys |= _dtypes(given, place) | _drafts(given, place) | _lora(given)
    if given.pop("enable_prefix_caching", True) is False:
        keys["workload.prefix_tokens"] = 0
    keys |= _balancing(given, f"{place}: --eplb-config")
    role, own = _transfer(given, slicing, _role(given, launch), place)
    keys |= own | _all_to_all(given, role, slicing)
    unused |= {name: given.pop(name) for name in list(given) if _as_predicted(name, given[name])}
    for name, value in given.items():
        names = ", ".join(_flag(each) for each in sorted(given))
        expected = f"no such flag: {names} {'are' if len(given) > 1 else 'is'} not modelled"
        shown = "given" if isinstance(value, bool) else value
        raise InputError(f"{place}: {_flag(name)}", shown, expected, "take it out")
    return ReadEngine(
        launch=launch, role=role, model=model, slicing=slicing, keys=keys,
        unused=tuple(_flag(name) for name in unused), follows=follows,
    )  # fmt: skip


def _without_effect(name: str) -> bool:
    """Say whether no prediction depends on an argument."""
    flag, known = name.replace("_", "-"), effects()
    dynamo = known["dynamo"].keys() - {_flag(each)[2:] for each in DYNAMO_ROLES}
    return any(flag in each for each in (known["without_effect"], known["retired"], dynamo))


def _as_predicted(name: str, value: object) -> bool:
    """Say whether an argument has the value that is predicted without it."""
    flag = name.replace("_", "-")
    default = table().get(flag, {}).get("default", effects()["as_predicted"].get(flag))
    return default is not None and (value == default or value == str(default))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _slicing(given: dict[str, Any], launch: Launch) -> Slicing:
    """Return how a replica is sliced: experts are whole on all its GPUs, or sliced as the rest."""
    tp, pp, dp = (
        positive(given.pop(name, 1), f"{launch.place}: {_flag(name)}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    )
    ep = tp * dp if given.pop("enable_expert_parallel", False) else 1
    slicing = Slicing(tp=tp, pp=pp, dp=dp, ep=ep)
    if launch.gpus not in {None, slicing.gpus}:
        expected = f"the {slicing.gpus} that its engine takes: {slicing}"
        raise InputError(f"{launch.place}: GPUs of a replica", launch.gpus, expected)
    return slicing


def _dtypes(given: dict[str, Any], place: str) -> dict[str, str]:
    keys = {}
    quantised, computed = given.pop("quantization", None), given.pop("dtype", "auto")
    if quantised not in {None, "fp8"}:
        way_out = "model.weight_dtype names others"
        raise InputError(f"{place}: --quantization", quantised, "fp8, or none", way_out)
    if quantised or computed not in HALF:
        keys["model.weight_dtype"] = "fp8" if quantised else "fp32"
    cached = given.pop("kv_cache_dtype", "auto")
    one_of(("auto", *KV_DTYPES), **{f"{place}: --kv-cache-dtype": cached})
    return keys if cached == "auto" else keys | {"model.kv_dtype": KV_DTYPES[cached]}


def _drafts(given: dict[str, Any], place: str) -> dict[str, Any]:
    """Return how many tokens are drafted; how many are accepted is nowhere in a command."""
    config = dict(_mapping(given.pop("speculative_config", {}), f"{place}: --speculative-config"))
    keys = ("method", "model", "num_speculative_tokens")
    for name, key in zip(("spec_method", "spec_model", "spec_tokens"), keys, strict=True):
        config |= {key: given.pop(name)} if name in given else {}
    if not config:
        return {}
    method, drafts = config.get("method"), config.get("num_speculative_tokens")
    known = method in ("mtp", "eagle3", "deepseek_mtp") and set(config) <= {*keys}
    if not known or not isinstance(drafts, int):
        expected = '"method" mtp or eagle3, "num_speculative_tokens" and at most "model"'
        raise InputError(f"{place}: --speculative-config", json.dumps(config), expected)
    return {"engine.speculative_tokens": drafts}


def _balancing(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the copies of experts, where they are balanced."""
    config = _mapping(given.pop("eplb_config", {}), where)
    if not given.pop("enable_eplb", False):
        return {}
    only(config, "eplb_config", where)
    copies = f"{config.get('num_redundant_experts', 0)}"
    if not copies.isdecimal():
        raise InputError(where, copies, '"num_redundant_experts" of 0 or more')
    return {"engine.redundant_experts": int(copies)}


def _lora(given: dict[str, Any]) -> dict[str, Any]:
    """Return slots for adapters, and how many adapters there are where the command names them."""
    names = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules")
    keys = {f"engine.{name}": given.pop(name) for name in names if name in given}
    adapters = given.pop("lora_modules", [])
    if not given.pop("enable_lora", False):
        return {}
    found = {"engine.max_loras": 1} | keys
    return found | ({"workload.lora_adapters": len(adapters)} if adapters else {})


def _role(given: dict[str, Any], launch: Launch) -> str | None:
    """Return the role that a manifest or Dynamo's flags give an engine; `None`: neither does."""
    place, mode = launch.place, given.pop("disaggregation_mode", "agg")
    one_of(MODES, **{f"{place}: --disaggregation-mode": mode})
    connectors = given.pop("connector", [])
    if not set(connectors) <= {"nixl", "none", "null"}:
        raise InputError(f"{place}: --connector", " ".join(connectors), "nixl or none")
    flagged = [role for role in KV_ROLES if given.pop(f"is_{role}_worker", False)]
    said = {each for each in (launch.role, MODES[mode], *flagged) if each is not None}
    if len(said) > 1 or not said <= set(KV_ROLES):
        raise InputError(f"{place}: role", ", ".join(sorted(said)), "one of prefill and decode")
    return said.pop() if said else None


def _transfer(
    given: dict[str, Any], slicing: Slicing, role: str | None, place: str
) -> tuple[str, dict[str, Any]]:
    """
    Return an engine's role, and the keys of its KV offload.

    An engine that hands KV caches on both ways (`kv_both`) has a role only if something else says.
    """
    where, keys = f"{place}: --kv-transfer-config", dict[str, Any]()
    for part in _connectors(given, where):
        on_gpu = part.get("kv_buffer_device", "cuda") == "cuda"
        only(part, "kv_transfer_config", where)
        connector, kv_role = part.get("kv_connector"), part.get("kv_role")
        if connector == OFFLOADING:
            keys |= _offload(_mapping(part.get("kv_connector_extra_config"), where), slicing, where)
            continue
        if connector not in (None, "NixlConnector") or not on_gpu:
            way_out = "KV pulls of NIXL between GPUs are what is predicted"
            shown = f"{connector}" if on_gpu else 'kv_buffer_device "cpu"'
            raise InputError(where, shown, f"NixlConnector or {OFFLOADING}", way_out)
        only(_mapping(part.get("kv_connector_extra_config"), where), "nixl", where)
        said = {kv: name for name, kv in KV_ROLES.items()}.get(f"{kv_role}", role)
        if said is None or role not in {None, said}:
            raise InputError(f"{where}: kv_role", kv_role, "the role of an engine", ROLES)
        role = said
    if keys and role == "decode":
        expected = "no KV offload in a decode pool, where no prompt is looked up"
        raise InputError(where, OFFLOADING, expected)
    return role or "mixed", keys


def _connectors(given: dict[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Return the settings of each KV connector; --kv-offloading-size (GiB) stands for one."""
    config, size = given.pop("kv_transfer_config", {}), given.pop("kv_offloading_size", None)
    config = _mapping(config, where)
    if size is not None:
        if config:
            raise InputError(where, "beside --kv-offloading-size", "one of the two")
        extra = {"cpu_bytes_to_use": size * 2**30}
        return [{"kv_connector": OFFLOADING, "kv_connector_extra_config": extra}]
    if config.get("kv_connector") != "MultiConnector":
        return [config] if config else []
    only(config, "kv_transfer_config", where)
    inner = _mapping(config.get("kv_connector_extra_config"), where).get("connectors")
    if not isinstance(inner, list) or not inner:
        raise InputError(where, "MultiConnector", 'a list of "connectors"')
    return [_mapping(each, where) for each in inner]


def _offload(extra: Mapping[str, Any], slicing: Slicing, where: str) -> dict[str, Any]:
    """Return host memory per GPU of the connector's bytes, which are those of one copy's GPUs."""
    only(extra, "offloading", where)
    size, tiers = extra.get("cpu_bytes_to_use"), extra.get("secondary_tiers") or []
    tiers = [_mapping(each, where) for each in tiers] if isinstance(tiers, list) else [{}, {}]
    named = extra.get("spec_name", "CPUOffloadingSpec")
    fits = named == ("TieringOffloadingSpec" if tiers else "CPUOffloadingSpec")
    folders = [each.get("root_dir") for each in tiers if each.get("type") == "fs"]
    if not isinstance(size, int | float) or not fits or len(folders) != len(tiers) or tiers[1:]:
        expected = '"cpu_bytes_to_use", and at most one tier behind it, of "type" fs'
        raise InputError(where, json.dumps(extra), expected)
    keys = {"engine.kv_offload_host_bytes": size / (slicing.tp * slicing.pp)}
    return keys | ({"engine.kv_offload_disk_path": folders[0]} if folders else {})


def _all_to_all(given: dict[str, Any], role: str, slicing: Slicing) -> dict[str, Any]:
    """Return how tokens reach their experts, where ranks send them."""
    if role == "mixed" or given.get("all2all_backend") not in DEEPEP:
        if not slicing.routes_tokens:
            given.pop("all2all_backend", None)
        return {}
    del given["all2all_backend"]
    halves = given.pop("enable_dbo", False)
    return {"engine.all_to_all": "deepep"} | ({"engine.two_batch_overlap": True} if halves else {})


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise InputError(where, json.dumps(value), "a JSON object")
    return value or {}


def _together(engines: Sequence[ReadEngine], place: str, notes: list[str]) -> Deployed:
    """Return the keys and pools of engines that serve one model; each role has one kind of them."""
    models = {each.model for each in engines}
    if len(models) > 1:
        raise InputError(place, ", ".join(sorted(models)), "engines of one model", "split the file")
    heads = [each for each in engines if not each.follows]
    kinds = {(each.role, each.slicing) for each in heads}
    for each in engines:
        if (each.role, each.slicing) not in kinds:
            expected = "the first node of its replica beside it, in the same layout"
            raise InputError(each.launch.place, "a further node", expected)
    layouts = dict(sorted(kinds, key=itemgetter(0), reverse=True))
    if len(layouts) < len(kinds) or list(layouts) not in (["mixed"], ["prefill", "decode"]):
        shown = ", ".join(dict.fromkeys(f"{each.role} {each.slicing}" for each in heads))
        expected = "engines of one layout, or of one for prefill and one for decode"
        raise InputError(place, shown, expected, ROLES)
    by_role = {role: [each for each in engines if each.role == role] for role in layouts}
    keys: dict[str, Any] = {"model.id": models.pop(), "engine.name": "vllm"}
    keys |= _merged({role: _equal(each) for role, each in by_role.items()}, layouts, place, notes)
    unused = dict.fromkeys(flag for each in engines for flag in each.unused)
    notes += [f"without effect on the plan: {', '.join(unused)}"] if unused else []
    kv_bytes = keys.pop("--kv-cache-memory-bytes", None)
    if kv_bytes is not None:
        said = "decides the KV cache, which engine.gpu_memory_utilization has to leave"
        notes.append(f"--kv-cache-memory-bytes {kv_bytes} {said}")
    counts = {role: sum(e.launch.replicas for e in heads if e.role == role) for role in layouts}
    pools = {role: f"{counts[role]}x{slicing}" for role, slicing in layouts.items()}
    return Deployed(keys=keys, pools=pools, kv_bytes=kv_bytes, notes=tuple(dict.fromkeys(notes)))


def _equal(engines: Sequence[ReadEngine]) -> dict[str, Any]:
    """Return the keys of the engines of one role, which are the same in all."""
    first, *others = [(each, {**each.keys, **each.launch.environment}) for each in engines]
    for each, keys in others:
        for key in sorted(first[1].keys() | keys.keys()):
            mine, other = (of.get(key, "the default") for of in (first[1], keys))
            if mine != other:
                place = each.launch.place
                value = f"{mine} in {first[0].launch.place} and {other} in {place}"
                way_out = ROLES if key in each.launch.environment else None
                expected = f"one in all engines ({each.role})"
                raise InputError(f"{place}: {key}", value, expected, way_out)
    return first[0].keys


def _merged(
    own: Mapping[str, Mapping[str, Any]],
    layouts: Mapping[str, Slicing],
    place: str,
    notes: list[str],
) -> dict[str, Any]:
    """
    Return the keys of all roles, of which a scenario has one each.

    A limit is that of the pool that depends on it, the share of memory the smaller; others have to
    be the same in both.
    """
    keys: dict[str, Any] = {}
    for key in sorted({key for each in own.values() for key in each}):
        asked = [role for role in own if key not in ROUTED or layouts[role].ep > 1] or list(own)
        default = table()["gpu-memory-utilization"]["default"] if key == SHARE else None
        said = {role: own[role].get(key, default) for role in asked}
        owner, values = OWNERS.get(key), list(said.values())
        taken = min(values) if key == SHARE else said.get(f"{owner}", values[0])
        if any(each != values[0] for each in values):
            texts = (f"{'the default' if v is None else v} in {role}" for role, v in said.items())
            shown, why = " and ".join(texts), f"that of {owner}, which alone depends on it,"
            if owner is None and key != SHARE:
                raise InputError(f"{place}: {key}", shown, "one in all engines")
            if not re.search("kv.(offload|cache)", key):
                notes.append(f"{key} is {shown}; {why if owner else 'the smaller'} is taken")
        keys |= {} if taken is None else {key: taken}
    return keys


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
    precision, drafts = record.get("precision"), record.get("spec_decoding") or "none"
    if isinstance(precision, str):
        one_of(("fp8", "fp4", "bf16"), **{f"{place}: precision": precision})
        keys["model.weight_dtype"] = precision
    if drafts != "none":
        raise InputError(f"{place}: spec_decoding", drafts, "none: a record does not say how many")
    preset = f"{str(record.get('hw', '')).partition('-')[0]}-8"
    if preset in clusters():
        keys["cluster.preset"] = preset
    pools, gpus = _inferencex_pools(record, place)
    tokens_per_s = record.get("output_tput_per_gpu")
    notes = []
    if str(record["framework"]) not in {"vllm", "dynamo-vllm"}:
        notes.append(f"measured on {record['framework']}; predicted as vLLM, which plans are for")
    if isinstance(tokens_per_s, int | float) and tokens_per_s > 0:
        rate = gpus * float(tokens_per_s) / positive(record["osl"], f"{place}: osl")
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
            positive(record.get(f"{before}{name}") or 1, f"{place}: {before}{name}")
            for name in ("tp", "ep")
        )
        workers = f"{before}num_workers"
        count = positive(record.get(workers), f"{place}: {workers}") if split else 1
        spread = str(record.get(f"{before}dp_attention", "false")).lower() == "true"
        slicing = Slicing(tp=1, dp=tp, ep=max(ep, tp)) if spread else Slicing(tp=tp, ep=ep)
        pools[role] = f"{count}x{slicing}"
        gpus += count * slicing.gpus
    return pools, gpus

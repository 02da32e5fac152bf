"""vLLM's command lines: written of a plan, and read as the settings of a scenario."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minicluster.errors import Fault, InputError
from minicluster.plan.vllm_args import (
    DTYPES,
    KV_ROLES,
    OFFLOADING,
    SCHEDULER_OPTIONS,
    kv_transfer_config,
    vllm_arguments,
)
from minicluster.specs.checks import one_of
from minicluster.specs.slicing import Slicing
from sizing.stacks.engines import HEAD, Engines, Pools, Texts, commands
from sizing.stacks.flags import UNKNOWN, arguments, effects, flags, only, positive, table, undecided
from sizing.stacks.script import Launch

if TYPE_CHECKING:
    from minicluster.plan import Plan

PORT, DATA_PARALLEL_PORT = 8000, 13345
"""Ports of a server, and at which the nodes of one replica meet."""

KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
"""vLLM's KV transfer in llm-d and KServe, whose routers decide which engine prefills."""

SETTINGS = {
    "max_model_len": "model.max_context_tokens",
    "block_size": "engine.block_size",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    **{argument: f"engine.{name}" for name, argument in SCHEDULER_OPTIONS.items()},
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
}
"""Scenario keys of vLLM's flags, one number in both; the last is no key of a scenario."""

ROLES = 'write "kv_role" kv_producer for prefill and kv_consumer for decode'

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


def write_vllm(_plan: Plan, pools: Pools, _image: str) -> Texts:
    """Return a script with one command for each node of a replica."""
    lines = {role: [["vllm", "serve", *words] for words in node_words(engines)]
             for role, engines in pools.items()}  # fmt: skip
    parts = commands(pools, lines)
    note = (
        "# A router sends a prompt to a prefill engine, then its KV cache to a decode engine:"
        " llm-d, production-stack, or a proxy of vLLM's examples.\n"
    )
    return {"vllm.sh": "\n".join([*parts, note] if len(pools) > 1 else parts)}


def engine_arguments(engines: Engines, *, kv_role: str | None) -> dict[str, Any]:
    """
    Return vLLM's arguments of a pool by name, with the KV connectors that it needs.

    Args:
        kv_role: way of the KV caches of a split pool; `None`: both ways.
    """
    deployment, pool = engines.plan.deployment, engines.pool
    role = {} if kv_role is None else {"kv_role": kv_role}
    nixl = None if pool.role == "mixed" else KV_TRANSFER | role
    connectors = kv_transfer_config(deployment, pool, nixl)
    by_name = vllm_arguments(deployment, pool)
    return by_name if connectors is None else by_name | {"kv_transfer_config": connectors}


def vllm_words(engines: Engines, *, transfers: bool = True) -> list[str]:
    """
    Return the arguments of `vllm serve` that are the same on every node of a replica.

    Args:
        transfers: whether the KV connector of split pools is named.

    Source:
        vLLM 0.29.0 engine/arg_utils.py and entrypoints/launchers/cli_args.py, whose parser a test
        gives these lines.
    """
    plan, pool = engines.plan, engines.pool
    by_name = engine_arguments(engines, kv_role=KV_ROLES.get(pool.role))
    if not transfers:
        by_name.pop("kv_transfer_config", None)
    return [plan.model.source, "--served-model-name", plan.model.id, *flags(by_name)]


def node_words(engines: Engines) -> list[list[str]]:
    """Return the arguments of `vllm serve`, one list for each node of a replica."""
    pool, nodes, common = engines.pool, engines.nodes, vllm_words(engines)
    if nodes == 1:
        return [common]
    lines = []
    for node in range(nodes):
        if pool.dp > 1:
            local = pool.dp // nodes
            place: dict[str, Any] = {
                "data_parallel_size_local": local,
                "data_parallel_address": HEAD,
                "data_parallel_rpc_port": DATA_PARALLEL_PORT,
            }
            place |= {"data_parallel_start_rank": node * local} if node else {}
        else:
            place = {"nnodes": nodes, "node_rank": node, "master_addr": HEAD}
        lines.append([*common, *flags(place | ({"headless": True} if node else {}))])
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEngine:
    """
    One kind of engine that a file starts.

    Attributes:
        role: `prefill`, `decode` or `mixed`.
        keys: scenario keys that its arguments set.
        unused: arguments without effect on the plan.
        follows: whether it is a further node, or rank, of a replica.
    """

    launch: Launch
    role: str
    model: str
    slicing: Slicing
    keys: dict[str, Any]
    unused: tuple[str, ...]
    follows: bool


def read_vllm(launch: Launch) -> ReadEngine:
    """
    Read the arguments of an engine: each is read, without effect on the plan, or refused.

    Raises:
        InputError: no model, a value of another kind, or what is not modelled.
    """
    place = launch.place
    args = arguments(launch.words, place, dynamo=launch.dynamo)
    unused = {name: args.pop(name) for name in list(args) if _without_effect(name)}
    for name, value in (args | unused).items():
        if UNKNOWN in str(value) and (name in args or (isinstance(value, list) and value[1:])):
            texts = value if isinstance(value, list) else [str(value)]
            shown = next(text for text in texts if UNKNOWN in text)
            raise undecided(shown, f"{place}: {_flag(name)}", "a value")
    model = args.pop("model", None)
    if not isinstance(model, str):
        raise InputError(place, "vllm serve", "a model, as its first argument or as --model")
    follows = any([args.pop(name, 0) for name in FOLLOWS])  # noqa: C419  (takes all out)
    slicing = _slicing(args, launch)
    if args.get("max_model_len") == -1:
        raise InputError(f"{place}: --max-model-len", "auto", "a number of tokens")
    keys = {key: args.pop(name) for name, key in SETTINGS.items() if name in args}
    keys |= _dtypes(args, place) | _drafts(args, place) | _lora(args)
    if args.pop("enable_prefix_caching", True) is False:
        keys["workload.prefix_tokens"] = 0
    keys |= _balancing(args, f"{place}: --eplb-config")
    role, offload = _transfer(args, slicing, _role(args, launch), place)
    keys |= offload | _all_to_all(args, role, slicing)
    unused |= {name: args.pop(name) for name in list(args) if _as_predicted(name, args[name])}
    for name, value in args.items():
        names = ", ".join(_flag(name) for name in sorted(args))
        expected = f"no such flag: {names} {'are' if len(args) > 1 else 'is'} not modelled"
        shown = "given" if isinstance(value, bool) else value
        raise InputError(f"{place}: {_flag(name)}", shown, expected, "take it out")
    return ReadEngine(
        launch=launch, role=role, model=model, slicing=slicing, keys=keys,
        unused=tuple(_flag(name) for name in unused), follows=follows,
    )  # fmt: skip


def _without_effect(name: str) -> bool:
    flag, tables = name.replace("_", "-"), effects()
    dynamo = tables["dynamo"].keys() - {_flag(role)[2:] for role in DYNAMO_ROLES}
    return any(flag in names for names in (tables["without_effect"], tables["retired"], dynamo))


def _as_predicted(name: str, value: object) -> bool:
    flag = name.replace("_", "-")
    default = table().get(flag, {}).get("default", effects()["as_predicted"].get(flag))
    return default is not None and (value == default or value == str(default))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _slicing(args: dict[str, Any], launch: Launch) -> Slicing:
    """Return how a replica is sliced: experts are whole on all its GPUs, or sliced as the rest."""
    tp, pp, dp = (
        positive(args.pop(name, 1), f"{launch.place}: {_flag(name)}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    )
    ep = tp * dp if args.pop("enable_expert_parallel", False) else 1
    slicing = Slicing(tp=tp, pp=pp, dp=dp, ep=ep)
    if launch.gpus not in {None, slicing.gpus}:
        expected = f"the {slicing.gpus} that its engine takes: {slicing}"
        raise InputError(f"{launch.place}: GPUs of a replica", launch.gpus, expected)
    return slicing


def _dtypes(args: dict[str, Any], place: str) -> dict[str, str]:
    keys = {}
    quantised, computed = args.pop("quantization", None), args.pop("dtype", "auto")
    if quantised not in {None, "fp8"}:
        way_out = "model.weight_dtype names others"
        raise InputError(f"{place}: --quantization", quantised, "fp8, or none", way_out)
    if quantised or computed not in HALF:
        keys["model.weight_dtype"] = "fp8" if quantised else "fp32"
    cached = args.pop("kv_cache_dtype", "auto")
    one_of(("auto", *KV_DTYPES), **{f"{place}: --kv-cache-dtype": cached})
    return keys if cached == "auto" else keys | {"model.kv_dtype": KV_DTYPES[cached]}


def _drafts(args: dict[str, Any], place: str) -> dict[str, Any]:
    """Return how many tokens are drafted; how many are accepted is nowhere in a command."""
    config = dict(_mapping(args.pop("speculative_config", {}), f"{place}: --speculative-config"))
    keys = ("method", "model", "num_speculative_tokens")
    for name, key in zip(("spec_method", "spec_model", "spec_tokens"), keys, strict=True):
        config |= {key: args.pop(name)} if name in args else {}
    if not config:
        return {}
    method, drafts = config.get("method"), config.get("num_speculative_tokens")
    is_modelled = method in ("mtp", "eagle3", "deepseek_mtp") and set(config) <= {*keys}
    if not is_modelled or not isinstance(drafts, int):
        expected = '"method" mtp or eagle3, "num_speculative_tokens" and at most "model"'
        raise InputError(f"{place}: --speculative-config", json.dumps(config), expected)
    return {"engine.speculative_tokens": drafts}


def _balancing(args: dict[str, Any], where: str) -> dict[str, Any]:
    config = _mapping(args.pop("eplb_config", {}), where)
    if not args.pop("enable_eplb", False):
        return {}
    only(config, "eplb_config", where)
    copies = f"{config.get('num_redundant_experts', 0)}"
    if not copies.isdecimal():
        raise InputError(where, copies, '"num_redundant_experts" of 0 or more')
    return {"engine.redundant_experts": int(copies)}


def _lora(args: dict[str, Any]) -> dict[str, Any]:
    """Return slots for adapters, and how many adapters there are where the command names them."""
    names = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules")
    keys = {f"engine.{name}": args.pop(name) for name in names if name in args}
    adapters = args.pop("lora_modules", [])
    if not args.pop("enable_lora", False):
        return {}
    return (
        {"engine.max_loras": 1}
        | keys
        | ({"workload.lora_adapters": len(adapters)} if adapters else {})
    )


def _role(args: dict[str, Any], launch: Launch) -> str | None:
    """Return the role that a manifest or Dynamo's flags give an engine; `None`: neither does."""
    place, mode = launch.place, args.pop("disaggregation_mode", "agg")
    one_of(MODES, **{f"{place}: --disaggregation-mode": mode})
    connectors = args.pop("connector", [])
    if not set(connectors) <= {"nixl", "none", "null"}:
        raise InputError(f"{place}: --connector", " ".join(connectors), "nixl or none")
    flagged = [role for role in KV_ROLES if args.pop(f"is_{role}_worker", False)]
    roles = {role for role in (launch.role, MODES[mode], *flagged) if role is not None}
    if len(roles) > 1 or not roles <= set(KV_ROLES):
        raise InputError(f"{place}: role", ", ".join(sorted(roles)), "one of prefill and decode")
    return roles.pop() if roles else None


def _transfer(
    args: dict[str, Any], slicing: Slicing, role: str | None, place: str
) -> tuple[str, dict[str, Any]]:
    """
    Return an engine's role, and the keys of its KV offload.

    An engine that hands KV caches on both ways (`kv_both`) has a role only if something else says.
    """
    where, keys = f"{place}: --kv-transfer-config", dict[str, Any]()
    for part in _connectors(args, where):
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
        named = {kv: name for name, kv in KV_ROLES.items()}.get(f"{kv_role}", role)
        if named is None or role not in {None, named}:
            raise InputError(f"{where}: kv_role", kv_role, "the role of an engine", ROLES)
        role = named
    if keys and role == "decode":
        expected = "no KV offload in a decode pool, where no prompt is looked up"
        raise InputError(where, OFFLOADING, expected)
    return role or "mixed", keys


def _connectors(args: dict[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Return the settings of each KV connector; --kv-offloading-size (GiB) stands for one."""
    config, size = args.pop("kv_transfer_config", {}), args.pop("kv_offloading_size", None)
    config = _mapping(config, where)
    if size is not None:
        if config:
            raise InputError(where, Fault("is beside --kv-offloading-size"), "one of the two")
        extra = {"cpu_bytes_to_use": size * 2**30}
        return [{"kv_connector": OFFLOADING, "kv_connector_extra_config": extra}]
    if config.get("kv_connector") != "MultiConnector":
        return [config] if config else []
    only(config, "kv_transfer_config", where)
    inner = _mapping(config.get("kv_connector_extra_config"), where).get("connectors")
    if not isinstance(inner, list) or not inner:
        raise InputError(where, "MultiConnector", 'a list of "connectors"')
    return [_mapping(connector, where) for connector in inner]


def _offload(extra: Mapping[str, Any], slicing: Slicing, where: str) -> dict[str, Any]:
    """Return host memory per GPU of the connector's bytes, which are those of one copy's GPUs."""
    only(extra, "offloading", where)
    size, tiers = extra.get("cpu_bytes_to_use"), extra.get("secondary_tiers") or []
    tiers = [_mapping(tier, where) for tier in tiers] if isinstance(tiers, list) else [{}, {}]
    named = extra.get("spec_name", "CPUOffloadingSpec")
    fits = named == ("TieringOffloadingSpec" if tiers else "CPUOffloadingSpec")
    folders = [tier.get("root_dir") for tier in tiers if tier.get("type") == "fs"]
    if not isinstance(size, int | float) or not fits or len(folders) != len(tiers) or tiers[1:]:
        expected = '"cpu_bytes_to_use", and at most one tier behind it, of "type" fs'
        raise InputError(where, json.dumps(extra), expected)
    keys = {"engine.kv_offload_host_bytes": size / (slicing.tp * slicing.pp)}
    return keys | ({"engine.kv_offload_disk_path": folders[0]} if folders else {})


def _all_to_all(args: dict[str, Any], role: str, slicing: Slicing) -> dict[str, Any]:
    """Return how tokens reach their experts, where ranks send them."""
    if role == "mixed" or args.get("all2all_backend") not in DEEPEP:
        if not slicing.routes_tokens:
            args.pop("all2all_backend", None)
        return {}
    del args["all2all_backend"]
    halves = args.pop("enable_dbo", False)
    return {"engine.all_to_all": "deepep"} | ({"engine.two_batch_overlap": True} if halves else {})


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise InputError(where, json.dumps(value), "a JSON object")
    return value or {}

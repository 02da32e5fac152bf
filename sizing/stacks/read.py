"""`sizing read`: what runs in another stack as a scenario and pools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from minicluster.config import Overrides, read_toml
from minicluster.errors import Fault, InputError
from minicluster.files import read_text
from minicluster.specs.checks import one_of
from minicluster.specs.slicing import Slicing
from sizing.catalog.cluster import clusters
from sizing.catalog.folder import find_file
from sizing.catalog.scenario import scenario_from
from sizing.planner.layout import LayoutShape, kv_space
from sizing.planner.predict import PoolSize
from sizing.scenario import Scenario
from sizing.stacks import dynamo, ray
from sizing.stacks.documents import YamlTable, documents
from sizing.stacks.flags import effects, positive, table
from sizing.stacks.kubernetes import PODS, read_pods
from sizing.stacks.script import DOCKER, ENGINE, PODMAN, Launch, engines_of_script
from sizing.stacks.vllm import ROLES, ReadEngine, read_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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

UNSAID = ("mean_accepted_tokens", "version", "kv_offload_disk_bytes", "kv_offload_disk_bytes_per_s")
"""Keys of an engine that no command says; the first goes with drafts."""

SHARE = "engine.gpu_memory_utilization"
"""Key of the share of memory, which both pools have."""

SAME_SHARE = 1e-3
"""Of a GPU's memory: KV caches that differ by less are what the same share leaves."""

OTHER_ENGINES = re.compile(r"sglang\.launch_server|trtllm-serve|text-generation-launcher|lmdeploy")
"""Commands that start engines which are not vLLM's."""

FILES = "a command `vllm serve …`, a manifest that starts one, or an InferenceX record"
"""Files that can be read, as errors name them."""

READERS = {
    dynamo.KIND: (dynamo.KIND, dynamo.read_dynamo),
    "applications": ("a Serve config of Ray", ray.read_ray),
    **{kind: (kind, read_pods) for kind in PODS},
}
"""Name and reader of a document by its kind, or by a key of one without a kind."""

REFUSED = {
    "services": "a file of docker-compose",
    "modelArtifacts": "values of a chart of llm-d",
}
"""Names of documents that are not read, by a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDeployment:
    """
    Deployment as a file says it.

    Attributes:
        keys: scenario keys that it gives.
        pools: `RxTPn` by role, as `sizing predict` takes them.
        kv_bytes: KV cache of a GPU where answers are generated; `None`: the file does not say.
        notes: sentences on what was left out or assumed.
    """

    keys: dict[str, Any]
    pools: dict[str, str]
    kv_bytes: int | None = None
    notes: tuple[str, ...] = ()


def read_deployment(
    source: Path | str, overrides: Overrides = (), *, base: str | None = None
) -> tuple[Scenario, ReadDeployment]:
    """
    Return a deployment, as `read_deployed` reads it, and the scenario that it serves.

    Args:
        source: as of `read_deployed`.
        overrides: scenario keys that the file does not give, such as the load.
        base: scenario for the keys of load, SLO and GPUs that neither gives; `None`: none.

    Raises:
        InputError: as `read_deployed`, or a key that none of them gives.
    """
    deployment, place = read_deployed(source), _place(source)
    raw = {} if base is None else _around(base, deployment.keys)
    for key, value in deployment.keys.items():
        of, _, name = key.partition(".")
        raw.setdefault(of, {})[name] = value
    try:
        scenario = Scenario.of(scenario_from(raw, overrides, place=place), place, None)
    except InputError as error:
        if error.value is None and error.way_out is None:
            way_out = (
                "--scenario NAME gives load, SLO and GPUs; --set KEY=VALUE one key (`sizing schema`"
                " lists them)"
            )
            raise InputError(error.place, None, error.expectation, way_out) from None
        raise
    return _with_kv_cache(scenario, deployment)


def _with_kv_cache(
    scenario: Scenario, deployment: ReadDeployment
) -> tuple[Scenario, ReadDeployment]:
    """Return the scenario with the share of memory that leaves the KV cache that the file says."""
    if deployment.kv_bytes is None or scenario.gpu.kind == "cpu":
        return scenario, deployment
    size, engine = list(deployment.pools.values())[-1], scenario.engine_on(scenario.gpu.name)
    shape = LayoutShape(slicing=PoolSize.parse(size, "pools").slicing, gpu=scenario.gpu.name)
    space = kv_space(scenario, shape, sequences=engine.max_num_seqs)
    more = (deployment.kv_bytes - space) / scenario.gpu.require("hbm_bytes")
    if abs(more) < SAME_SHARE:
        return scenario, deployment
    share = round(engine.gpu_memory_utilization + more, 4)
    if not 0 < share <= 1:
        expected = f"what fits beside the weights of {size} on {scenario.gpu.name}"
        raise InputError("--kv-cache-memory-bytes", deployment.kv_bytes, expected)
    note = f"engine.gpu_memory_utilization {share} is taken: it leaves that KV cache"
    changed = scenario.with_({"engine.gpu_memory_utilization": share})
    return changed, replace(deployment, notes=(*deployment.notes, note))


def _around(base: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return load, SLO and GPUs of a scenario: the engine is the file's alone."""
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
        for kind in load.get("classes", ()):
            kind.pop("prefix_tokens", None)
    return raw


def read_deployed(source: Path | str) -> ReadDeployment:
    """
    Read a script of `vllm serve`, a manifest of vLLM, or a record of InferenceX.

    Args:
        source: its file, or its text.

    Raises:
        InputError: a file of none of these kinds, contradictory engines, or anything that may
            change the plan and is not read.
    """
    text = source if isinstance(source, str) else read_text(source, FILES)
    place, notes = _place(source), list[str]()
    record = _record(text)
    if record is not None and "kind" not in record:
        return _inferencex(record, place)
    begin = next((line for line in text.splitlines() if re.match(r"(?!---)[^#\s]", line)), "")
    if record is not None or re.match(r"[\w.'\"-]+\s*:(\s|$)", begin):  # a key of YAML
        launches = _launches(text, place, notes)
    else:
        launches = engines_of_script(text, place, notes)
    other = OTHER_ENGINES.search(text)
    if other or not launches:
        fault = f"starts another engine, {other[0]}" if other else "starts no engine of vLLM"
        raise InputError(place, Fault(fault), FILES)
    engines = [read_vllm(launch) for launch in launches]
    told_apart = engines[1:] and all(pattern.search(text.lower()) for pattern in SPLIT)
    if told_apart and all(engine.role == "mixed" for engine in engines):
        fault = Fault("tells engines apart as prefill and decode, but not by themselves")
        raise InputError(place, fault, "a file that says the role of each", ROLES)
    return _together(engines, place, notes)


def is_command(text: str) -> bool:
    """Say whether a text starts an engine or a container; else it is the name of a file."""
    word, *others = text.split() or [""]
    if not others:
        return False
    return word in {DOCKER, PODMAN} or bool(ENGINE.search(text) or OTHER_ENGINES.search(text))


def _place(source: Path | str) -> str:
    return "the command" if isinstance(source, str) else str(source)


def _record(text: str) -> dict[str, Any] | None:
    """Return an InferenceX record, the first of a list of one; `None`: it is no JSON object."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, list) and len(record) == 1:
        record = record[0]
    return record if isinstance(record, dict) else None


def _launches(text: str, place: str, notes: list[str]) -> list[Launch]:
    launches: list[Launch] = []
    for document in documents(text, place):
        if not isinstance(document, YamlTable):
            raise InputError(place, Fault("has a document that is no table"), "tables alone")
        launches += _launches_of(document, f"{place}:{document.line}", notes)
    return launches


def _launches_of(document: YamlTable, place: str, notes: list[str]) -> list[Launch]:
    kind = f"{document.get('kind') or ''}"
    if kind in effects()["documents"]["harmless"]:
        notes.append(f"{place}: a {kind} starts no engine: not read")
        return []
    key = next((key for key in READERS if kind == key or (not kind and key in document)), None)
    if key is None:
        names = (name for key, name in REFUSED.items() if key in document)
        expected = f"a {dynamo.KIND}, or one of {', '.join(PODS)}"
        way_out = "a script of its commands is read; of `serving manifest` the plan says what runs"
        raise InputError(f"{place}: kind", kind or next(names, None), expected, way_out)
    name, read = READERS[key]
    launches = list(read(document, place, notes))
    if not launches and kind not in PODS:
        raise InputError(f"{place}: kind", name, "one with engines of vLLM")
    if len(launches) < sum(_starts(document)):
        fault = Fault("has engines in containers beside those that are read")
        raise InputError(place, fault, "a file with engines in the main containers of workers")
    notes += [] if launches else [f"{place}: {kind} starts no engine: not read"]
    return launches


def _starts(node: object) -> Iterator[bool]:
    """Yield for each container anywhere in a document whether it seems to start an engine."""
    if isinstance(node, Mapping):
        first = node.get("command") or node.get("image")
        yield ENGINE.search(f"{first} {node.get('args')}") is not None
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _starts(inner)


def _together(engines: Sequence[ReadEngine], place: str, notes: list[str]) -> ReadDeployment:
    """Return the keys and pools of engines that serve one model; each role has one kind of them."""
    models = {engine.model for engine in engines}
    if len(models) > 1:
        fault = Fault(f"has engines of {', '.join(sorted(models))}")
        raise InputError(place, fault, "a file with one model", "split the file")
    heads = [engine for engine in engines if not engine.follows]
    kinds = {(engine.role, engine.slicing) for engine in heads}
    for engine in engines:
        if (engine.role, engine.slicing) not in kinds:
            expected = "beside the first node of its replica, in the same layout"
            raise InputError(engine.launch.place, Fault("is a further node"), expected)
    layouts = dict(sorted(kinds, key=itemgetter(0), reverse=True))
    if len(layouts) < len(kinds) or list(layouts) not in (["mixed"], ["prefill", "decode"]):
        shown = ", ".join(dict.fromkeys(f"{engine.role} {engine.slicing}" for engine in heads))
        expected = "engines of one layout, or of one for prefill and one for decode"
        raise InputError(place, shown, expected, ROLES)
    by_role = {role: [engine for engine in engines if engine.role == role] for role in layouts}
    keys: dict[str, Any] = {"model.id": models.pop(), "engine.name": "vllm"}
    keys |= _merged({role: _equal(alike) for role, alike in by_role.items()}, layouts, place, notes)
    unused = dict.fromkeys(flag for engine in engines for flag in engine.unused)
    notes += [f"without effect on the plan: {', '.join(unused)}"] if unused else []
    kv_bytes = keys.pop("--kv-cache-memory-bytes", None)
    if kv_bytes is not None:
        why = "decides the KV cache, which engine.gpu_memory_utilization has to leave"
        notes.append(f"--kv-cache-memory-bytes {kv_bytes} {why}")
    counts = {role: sum(e.launch.replicas for e in heads if e.role == role) for role in layouts}
    pools = {role: f"{counts[role]}x{slicing}" for role, slicing in layouts.items()}
    return ReadDeployment(
        keys=keys, pools=pools, kv_bytes=kv_bytes, notes=tuple(dict.fromkeys(notes))
    )


def _equal(engines: Sequence[ReadEngine]) -> dict[str, Any]:
    """Return the keys of the engines of one role, which are the same in all."""
    first, *others = engines
    for engine in others:
        here, there = ({**of.keys, **of.launch.environment} for of in (first, engine))
        for key in sorted(here.keys() | there.keys()):
            values = [of.get(key, "the default") for of in (here, there)]
            if values[0] != values[1]:
                place = engine.launch.place
                shown = f"{values[0]} in {first.launch.place} and {values[1]} in {place}"
                way_out = ROLES if key in engine.launch.environment else None
                expected = f"one in all engines ({engine.role})"
                raise InputError(f"{place}: {key}", shown, expected, way_out)
    return first.keys


def _merged(
    by_role: Mapping[str, Mapping[str, Any]],
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
    for key in sorted({key for keys_of_role in by_role.values() for key in keys_of_role}):
        routed = [role for role in by_role if key not in ROUTED or layouts[role].ep > 1]
        default = table()["gpu-memory-utilization"]["default"] if key == SHARE else None
        of_role = {role: by_role[role].get(key, default) for role in routed or by_role}
        owner, values = OWNERS.get(key), list(of_role.values())
        taken = min(values) if key == SHARE else of_role.get(f"{owner}", values[0])
        if any(value != values[0] for value in values):
            texts = (f"{'the default' if v is None else v} in {r}" for r, v in of_role.items())
            shown, why = " and ".join(texts), f"that of {owner}, which alone depends on it,"
            if owner is None and key != SHARE:
                raise InputError(f"{place}: {key}", shown, "one in all engines")
            if not re.search("kv.(offload|cache)", key):
                notes.append(f"{key} is {shown}; {why if owner else 'the smaller'} is taken")
        keys |= {} if taken is None else {key: taken}
    return keys


def _inferencex(record: Mapping[str, Any], place: str) -> ReadDeployment:
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
    return ReadDeployment(keys=keys, pools=pools, notes=tuple(notes))


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

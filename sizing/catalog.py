"""The catalogs in `configs/`: names to facts, and a scenario to everything it names."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sizing.config import overridden, parse, parse_scenario, read_toml
from sizing.errors import InputError
from sizing.huggingface.names import repackaged
from sizing.huggingface.reader import model_from, read_config
from sizing.specs.checks import STRICT
from sizing.specs.cluster import ClusterSpec
from sizing.specs.collective import CollectiveEntry
from sizing.specs.engine import EngineProfile
from sizing.specs.fabric import FailureSpec
from sizing.specs.gpu import GpuSpec, Source
from sizing.specs.library import Collectives
from sizing.specs.precision import with_weight_dtype
from sizing.specs.study import Conventions
from sizing.specs.switch import SwitchSpec
from sizing.specs.tier import NAMES as UNITS_BY_NAME
from sizing.specs.tier import TierSpec
from sizing.specs.topology import topology_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sizing.specs.model import ModelSpec
    from sizing.specs.scenario import ClusterChoice, EngineChoice, ModelChoice, ScenarioSpec
    from sizing.specs.topology import Topology

T = TypeVar("T")

BANDWIDTH = re.compile(r"band|bw|bps|_per_s|gb|gbit", re.IGNORECASE)
"""What keys look like that mean a bandwidth."""
DEMO_MODEL = ".minicluster/models/demo"


class Resolved(NamedTuple):
    """What the names of a scenario stand for, its overrides applied."""

    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    engine: EngineProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """
    One file of `configs/models`.

    Attributes:
        hub_id: what a server loads.
        aliases: further hub ids of the same architecture.
        config: keys of the model's `config.json`.
    """

    __pydantic_config__ = STRICT

    hub_id: str
    aliases: tuple[str, ...]
    config: dict[str, object]
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntry:
    """One file of `configs/gpus`: a GPU and the other names it goes by."""

    spec: GpuSpec
    aliases: tuple[str, ...] = field(default=())


def configs() -> Path:
    """Return the folder of the catalogs: inside an installed wheel, or beside the package."""
    inside = Path(__file__).parent / "_configs"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "configs"


def files(kind: str) -> dict[str, Path]:
    """Return the files of one catalog (`models`, `gpus`, `scenarios`, …) by name, in order."""
    return {path.stem: path for path in sorted((configs() / kind).glob("*.toml"))}


@cache
def models() -> Mapping[str, ModelEntry]:
    """Read the model catalog."""
    return {
        name: parse(ModelEntry, read_toml(path), place=path.name)
        for name, path in files("models").items()
    }


@cache
def gpus() -> Mapping[str, GpuEntry]:
    """Read the GPU catalog."""
    found = {}
    for path in files("gpus").values():
        raw = read_toml(path)
        aliases = tuple(raw.pop("aliases", ()))
        spec = parse(GpuSpec, raw, place=path.name)
        spec = replace(spec, collectives=_collectives_of(spec))
        found[spec.name] = GpuEntry(spec=spec, aliases=aliases)
    return found


@cache
def clusters() -> Mapping[str, ClusterSpec]:
    """Read the cluster presets."""
    return {name: read_cluster(path) for name, path in files("clusters").items()}


@cache
def switches() -> Mapping[str, SwitchSpec]:
    """Read the catalog of network switches."""
    return {
        name: parse(SwitchSpec, read_toml(path), place=path.name)
        for name, path in files("switches").items()
    }


@cache
def collectives() -> Mapping[str, CollectiveEntry]:
    """Read what collective libraries were measured to take, by GPU, and their protocols."""
    return {
        name: parse(CollectiveEntry, read_toml(path), place=path.name)
        for name, path in files("collectives").items()
    }


def _collectives_of(gpu: GpuSpec) -> Collectives:
    """Return the libraries' tables on a GPU, and how NCCL crosses the nodes of NVIDIA's."""
    measured = [entry.measured for entry in collectives().values() if entry.gpu == gpu.name]
    return Collectives(
        measured=tuple(table for tables in measured for table in tables),
        protocols=collectives()["nccl"].protocols if gpu.vendor == "NVIDIA" else (),
    )


def find_study(name: str, overrides: Sequence[str] = ()) -> Conventions:
    """
    Return the conventions of a study, some of them overridden.

    Args:
        name: of a file in `configs/studies`, or the path of one like it.
        overrides: `key=value` each, as TOML writes it.

    """
    known = files("studies")
    path = known.get(name, Path(name))
    if name not in known and not _exists(path):
        raise _unknown("--study", name, "a study or a file like one", known)
    raw = overridden(read_toml(path), overrides)
    return parse(Conventions, raw, place=" ".join([path.name, *overrides]))


def read_cluster(path: Path) -> ClusterSpec:
    """
    Read a cluster file.

    Raises:
        InputError: the first thing wrong with it; a bandwidth without its unit is told how to
            say one.

    """
    raw = read_toml(path)
    tiers = raw.get("tiers", [])
    known = {spec.name for spec in fields(TierSpec)}
    for tier in tiers if isinstance(tiers, list) else []:
        for key in tier if isinstance(tier, dict) else ():
            if key not in known and BANDWIDTH.search(key):
                place = f"{path.name}: tiers.{tier.get('name', '?')}.{key}"
                raise InputError(place, tier[key], "a key that says its unit", UNITS_BY_NAME)
    return parse(ClusterSpec, raw, place=path.name)


def find_network(name: str, *, place: str = "cluster") -> tuple[ClusterSpec, Topology]:
    """
    Return a cluster and its network by the name of a preset or the path of a file like one.

    Raises:
        InputError: neither, or something is wrong with it.

    """
    if name in clusters():
        cluster = clusters()[name]
    elif _exists(Path(name)) and Path(name).is_file():
        cluster = read_cluster(Path(name))
    else:
        raise _unknown(place, name, "a cluster preset or a file like one", clusters())
    return cluster, topology_of(cluster, find_gpu(cluster.gpu, place=f"{name}: gpu"))


@cache
def engines() -> tuple[EngineProfile, ...]:
    """Read the engine profiles, those that can be deployed first."""
    profiles = [
        parse(EngineProfile, read_toml(path), place=path.name) for path in files("engines").values()
    ]
    return tuple(sorted(profiles, key=lambda profile: not profile.deployable))


def find_model(name: str, *, place: str = "model.id") -> ModelSpec:
    """
    Return the model that *name* stands for.

    Args:
        name: a catalog name, a hub id, or a path to a `config.json` or to the directory it is in
            (relative to where the command runs). Instruct, chat, quantised and repackaged hub ids
            of any organisation stand for the entry of the same shapes, in the dtype that they name.
        place: named in errors.

    Raises:
        InputError: neither in the catalog nor on disk, or a config that cannot be used.

    """
    for key, entry in models().items():
        known = (key, entry.hub_id, *entry.aliases)
        hit = next((alias for alias in known if alias.lower() == name.lower()), None)
        if hit is not None:
            source = hit if "/" in hit else entry.hub_id
            return model_from(entry.config, name=name, source=source, place=f"{key}.toml")
    path = Path(name)
    if name and _exists(path):
        directory = path if path.is_dir() else path.parent
        return model_from(
            read_config(path), name=directory.resolve().name, source=str(directory), place=name
        )
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise InputError(
            place,
            name,
            "an existing config.json or the directory it is in",
            f"paths are relative to where the command runs; `make demo` makes {DEMO_MODEL}",
        )
    other = repackaged(name, _model_names())
    if other is not None:
        entry = models()[other.key]
        source = name if "/" in name else entry.hub_id
        spec = model_from(entry.config, name=name, source=source, place=f"{other.key}.toml")
        return with_weight_dtype(spec, other.weight_dtype)
    raise _unknown(
        place,
        name,
        "a catalog name, a hub id of the catalog, or an existing path to a config.json",
        [*models(), *_model_names()],
    )


@cache
def _model_names() -> Mapping[str, str]:
    """Return all names and hub ids of the model catalog, each with the key of its entry."""
    return {
        name: key for key, entry in models().items() for name in (key, entry.hub_id, *entry.aliases)
    }


def find_gpu(name: str, *, place: str = "cluster.gpu") -> GpuSpec:
    """Return the GPU that *name*, a catalog name or an alias, stands for."""
    for key, entry in gpus().items():
        if name.lower() in {alias.lower() for alias in (key, *entry.aliases)}:
            return entry.spec
    raise _unknown(place, name, "a GPU of the catalog", gpus())


def find_engine(choice: EngineChoice, *, place: str = "engine") -> EngineProfile:
    """Return what can be deployed of an engine; `0.29` stands for the only 0.29.x there is."""
    deployable = [profile for profile in engines() if profile.deployable]
    for profile in deployable:
        versions = (profile.version, profile.version.rpartition(".")[0])
        if choice.name == profile.name and choice.version in versions:
            return profile
    known = [f"{profile.name} {profile.version}" for profile in deployable]
    raise _unknown(place, f"{choice.name} {choice.version}", "an engine with a profile", known)


def find_cluster(choice: ClusterChoice, *, place: str = "cluster") -> ClusterSpec:
    """
    Return the preset with the scenario's own keys over it, or a cluster made of them alone.

    A GPU without a preset makes nodes in which scale-up links join all GPUs.
    """
    if choice.preset is None:
        return _own_cluster(choice, place)
    if choice.preset not in clusters():
        raise _unknown(f"{place}.preset", choice.preset, "a cluster preset", clusters())
    preset = clusters()[choice.preset]
    gpu = find_gpu(choice.gpu, place=f"{place}.gpu").name if choice.gpu else preset.gpu
    per_node = choice.gpus_per_node or preset.gpus_per_node
    kept = preset.gpus_per_hb_domain if per_node == preset.gpus_per_node else per_node
    built = preset.with_nodes(per_node, kept)
    return replace(
        built,
        gpu=gpu,
        max_gpus=choice.max_gpus or preset.max_gpus,
        price_usd_per_gpu_hour=choice.price_usd_per_gpu_hour,
        pools_meet_in=choice.pools_meet_in or built.pools_meet_in,
        failures=_failures(choice, built.failures, place),
    )


def _failures(choice: ClusterChoice, preset: FailureSpec | None, place: str) -> FailureSpec | None:
    """Return the preset's failures with the scenario's own numbers over them."""
    mtbf_s = choice.gpu_mtbf_s or (preset.gpu_mtbf_s if preset else None)
    repair_s = choice.repair_s or (preset.node_repair_s if preset else None)
    if mtbf_s is None and repair_s is None:
        return None
    if mtbf_s is None or repair_s is None:
        key = "gpu_mtbf_s" if mtbf_s is None else "repair_s"
        raise InputError(f"{place}.{key}", None, "a number beside the other of the two")
    base = preset or FailureSpec(gpu_mtbf_s=mtbf_s, node_repair_s=repair_s)
    return replace(base, gpu_mtbf_s=mtbf_s, node_repair_s=repair_s)


def _own_cluster(choice: ClusterChoice, place: str) -> ClusterSpec:
    """Make a cluster from the scenario's keys alone."""
    gpu = find_gpu(choice.gpu or "", place=f"{place}.gpu")
    if choice.gpus_per_node is None or choice.max_gpus is None:
        key = "gpus_per_node" if choice.gpus_per_node is None else "max_gpus"
        raise InputError(
            f"{place}.{key}", None, "a number: there is no preset to take it from", _presets(gpu)
        )
    return ClusterSpec(
        name=f"{gpu.name}-{choice.gpus_per_node}",
        gpu=gpu.name,
        gpus_per_node=choice.gpus_per_node,
        gpus_per_hb_domain=choice.gpus_per_node,
        max_gpus=choice.max_gpus,
        price_usd_per_gpu_hour=choice.price_usd_per_gpu_hour,
        pools_meet_in=choice.pools_meet_in,
        failures=_failures(choice, None, place),
    )


def _presets(gpu: GpuSpec) -> str:
    """Say which presets there are for a GPU."""
    names = [name for name, cluster in clusters().items() if cluster.gpu == gpu.name]
    return "presets of this GPU: " + (", ".join(names) or "none")


def read_scenario(path: Path, overrides: Sequence[str] = ()) -> ScenarioSpec:
    """
    Read a scenario.

    Args:
        path: TOML file, or the name of a shipped scenario (`llama-3.1-70b-h100`).
        overrides: `key=value` each; see `parse_scenario`.

    Raises:
        InputError: no such scenario, or the first thing wrong with it.

    """
    shipped = files("scenarios")
    file = path if _exists(path) or path.suffix == ".toml" else shipped.get(str(path))
    if file is not None:
        return parse_scenario(read_toml(file), overrides, place=str(path))
    raise _unknown("scenario", str(path), "a TOML file or a shipped scenario", shipped)


def resolve(scenario: ScenarioSpec, place: str) -> Resolved:
    """
    Look up everything that a scenario names, and check that it fits together.

    Args:
        scenario: as read.
        place: its file, named in errors.

    Raises:
        InputError: an unknown name, or values that contradict each other.

    """
    cluster = find_cluster(scenario.cluster, place=f"{place}: cluster")
    resolved = Resolved(
        model=_overridden(scenario.model, place),
        gpu=find_gpu(cluster.gpu, place=f"{place}: cluster.gpu"),
        cluster=cluster,
        engine=find_engine(scenario.engine, place=f"{place}: engine"),
    )
    longest = scenario.workload.input_tokens.max_tokens + scenario.workload.output_tokens.max_tokens
    if longest > resolved.model.max_context_tokens:
        raise InputError(
            f"{place}: workload.input_tokens + output_tokens",
            longest,
            f"at most {resolved.model.max_context_tokens}, the context of {resolved.model.id}",
            "shorten one of them, or take a model with a longer context",
        )
    return resolved


def _overridden(choice: ModelChoice, place: str) -> ModelSpec:
    """Return the model with the scenario's dtypes and context."""
    model = find_model(choice.id, place=f"{place}: model.id")
    model = with_weight_dtype(model, choice.weight_dtype)
    if choice.kv_dtype is not None:
        model = replace(model, kv_dtype=choice.kv_dtype)
    model = _assumed(model, choice.assumed_context_tokens, place)
    wanted = choice.max_context_tokens
    if wanted is None:
        return model
    if wanted > model.max_context_tokens:
        raise InputError(
            f"{place}: model.max_context_tokens",
            wanted,
            f"at most {model.max_context_tokens}, what {model.id} was made for",
            "for a RoPE-scaled variant give the path of its own config.json as model.id; to plan"
            " as if there were one, set model.assumed_context_tokens",
        )
    return replace(model, max_context_tokens=wanted)


def _assumed(model: ModelSpec, tokens: int | None, place: str) -> ModelSpec:
    """Raise the context beyond what the model was made for, because the scenario says so."""
    if tokens is None:
        return model
    if tokens <= model.max_context_tokens:
        raise InputError(
            f"{place}: model.assumed_context_tokens",
            tokens,
            f"more than {model.max_context_tokens}, what {model.id} was made for",
            "model.max_context_tokens shortens the context",
        )
    return replace(model, max_context_tokens=tokens)


def _exists(path: Path) -> bool:
    """Say whether a path exists; what cannot be a path does not."""
    try:
        return path.exists()
    except OSError:
        return False


def _unknown(place: str, name: str, expectation: str, known: Iterable[str]) -> InputError:
    """Say that a name is unknown, and which one was probably meant."""
    by_lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if near:
        return InputError(place, name, expectation, f"did you mean {by_lower[near[0]]}?")
    short = [key for key in by_lower.values() if "/" not in key and " " not in key]
    return InputError(place, name, expectation, "known: " + ", ".join(short or by_lower.values()))

"""What a measured row ran on, from the catalogs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.errors import InputError
from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.model import DTYPE_BYTES, ModelSpec
from minicluster.specs.precision import with_weight_dtype
from sizing import catalog
from sizing.evidence.rules import SchedulingRules, rules_of
from sizing.latency.memory import kv_space_bytes
from sizing.latency.step import Machine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.engine import EngineProfile
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.slicing import Slicing
    from sizing.evidence.row import MeasuredRow

NODE_GPUS = 8
"""GPUs of a node, and of its HB domain, where no preset of the GPU says otherwise."""
LEAST_KV_FRACTION = 0.02
"""Of GPU memory: what ran had some room for KV, whatever our sum of weights and reserves says."""
MODELOPT = "nvidia/"
"""Whose checkpoints carry the scales of an fp8 KV cache, and scale fp8 weights by tensors."""
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """
    A row's machine.

    Attributes:
        ahead: the engine puts the next step together while one runs.
        notes: what was taken in place of something unknown, one sentence each.
    """

    machine: Machine
    rules: SchedulingRules
    token_budget: int
    ahead: bool
    notes: tuple[str, ...]

    def kv_tokens(self, slicing: Slicing, sequence_tokens: float) -> float:
        """Tokens that one attention rank's KV cache holds, in sequences of a given length."""
        m = self.machine
        space = kv_space_bytes(m.model, m.gpu, m.engine, slicing=slicing)
        least = m.gpu.require("hbm_bytes") * LEAST_KV_FRACTION
        each = kv_bytes_per_sequence(
            m.model, sequence_tokens, slicing=slicing, block_size=m.engine.block_size
        )
        return max(space, least) * sequence_tokens / each


def subject_of(row: MeasuredRow) -> Subject:
    """
    Look up everything that a row names.

    Raises:
        InputError: a model, GPU, engine or dtype that nothing is known of.

    """
    rules = rules_of(row.engine, place=f"{row.place}: engine")
    gpu = catalog.find_gpu(row.gpu, place=f"{row.place}: gpu")
    version = row.engine_version
    if len(row.groups) > 1 and rules.split_since and _numbers(version) < rules.split_since:
        version = f"of its server ({version})"
    engine, notes = nearest_engine(row.engine, version, catalog.engines())
    budget = row.token_budget or rules.budget(
        prompt_tokens=row.isl,
        users=row.amount,
        own_recipe=row.load == "closed" and (not row.length_jitter or not rules.chunks),
    )
    return Subject(
        machine=Machine(
            model=_model(row, rules),
            gpu=gpu,
            cluster=_cluster(gpu, sum(g.replicas * g.slicing.gpus for g in row.groups)),
            engine=engine,
        ),
        rules=rules,
        token_budget=budget,
        ahead=not _numbers(version) or _numbers(version) >= rules.ahead_since,
        notes=notes,
    )


def nearest_engine(
    name: str, version: str, profiles: Iterable[EngineProfile]
) -> tuple[EngineProfile, tuple[str, ...]]:
    """
    Return the profile of an engine version, of the nearest one, or else of another engine.

    Args:
        name: of the engine.
        version: empty: unknown; text without numbers likewise.
        profiles: what there is; several of one version: the first.

    Returns:
        The profile, and a note where it is not of this very version.

    Raises:
        InputError: no profile at all.

    """
    known = list(profiles)
    own = [profile for profile in known if profile.name.lower() == name.lower()]
    if not known:
        raise InputError("configs/engines", None, "the profile of an engine")
    if not own:
        other = known[0]
        return other, (f"no constants of {name}: those of {other.name} {other.version}",)
    wanted = _numbers(version)
    if not wanted:
        newest = max(own, key=lambda profile: _numbers(profile.version))
        return newest, (f"engine version {version or 'unknown'}: constants of {newest.version}",)
    nearest = min(own, key=lambda profile: _distance(wanted, _numbers(profile.version)))
    same = _numbers(nearest.version)[: len(wanted)] == wanted
    note = f"no constants of {name} {version}: those of {nearest.version}"
    return nearest, () if same else (note,)


def _numbers(version: str) -> tuple[int, ...]:
    """Read the release numbers of a version; none where it does not start with one."""
    return tuple(int(n) for n in NUMBER.findall(version)[:3]) if version[:1].isdigit() else ()


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """How far two versions are apart, the first number counting most."""
    pairs = zip((*one, 0, 0, 0)[:3], (*other, 0, 0, 0)[:3], strict=True)
    return sum(abs(a - b) * weight for (a, b), weight in zip(pairs, (1e6, 1e3, 1.0), strict=True))


def _model(row: MeasuredRow, rules: SchedulingRules) -> ModelSpec:
    """Return the model with the row's dtypes."""
    model = catalog.find_model(row.model, place=f"{row.place}: model")
    for column, dtype in (("weight_dtype", row.weight_dtype), ("kv_dtype", row.kv_dtype)):
        if dtype and dtype not in DTYPE_BYTES:
            raise InputError(f"{row.place}: {column}", dtype, "one of " + ", ".join(DTYPE_BYTES))
    requantised = row.weight_dtype != model.weight_dtype or row.model.startswith(MODELOPT)
    small = DTYPE_BYTES[row.weight_dtype] <= 1
    model = with_weight_dtype(model, row.weight_dtype)
    if row.model.startswith(MODELOPT):
        model = replace(model, block_scaled=False)
    blocks = model.block_scaled and row.weight_dtype == "fp8"
    fp8 = small and (rules.fp8_kv == "small" or (requantised and not blocks))
    return replace(model, kv_dtype=row.kv_dtype or ("fp8" if fp8 else model.dtype))


def _cluster(gpu: GpuSpec, gpus: int) -> ClusterSpec:
    """Return the preset of the GPU with room for the row, or plain nodes of eight."""
    for preset in catalog.clusters().values():
        if preset.gpu == gpu.name:
            return replace(preset, max_gpus=max(preset.max_gpus, gpus))
    return ClusterSpec(
        name=f"{gpu.name}-{NODE_GPUS}",
        gpu=gpu.name,
        gpus_per_node=NODE_GPUS,
        gpus_per_hb_domain=NODE_GPUS,
        max_gpus=max(NODE_GPUS, gpus),
    )

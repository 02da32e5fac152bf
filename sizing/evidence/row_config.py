"""The model, GPU, engine and limits that a measured row ran with, from the catalogs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.checks import one_of
from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.model import DTYPE_BYTES, ModelSpec, with_weight_dtype
from sizing import catalog
from sizing.catalog import release
from sizing.evidence.protocol import (
    PoolSettings,
    RecipeSettings,
    acceptance_of,
    pool_settings,
    recipe_of,
)
from sizing.latency.term import Machine

if TYPE_CHECKING:
    from minicluster.specs.engine import EngineProfile, SchedulingRules
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.slicing import Slicing
    from sizing.evidence.measured_row import MeasuredRow

NODE_GPUS = 8
"""GPUs of a node, and of its HB domain, where no preset of the GPU says otherwise."""
SCALE_OUT_LATENCY_S = 10e-6
"""One hop between nodes where no preset of the GPU says: as in the presets of configs/clusters."""
NEW_DTYPES = ("fp8", "fp4")
"""Dtypes of weights that older GPUs cannot multiply in."""
KV_DTYPES = ("fp32", "bf16", "fp16", "int8", "fp8", "fp4")
"""Dtypes that engines have a KV cache of, the last two where the GPU and the engine allow it."""
MODELOPT = "nvidia/"
"""Organisation of checkpoints with scales of an fp8 KV cache and fp8 weights scaled by tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowConfig:
    """
    The configuration that a row was measured with.

    Attributes:
        token_budget: most tokens in a step.
        max_num_seqs: most sequences in a step of one attention rank.
        async_scheduling: the engine prepares the next step while one runs.
        recipe: with which the source started the engine of an aggregated row.
        pools: settings of split pools by role, where a recipe of them is known.
        notes: what was taken in place of something unknown, one sentence each.
        acceptance: where the row does not count accepted drafts, what was taken.
    """

    machine: Machine
    token_budget: int
    max_num_seqs: int
    async_scheduling: bool
    recipe: RecipeSettings
    pools: Mapping[str, PoolSettings]
    notes: tuple[str, ...]
    acceptance: str = ""


def row_config(row: MeasuredRow) -> RowConfig:
    """
    Look up everything that a row names.

    Raises:
        InputError: a model, GPU, engine or dtype that nothing is known of, a dtype that the engine
            does not have on the GPU, or a width that the model cannot be sliced to.
    """
    place = f"{row.place}: engine"
    version = row.engine_version
    engine, notes = nearest_engine(row.engine, version, catalog.engines(), place=place)
    split_since = engine.scheduling.split_since
    if len(row.groups) > 1 and split_since and release(version) < split_since:
        version = f"of its server ({version})"
        engine, notes = nearest_engine(row.engine, version, catalog.engines(), place=place)
    rules = engine.scheduling
    gpu = catalog.find_gpu(row.gpu, place=f"{row.place}: gpu")
    model = _model(row, rules)
    engine, acceptance = _drafting(row, model, engine)
    _check_precision(row, model, gpu)
    for group in row.groups:
        _check_widths(row, model, group.slicing)
    recipe = recipe_of(row) if len(row.groups) == 1 else RecipeSettings()
    ahead = not release(version) or release(version) >= rules.async_scheduling_since
    here = _host_times(row, engine.on(gpu), version=version, ahead=ahead)
    if recipe.captured_tokens is not None:
        here = replace(here, captured_tokens=recipe.captured_tokens)
    return RowConfig(
        machine=Machine(
            model=model,
            gpu=gpu,
            cluster=_cluster(gpu, sum(g.replicas * g.slicing.gpus for g in row.groups)),
            engine=here,
        ),
        token_budget=row.token_budget or _token_budget(row, here, recipe),
        max_num_seqs=row.max_num_seqs or here.max_num_seqs,
        async_scheduling=ahead,
        recipe=recipe,
        pools=pool_settings(row),
        notes=notes,
        acceptance=acceptance,
    )


def _host_times(
    row: MeasuredRow, engine: EngineProfile, *, version: str, ahead: bool
) -> EngineProfile:
    """Return the engine with the host's times between and in the steps of the row's version."""
    if not ahead:
        engine = replace(
            engine,
            per_step_s=engine.per_step_s + engine.exposed_step_s,
            per_sequence_s=engine.per_sequence_s + engine.exposed_sequence_s,
        )
    # Builds between releases have no number; those of all rows are older than the release.
    compiles = release(version) < engine.prompt_compile_until
    if not compiles or not (row.length_jitter or row.means_only):
        engine = replace(engine, prompt_compile_s=0.0)
    return engine


def _drafting(
    row: MeasuredRow, model: ModelSpec, engine: EngineProfile
) -> tuple[EngineProfile, str]:
    """
    Return the engine with the row's drafts, and a note where their acceptance is not the row's own.

    Raises:
        InputError: drafts that the engine does not know, of a model without a head for them, or
            for which no source states the acceptance.
    """
    drafts, accepted, note = row.speculative_tokens, row.accepted_tokens, ""
    if not drafts:
        return engine, note
    catalog.check_draft(
        model, replace(engine, speculative_tokens=drafts), place=f"{row.place}: mtp_tokens"
    )
    if accepted is None:
        published = acceptance_of(row)
        if published is None:
            expected = "the mean of accepted drafts: none is published for this model and source"
            raise InputError(f"{row.place}: accepted_tokens", None, expected)
        accepted = published.mean_accepted_tokens
        note = f"{accepted:g} of {drafts} drafts accepted, as published ({published.text})"
    return replace(engine, speculative_tokens=drafts, mean_accepted_tokens=accepted), note


def _token_budget(row: MeasuredRow, engine: EngineProfile, recipe: RecipeSettings) -> int:
    """Tokens of a step where the row does not say: its recipe's, or the engine's default."""
    if recipe.token_budget is not None:
        return recipe.token_budget
    if recipe.prompts_per_step is not None:
        return recipe.prompts_per_step * row.isl
    if recipe.spare_tokens is not None:
        return int(row.amount) + row.isl + recipe.spare_tokens
    return engine.max_num_batched_tokens


def nearest_engine(
    name: str, version: str, profiles: Iterable[EngineProfile], *, place: str = "engine"
) -> tuple[EngineProfile, tuple[str, ...]]:
    """
    Return the profile of an engine version, or of the nearest version that has one.

    Args:
        name: in any case.
        version: one without numbers is unknown.
        profiles: the catalog's; of several of one version, the first is taken.

    Returns:
        The profile, and a note where it is not of this very version.

    Raises:
        InputError: no profile of that engine.
    """
    known = list(profiles)
    own = [profile for profile in known if profile.name.lower() == name.lower()]
    if not own:
        names = dict.fromkeys(profile.name for profile in known)
        raise InputError(place, name, "one of " + ", ".join(names), "add it to configs/engines")
    wanted = release(version)
    if not wanted:
        newest = max(own, key=lambda profile: release(profile.version))
        return newest, (f"engine version {version or 'unknown'}: constants of {newest.version}",)

    def distances(profile: EngineProfile) -> list[int]:  # the first number counts most
        pairs = zip_longest(wanted, release(profile.version), fillvalue=0)
        return [abs(a - b) for a, b in pairs]

    nearest = min(own, key=distances)
    same = release(nearest.version)[: len(wanted)] == wanted
    note = f"no constants of {name} {version}: those of {nearest.version}"
    return nearest, () if same else (note,)


def _model(row: MeasuredRow, rules: SchedulingRules) -> ModelSpec:
    drafts = row.speculative_tokens > 0
    model = catalog.find_model(row.model, place=f"{row.place}: model", drafts=drafts)
    for column, dtype in (("weight_dtype", row.weight_dtype), ("kv_dtype", row.kv_dtype)):
        one_of(DTYPE_BYTES, **{f"{row.place}: {column}": dtype or None})
    requantised = row.weight_dtype != model.weight_dtype or row.model.startswith(MODELOPT)
    small = DTYPE_BYTES[row.weight_dtype] <= 1
    model = with_weight_dtype(model, row.weight_dtype)
    if row.model.startswith(MODELOPT):
        model = replace(model, block_scaled=False)
    blocks = model.block_scaled and row.weight_dtype == "fp8"
    fp8 = small and (rules.fp8_kv == "small" or (requantised and not blocks))
    return replace(model, kv_dtype=row.kv_dtype or ("fp8" if fp8 else model.dtype))


def _check_precision(row: MeasuredRow, model: ModelSpec, gpu: GpuSpec) -> None:
    """
    Refuse fp8 and fp4 that the GPU, or TensorRT-LLM on it, has no kernel for.

    vLLM and SGLang multiply such weights in 16 bits on older GPUs (Marlin); TensorRT-LLM does so
    with published MXFP4 checkpoints on Hopper alone. A cache in 4 bits needs the GPU's own units;
    no engine has one of int4.

    Source:
        TensorRT-LLM 1.0 support matrix: FP8 from Ada on, NVFP4 on Blackwell, MXFP4 on Hopper
        (its gpt-oss guide); vLLM documentation, supported hardware for quantisation kernels.
    """
    strict = row.engine.lower() == "trtllm"
    own = gpu.peak_flops_per_s
    kv = [dtype for dtype in KV_DTYPES if dtype not in NEW_DTYPES or dtype in own]
    kv += [] if strict else ["fp8"]
    if row.kv_dtype and row.kv_dtype not in kv:
        expected = "one of " + ", ".join(dict.fromkeys(kv)) + f" on {gpu.name}"
        raise InputError(f"{row.place}: kv_dtype", row.kv_dtype, expected)
    dtype, published = row.weight_dtype, catalog.find_model(row.model).weight_dtype
    if not strict or dtype not in NEW_DTYPES or dtype in own:
        return
    if not (dtype == "fp4" and published == "fp4" and model.moe and "fp8" in own):
        expected = "one of " + ", ".join([*own, "int4"]) + f" on {gpu.name}"
        raise InputError(f"{row.place}: weight_dtype", dtype, expected)


def _check_widths(row: MeasuredRow, model: ModelSpec, slicing: Slicing) -> None:
    experts = model.moe.num_experts if model.moe else 1
    widths = {
        "tp": (slicing.tp, model.num_heads, "attention heads"),
        "pp": (slicing.pp, model.num_layers, "layers"),
        "ep": (slicing.ep, experts, "experts"),
    }
    for name, (width, parts, what) in widths.items():
        if width > parts or (name == "tp" and parts % width):
            expected = f"a width that the {parts} {what} of {model.id} can be shared out to"
            raise InputError(f"{row.place}: {name}", width, expected)


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
        scale_out_latency_s=SCALE_OUT_LATENCY_S,
    )

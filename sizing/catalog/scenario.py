"""A scenario, and everything that it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.config import (
    LENGTH_KEYS,
    Overrides,
    parse_scenario,
    read_toml,
    scenario_tables,
)
from minicluster.errors import SET, Fault, InputError
from minicluster.plan import Inputs
from minicluster.specs.lora import check_lora
from minicluster.specs.scenario import CATALOG, ScenarioSpec
from sizing.catalog.cluster import find_cluster
from sizing.catalog.engine import WITHOUT_LIBRARY, at_version, chosen_engine
from sizing.catalog.folder import find_file
from sizing.catalog.gpu import find_gpu, list_prices
from sizing.catalog.host_link import kv_offload, lora_spec
from sizing.catalog.model import chosen_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.calibration import CalibrationSpec
    from minicluster.specs.engine import EngineProfile
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.model import ModelSpec


def read_scenario(path: Path | str, overrides: Overrides = ()) -> ScenarioSpec:
    """
    Read a scenario.

    Args:
        path: TOML file, or the name of a shipped scenario (`llama-3.1-70b-h100`).
        overrides: texts `key=value`, or values by key; see `minicluster.config.Overrides`.

    Raises:
        InputError: no such scenario, or the first thing wrong with it.
    """
    expectation = "a TOML file or a shipped scenario"
    file = find_file("scenarios", str(path), place="scenario", expectation=expectation)
    return scenario_from(read_toml(file), overrides, place=str(path))


def scenario_from(raw: dict[str, Any], overrides: Overrides = (), *, place: str) -> ScenarioSpec:
    """Turn a parsed scenario into a spec, its trace read; see `parse_scenario`."""
    return parse_scenario(raw, overrides, place=place, take_trace=_take_trace)


def _take_trace(load: dict[str, Any], place: str) -> None:
    """Write the lengths of a trace into a load, and the rate of its busiest five minutes."""
    from minicluster.workload.traces import read_trace  # noqa: PLC0415  (few loads are of traces)
    from minicluster.workload.traffic import of_arrivals  # noqa: PLC0415

    trace = load["trace"]
    if load.get("classes"):
        expected, way_out = "no such key beside classes", "give each class its own `lengths`"
        raise InputError(f"{place}.trace", trace, expected, way_out)
    for key in LENGTH_KEYS[1:]:
        if load.get(key):
            expected = "no such key beside trace, which says the lengths"
            raise InputError(f"{place}.{key}", SET, expected, "leave one of them out")
    if not isinstance(trace, str):
        raise InputError(f"{place}.trace", trace, "the path of a trace")
    try:
        traffic = of_arrivals(read_trace(Path(trace), skip_unanswered=True), trace)
    except InputError as error:
        # A scenario has no options of its own for a trace.
        options = {"--time-unit": "--time-unit UNIT", "--skip-images": "--skip-images"}
        option = next((of for name, of in options.items() if name in (error.way_out or "")), None)
        way_out = f"run `sizing traffic {trace} {option} -o TRACE` first, and name TRACE here"
        where, out = f"{place}.trace: {error.place}", way_out if option else error.way_out
        raise InputError(where, error.value, error.expectation, out) from None
    load["lengths"] = [list(row) for row in traffic.lengths]
    if load.get("users") is None and load.get("requests_per_s") is None:
        load["requests_per_s"] = traffic.busiest_per_s
        if traffic.busiest_per_s is None:
            fault = Fault("has requests that all come at once, which is no rate")
            expected = "a trace of requests at different times, or beside requests_per_s"
            raise InputError(f"{place}.trace: {trace}", fault, expected)


def inputs_of(
    scenario: ScenarioSpec, place: str, *, calibration: CalibrationSpec | None = None
) -> Inputs:
    """
    Look up everything that a scenario names, and check that it fits together.

    Args:
        place: its file, named in errors.

    Raises:
        InputError: an unknown name, or values that contradict each other.
    """
    named = [find_gpu(name, place=f"{place}: search.gpus") for name in scenario.search.gpus]
    kinds = {gpu.name: gpu for gpu in named}
    chosen = replace(scenario, search=replace(scenario.search, gpus=tuple(kinds)))
    cluster = find_cluster(chosen.cluster, place=f"{place}: cluster")
    gpu = find_gpu(cluster.gpu, place=f"{place}: cluster.gpu")
    engine = chosen_engine(chosen.engine, [*kinds.values()] or [gpu], place=f"{place}: engine")
    used = [*kinds.values()] or [gpu]
    kv_offload(chosen.engine, used, engine=engine.name, place=f"{place}: engine")
    lora = lora_spec(chosen, used, engine=engine.name, place=f"{place}: engine")
    engine = at_version(replace(engine, lora=lora), engine.version, varied=_varied(chosen))
    model = _model(chosen, gpu, engine, place)
    if lora is not None:
        check_lora(lora, model, place=f"{place}: engine")
    inputs = Inputs(
        scenario=chosen,
        model=model,
        gpu=gpu,
        cluster=cluster,
        engine=engine,
        calibration=calibration,
        other_gpus=tuple(kind for name, kind in kinds.items() if name != gpu.name),
    )
    if chosen.cost.prices != CATALOG:
        return inputs
    unpriced = [name for name in inputs.kinds if name not in inputs.own_prices]
    return replace(inputs, list_prices=list_prices(unpriced, place=f"{place}: cost.prices"))


def _varied(scenario: ScenarioSpec) -> bool:
    """Say whether prompts differ in length."""
    return any(
        part.lengths or part.input_tokens is None or part.input_tokens.distribution != "fixed"
        for part in scenario.workload.parts
    )


def _model(scenario: ScenarioSpec, gpu: GpuSpec, engine: EngineProfile, place: str) -> ModelSpec:
    """
    Return the model with its load balancer of experts and draft head; refuse what there cannot be.

    Source:
        vLLM 0.29.0 config/parallel.py: enable_eplb, on CUDA and ROCm.
    """
    drafts, copies = engine.speculative_tokens, scenario.engine.redundant_experts
    model = chosen_model(scenario.model, place, drafts=drafts > 0)
    if engine.all_to_all is not None:
        _check_all_to_all(scenario, model, engine.all_to_all.name, place)
    if copies is not None:
        where, without = f"{place}: engine.redundant_experts", "leave out redundant_experts"
        if model.moe is None:
            raise InputError(where, copies, f"no such key: {model.id} has no experts", without)
        if gpu.kind == "cpu":
            expected = f"no such key: {engine.name} balances no experts on a CPU"
            raise InputError(where, copies, expected, without)
        model = replace(model, moe=replace(model.moe, redundant_experts=copies))
    if drafts:
        check_draft(model, engine, place=f"{place}: engine.speculative_tokens")
    for part in scenario.workload.parts:
        if part.longest_tokens > model.max_context_tokens:
            raise InputError(
                f"{place}: {part.place}.input_tokens + output_tokens",
                part.longest_tokens,
                f"at most {model.max_context_tokens}, the context of {model.id}",
                "shorten one of them, or take a model with a longer context",
            )
    return model


def _check_all_to_all(scenario: ScenarioSpec, model: ModelSpec, library: str, place: str) -> None:
    """
    Refuse a library for experts where there are none, or where one pool has both phases.

    Source:
        vLLM 0.29.0 config/compilation.py: no CUDA graphs with deepep_high_throughput, which decode
        needs; deepep_low_latency has room for few tokens of a rank (docs/model.md, eq. M9).
    """
    where, search = f"{place}: engine.all_to_all", scenario.search
    if model.moe is None:
        expected = f"no such key: {model.id} has no experts"
        raise InputError(where, library, expected, WITHOUT_LIBRARY)
    if search.pools == "mixed" or search.local_threshold_tokens:
        expected = "pools of their own for prefill and decode: it has other kernels for each"
        raise InputError(
            where, library, expected,
            'search.pools = "split" without local_threshold_tokens, or leave out all_to_all',
        )  # fmt: skip


def with_keys(inputs: Inputs, overrides: Sequence[str], place: str) -> Inputs:
    """
    Return the inputs of the same scenario with some keys changed, looked up again.

    Args:
        overrides: `key=value` each; see `parse_scenario`.
        place: what changes them, named in errors.

    Raises:
        InputError: an impossible key or value.
    """
    changed = scenario_from(scenario_tables(inputs.scenario), overrides, place=place)
    return inputs_of(changed, place, calibration=inputs.calibration)


def check_draft(model: ModelSpec, engine: EngineProfile, *, place: str) -> None:
    """Refuse drafts of a model without a head for them, or with one that the engine lacks."""
    draft = model.draft
    if draft is None:
        raise InputError(
            place,
            engine.speculative_tokens,
            f"0: {model.id} has no draft head (multi-token-prediction layers in its config.json, or"
            " a [draft] table in the catalog)",
            "take a model that has one, or leave out speculative_tokens and mean_accepted_tokens",
        )
    if draft.method not in engine.draft_methods:
        known = ", ".join(engine.draft_methods) or "none"
        expected = f"0: the draft head of {model.id} is {draft.method}; {engine.name}"
        raise InputError(
            place, engine.speculative_tokens, f"{expected} {engine.version} knows {known}"
        )

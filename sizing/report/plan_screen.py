"""A plan or predicted pools as sections: answer, evidence, details, next commands."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minicluster.engine_model.planned_limits import planned_lora
from minicluster.pages.page import ChartRow, DataTable, FactTable, Section
from minicluster.pages.shown import sections_of
from minicluster.plan import Inputs, KvOffload, Plan, Pool, Prediction, Validation, to_json
from minicluster.specs.slo import SloSpec
from minicluster.units import counted, gigabytes, seconds
from sizing.catalog.endpoint import endpoint_cost
from sizing.catalog.gpu import list_price
from sizing.latency.memory import slot_bytes
from sizing.network.network_cost import Spanning, spanning
from sizing.planner.plan import ClassPlans
from sizing.planner.predict import PoolPrediction
from sizing.planner.studies.cost import Running, running
from sizing.planner.studies.result import layout_of
from sizing.report.tables import (
    columns_table,
    facts,
    free_gpus,
    interval,
    latency_table,
    layout_table,
    parts_table,
    pool_name,
    sliced,
    verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from minicluster.pages.page import Cell
    from minicluster.plan.prediction import Confidence
    from minicluster.specs.workload import RequestClass, WorkloadSpec
    from sizing.planner.plan import Planned


@sections_of.register(Plan)
def plan_sections(plan: Plan) -> list[Section | ChartRow]:
    """Return the answer: pools, latencies beside limits, what it depends and rests on."""
    pools = pool_rows(plan.pools, plan.prediction, unit=_unit(plan.inputs))
    latencies = latency_rows(plan.prediction, plan.promises)
    return [
        Section(headline(plan), (pools,)),
        Section("", (latencies, FactTable((("Load", _load(plan)), *answer_facts(plan))))),
        facts("", evidence_facts(plan)),
    ]


VERBOSE = "--verbose shows TTFT by phase, batch limits and all percentiles"
"""What to ask next of predicted pools."""


def plan_details(plan: Plan) -> list[Section]:
    """Return every limit, percentile and factor of a plan."""
    return [
        layout_table(plan.pools, plan.prediction),
        latency_table(plan.prediction, plan.promises),
        facts("", detail_facts(plan)),
    ]


def detail_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield capacity, and what the plan's confidence allows for."""
    yield _capacity(plan.prediction)
    sure = plan.confidence
    if sure is not None and sure.requests:
        text = (
            f"with prefill steps {sure.prefill_factor:.2f} and decode steps"
            f" {sure.decode_factor:.2f} times as long as predicted; the SLO also holds with TTFT"
            f" {sure.ttft_factor:.2f} and TPOT {sure.tpot_factor:.2f} times as long as predicted"
        )
        yield "Simulated", text


@sections_of.register(PoolPrediction)
def prediction_sections(
    found: PoolPrediction, inputs: Inputs | None = None
) -> list[Section | ChartRow]:
    """
    Return the verdict of predicted pools, their latencies, and what stands behind them.

    Args:
        inputs: what they were predicted of; `None`: limits are not shown, nor the network.
    """
    predicted, unit = found.prediction, "GPU" if inputs is None else _unit(inputs)
    size = counted(sum(pool.gpus for pool in found.pools), unit)
    title = f"SLO met: {size} at {rate_text(found.workload)}"
    if found.misses:
        title = "\n".join(f"SLO missed: {miss}" for miss in found.misses)
    rows = [("Load", rate_text(found.workload))] if found.workload.has_users else []
    rows.append(_capacity(predicted))
    slos = {"": SloSpec()}
    if inputs is not None:
        rows += _network(found.pools, found.spanning, inputs.cluster.gpus_per_hb_domain)
        slos = inputs.scenario.promises
    return [
        Section(title, (pool_rows(found.pools, predicted, unit=unit),)),
        Section("", (latency_rows(predicted, slos), FactTable(tuple(rows)))),
        facts("", [("Measured", measured(found.validated_on))]),
    ]


def prediction_details(found: PoolPrediction, slos: Mapping[str, SloSpec]) -> list[Section]:
    """Return limits, percentiles, and phases of TTFT of predicted pools."""
    predicted = found.prediction
    return [
        layout_table(found.pools, predicted),
        latency_table(predicted, slos),
        parts_table(predicted),
    ]


def measured(found: Validation) -> str:
    """Return how many measurements stand behind a prediction, and how far off they were."""
    return f"{found.num_rows} rows: {found.note}" if found.num_rows else found.note


def pool_rows(pools: tuple[Pool, ...], prediction: Prediction, *, unit: str) -> DataTable:
    """Return one row per pool: replicas, GPUs (or cores, the *unit*), load, bottleneck."""
    rows = (
        (
            pool_name(pool, pools),
            f"{pool.replicas} x TP{sliced(pool)}"
            + (f", {pool.spare_replicas} spare" if pool.spare_replicas else ""),
            counted(pool.gpus, unit),
            f"{prediction.utilisation_fraction[pool.role]:.0%} of capacity",
            f"bound by {prediction.bottleneck[pool.role]}",
        )
        for pool in pools
    )
    return DataTable((), tuple(rows))


def latency_rows(prediction: Prediction, slos: Mapping[str, SloSpec]) -> DataTable:
    """
    Return one row per limit: the latency at the SLO's percentile, its interval, the verdict.

    Limits of several classes of requests follow one another.
    """
    rows = []
    for of, slo in slos.items():
        limits = slo.limits_s
        for name in ("ttft", "tpot", *(extra for extra in ("itl", "e2e") if extra in limits)):
            latency = prediction.latency(name, of)
            value_s, around = latency.at(slo.percentile), interval(latency, slo.percentile)
            beside: str | Cell = ""
            if name in limits:
                limit = f"SLO < {seconds(limits[name])}: "
                beside = verdict(holds=value_s <= limits[name], limit=limit)
            label = f"{of} {name.upper()} {slo.percentile}".strip()
            rows.append(
                (label, seconds(value_s), f"80% interval {around}" if around else "", beside)
            )
    return DataTable((), tuple(rows))


def headline(plan: Plan) -> str:
    """Return model, load, GPUs and nodes of a plan."""
    kinds = plan.gpus_by_kind.items()
    size = " and ".join(counted(gpus, f"{kind} GPU") for kind, gpus in kinds)
    if _unit(plan.inputs) == "core":
        size = counted(plan.cost.gpus, "core")
    classes = len(plan.workload.classes)
    load = f"{plan.model.id} at {rate_text(plan.workload)}"
    load += f" of {classes} classes" if classes else ""
    return f"{load}: {size} on {counted(plan.cost.nodes, 'node')}{free_gpus(plan)}"


def rate_text(load: WorkloadSpec | RequestClass) -> str:
    """Return the rate of a load, and the users that it comes from."""
    rate = f"{load.requests_per_s:g} requests/s"
    if load.users is None:
        return rate
    return f"{rate} ({load.users:,} users, {load.think_s:g} s think time)"


def lengths_text(load: RequestClass) -> str:
    """Return the tokens of prompts and answers of a load: `2,000 tokens in, 300 out`."""
    prompt, answer = (
        ("" if tokens and tokens.mean else "up to ") + f"{longest:,}"
        for tokens, longest in (
            (load.input_tokens, load.longest_prompt_tokens),
            (load.output_tokens, load.longest_answer_tokens),
        )
    )
    return f"{prompt} tokens in, {answer} out"


def _load(plan: Plan) -> str:
    parts = plan.workload.parts
    return "; ".join((f"{part.name}: " if part.name else "") + lengths_text(part) for part in parts)


def _unit(inputs: Inputs) -> str:
    return "core" if inputs.gpu.kind == "cpu" else "GPU"


def _capacity(prediction: Prediction) -> tuple[str, str]:
    return "Saturation", f"a pool saturates at {prediction.capacity_requests_per_s:.3g} requests/s"


def answer_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield headroom, cost, routing, and what else the answer depends on."""
    first, _, part = plan.headroom.binds.partition(": ")
    binds = f"{first} ({part})" if part else first
    most = plan.headroom.load_factor * plan.workload.requests_per_s
    held = f"{plan.headroom.load_factor:.2f} times this load ({most:.3g} requests/s)"
    yield "Headroom", f"{held}; then {binds}"
    cost = "; ".join(_cost_parts(running(plan)))
    if cost:
        yield "Cost", cost
    wide = spanning(plan.inputs, plan.pools, plan.step_model.path)
    yield from _network(plan.pools, wide, plan.inputs.cluster.gpus_per_hb_domain)
    if plan.confidence is not None and plan.confidence.other_pools:
        yield "Compared", plan.confidence.other_pools
    local = plan.routing.local_threshold_tokens
    if local:
        yield "Routing", f"prompts of up to {local:,} tokens are computed by their decode replica"
    if plan.engine.kv_offload is not None:
        yield "KV offload", offload_text(plan.engine.kv_offload)
    if plan.engine.lora is not None:
        yield "LoRA", lora_text(plan)
    if plan.endpoint is not None and (plan.endpoint.processes > 1 or gate_limit(plan)):
        yield "Endpoint", endpoint_text(plan)
    if not plan.deployable.ok:
        rule = plan.deployable.rule_broken
        yield "Deployment", f"not deployable by {plan.deployable.profile}: {rule}"


def endpoint_text(plan: Plan) -> str:
    """Say what the load takes of the hosts in front of the engines, and where that is too much."""
    load = plan.endpoint
    if load is None:
        return "not counted by the version that wrote this plan"
    processes = "1 process" if load.processes == 1 else f"{load.processes} processes"
    cores = load.cores + load.gate_cores
    text = (
        f"{processes} and a gate for {plan.prediction.output_tokens_per_s:,.0f} tokens/s:"
        f" {cores:.1f} cores and {gigabytes(load.memory_bytes, 1)} of the first node's host"
    )
    return f"{text}; {limit}" if (limit := gate_limit(plan)) else text


def gate_limit(plan: Plan) -> str:
    """Say so where the one gate carries less than the plan; or nothing."""
    carried = endpoint_cost().gate_requests_per_s
    rate = plan.workload.requests_per_s
    if rate <= carried:
        return ""
    return (
        f"the gate is the first limit: it carries about {carried:.0f} requests/s; split the load"
        f" over {math.ceil(rate / carried)} deployments"
    )


def offload_text(offload: KvOffload) -> str:
    """Say what each GPU's blocks have beside the GPU, and at which rates they come back."""
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s ({gpu})" for gpu, rate in
                      offload.host_bytes_per_s.items())  # fmt: skip
    text = f"{gigabytes(offload.host_bytes, 0)} of host memory a GPU, read at {rates}"
    if offload.disk_bytes_per_s:
        rate = f"{offload.disk_bytes_per_s / 1e9:.1f} GB/s"
        text += f"; {gigabytes(offload.disk_bytes, 0)} of disk, read at {rate}"
    return text


def lora_text(plan: Plan) -> str:
    """Say what slots for adapters take of each pool's GPUs, and how long the copy of one takes."""
    lora, parts = plan.engine.lora, []
    if lora is None:
        return ""
    for pool in plan.pools:
        limits = planned_lora(plan.deployment, pool)
        size = slot_bytes(plan.model, plan.inputs.engine, slicing=pool.slicing)
        copy_s = 0.0 if limits is None else limits.load_s
        parts.append(
            f"{pool.role} {gigabytes(size, 2)} a GPU (M10), {seconds(copy_s)} a copy (Q15)"
        )
    return (
        f"{lora.adapters} adapters of rank {lora.max_lora_rank} in {lora.max_loras} slots: "
        + "; ".join(parts)
    )


def _network(
    pools: Sequence[Pool], found: Sequence[Spanning], domain: int
) -> Iterator[tuple[str, str]]:
    """Yield what a step pays for leaving the HB domain, for each pool that does (eq. N2, N7)."""
    by_role = {pool.role: pool for pool in pools}
    for each in found:
        pool = by_role[each.role]
        wide = pool.tp * pool.dp
        what = f"EP {pool.ep}" if pool.ep > 1 else f"TP {wide}"
        cost = f"{seconds(each.beyond_s)} a step in {pool.role}"
        text = f"{what} over {-(-wide // domain)} domains costs {cost}"
        if each.pulling_fraction:
            text += (
                f"; KV pulls, {each.pulling_fraction:.1%} of the time on its NICs, about"
                f" {seconds(each.shared_s)} more, and take {each.pulls_longer_fraction:.0%} longer"
                " (not predicted)"
            )
        yield "Network", text


def _cost_parts(cost: Running) -> Iterator[str]:
    if cost.usd_per_million_output_tokens is not None:
        yield (
            f"{cost.usd_per_hour:,.2f} US dollars per hour,"
            f" {cost.usd_per_million_output_tokens:,.2f} per million output tokens"
            f" (price: {cost.price_source})"
        )
    if cost.power_w is not None:
        yield (
            f"{cost.power_w / 1e3:,.1f} kW, {cost.joules_per_output_token:.2f} J per output token"
            f" (power: {cost.power_source})"
        )


def evidence_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what stands behind the prediction."""
    yield "Confidence", _confidence(plan.confidence)
    steps = plan.calibration.error_fraction
    error = "the term-by-term model" if steps is None else f"{steps:.1%} from the measured steps"
    yield "Step times", f"{plan.calibration.name}, {plan.calibration.date}, {error}"
    yield "Measured", measured(plan.validated_on)
    assumed = plan.inputs.scenario.model.assumed_context_tokens
    if assumed is not None:
        yield "Assumed", f"{plan.model.id} serves {assumed:,} tokens (the scenario says so)"


def _confidence(found: Confidence | None) -> str:
    if found is None:
        return "simulated with steps as calibrated; a load test says how far off they are"
    if not found.requests:
        return "not simulated: the search was interrupted before it verified these sizes"
    simulated = f"{found.requests:,} simulated requests, {found.seeds} seeds"
    return f"{found.fraction:.0%} that the SLO holds: {simulated}"


def next_commands(plan: Plan, written: Path | None, *, verbose: bool) -> Section:
    """
    Return what to do with a plan.

    Args:
        written: the file that holds the plan; `None` if it was not written.
        verbose: whether `plan_details` are shown; `--verbose` is not advertised then.
    """
    name = "plan.json" if written is None else str(written)
    lines = []
    if written is None:
        lines.append(f"the same command with -o {name} writes the plan; then")
    commands = {f"sizing explain {name}": "each term of the prediction"}
    if plan.deployable.ok and plan.inputs.engine.deployable:
        commands[f"serving up {name}"] = "deploys the plan"
    elif not plan.inputs.engine.deployable:
        commands[f"sizing export {name}"] = f"writes the commands of {plan.engine.name}"
    width = max(map(len, commands))
    lines += [f"{command:{width}}  {effect}" for command, effect in commands.items()]
    more = [] if verbose else ["--verbose shows more"]
    if _has_list_price(plan):
        more.append("--set cost.prices=catalog shows the price")
    lines += [", ".join(more)] if more else []
    return facts("", [("Next", "\n".join(lines))])


def _has_list_price(plan: Plan) -> bool:
    """Say whether a plan has no price, and the lists have one of each of its GPUs."""
    unpriced = plan.cost.price_usd_per_hour is None
    return unpriced and all(list_price(gpu) is not None for gpu in plan.gpus_by_kind)


@sections_of.register(ClassPlans)
def classes_sections(found: ClassPlans) -> list[Section | ChartRow]:
    """Return the plans of shared and of own pools beside one another, then those chosen."""
    chosen = (section for plan in found.chosen.values() for section in plan_sections(plan))
    return [*choice_sections(found), *chosen]


def choice_sections(found: ClassPlans) -> list[Section]:
    """Return one row per plan, and one of own pools together, where there are own pools."""
    if not found.own:
        return []
    columns = class_plans_columns(found)
    title = "Pools for the classes of requests"
    return [columns_table(title, columns, words=("layout",), notes=[choice_line(found)])]


def class_plans_columns(found: ClassPlans) -> dict[str, list[Any]]:
    """Return a row per plan, and one of own pools together, which says what is cheaper."""
    heads = ("pools", "GPUs", "$/hour", "layout")
    columns = zip(heads, zip(*_rows(found), strict=True), strict=True)
    return {head: list(map(str, each)) for head, each in columns if head != "$/hour" or any(each)}


def _rows(found: ClassPlans) -> Iterator[tuple[str, int | str, str, str]]:
    each = {"shared by all classes": found.shared} if found.shared else {}
    each |= {f"own of {name}": one for name, one in found.own.items()}
    for pools, one in each.items():
        if isinstance(one, Plan):
            yield pools, one.cost.gpus, _price([one]), layout_of(one)
        else:
            yield pools, "none", "", one.reason
    own = found.own_plans.values()
    if own:
        yield "own together", sum(one.cost.gpus for one in own), _price(own), ""


def _price(plans: Iterable[Plan]) -> str:
    prices = [each.cost.price_usd_per_hour for each in plans]
    known = [each for each in prices if each is not None]
    return f"{sum(known):,.2f}" if len(known) == len(prices) else ""


def class_plans_json(found: ClassPlans) -> str:
    """Write all plans, each as its file has it, and which are the result."""

    def written(one: Planned | None) -> object:
        return json.loads(to_json(one)) if isinstance(one, Plan) else one and asdict(one)

    data = {
        "chosen": "shared" if "" in found.chosen else "own",
        "shared": written(found.shared),
        "own": {name: written(one) for name, one in found.own.items()},
    }
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def choice_line(found: ClassPlans) -> str:
    """Say which pools are the result, and why."""
    shared = "" in found.chosen
    what = "shared pools" if shared else "pools of their own"
    if found.shared is None or not found.own:
        return f"Result: {what}"
    if not (found.own_plans if shared else isinstance(found.shared, Plan)):
        other = "pools of their own" if shared else "shared pools"
        return f"Result: {what}; {other} do not hold every class's limits within the budget"
    return f"Result: {what}, {'not dearer' if shared else 'cheaper'}"

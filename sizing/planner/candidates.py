"""Configurations: layout, replicas and limits; and the layouts from which a search starts."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.errors import InputError
from sizing.planner import bounds
from sizing.planner.layout import (
    Layout,
    legal_shapes,
    memory_rule,
    pairing_rule,
    profile_rule,
)
from sizing.planner.slo import Check
from sizing.planner.tandem import PoolStage, TandemLoad

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minicluster.plan import Inputs, Plan, StepModel
    from minicluster.specs.slo import SloSpec
    from minicluster.specs.workload import WorkloadSpec
    from sizing.planner.error_model import StepErrors
    from sizing.planner.layout import LayoutShape
    from sizing.planner.step_models import StepModels

    Promises = Mapping[str, SloSpec]
    """Limits of each class of requests by its name; by an empty one where there are none."""

PRICED = {"usd": "price", "watts": "power"}
"""The key that an objective other than `gpus` needs of every GPU."""


def cost_of_gpu(inputs: Inputs, gpu: str) -> float:
    """
    Return the cost of one GPU in the objective's unit: 1, US dollars per hour, or watts.

    Raises:
        InputError: neither scenario nor catalog has the price or the power.
    """
    objective = inputs.scenario.search.objective
    if objective == "gpus":
        return 1.0
    one = {gpu: 1}
    value = inputs.price_usd_per_hour(one) if objective == "usd" else inputs.power_w(one)
    if value is None:
        expected = f"a {PRICED[objective]} of every GPU ({gpu})"
        raise InputError("search.objective", objective, expected, how_to_price(objective, gpu))
    return value


def how_to_price(objective: str, gpu: str) -> str:
    """Return the keys of a scenario that give what a GPU costs in an objective's unit."""
    if objective == "watts":
        return "cluster.power_w_per_gpu"
    return f'[search] prices_usd_per_gpu_hour = {{ "{gpu}" = 2.0 }}, or cost.prices = "catalog"'


def cost_of(inputs: Inputs, shape: LayoutShape) -> float:
    """Return the cost of one replica."""
    return shape.gpus * cost_of_gpu(inputs, shape.gpu)


def cost_of_plan(plan: Plan) -> float:
    """Return the cost of a plan, its spare replicas included."""
    return sum(pool.gpus * cost_of_gpu(plan.inputs, pool.gpu) for pool in plan.pools)


def cost(inputs: Inputs, chosen: Candidate) -> float:
    """Return the cost of a configuration."""
    return sum(
        count * cost_of(inputs, chosen.layout.shapes[role])
        for role, count in chosen.replicas.items()
    )


MAX_BATCH_SLOWDOWN = 1.5
"""Largest ratio of a prefill step's duration at the planned batch to that of a single prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """
    A configuration: a layout with replicas and limits, ready to be simulated.

    Attributes:
        max_batch: sequences for which one batch of a decode (or mixed) replica has KV cache.
        tandem: its queues, one for each batch of a replica; where pools are mixed its decode stage
            stands for both.
    """

    layout: Layout
    max_batch: int
    tandem: TandemLoad

    @property
    def replicas(self) -> dict[str, int]:
        """Replicas by role."""
        sizes = {"prefill": self.tandem.prefill, "decode": self.tandem.decode}
        sizes["mixed"] = sizes["decode"]
        return {
            role: sizes[role].replicas // shape.lanes for role, shape in self.layout.shapes.items()
        }

    @property
    def sizes(self) -> tuple[int, int]:
        """Replicas as `sized` takes them: of prefill, 0 where pools are mixed, and of decode."""
        found = self.replicas
        return found.get("prefill", 0), found.get("decode") or found["mixed"]

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        shapes = self.layout.shapes
        return sum(count * shapes[role].gpus for role, count in self.replicas.items())

    @property
    def gpus_by_kind(self) -> dict[str, int]:
        """GPUs of each kind."""
        found: dict[str, int] = {}
        for role, shape in self.layout.shapes.items():
            found[shape.gpu] = found.get(shape.gpu, 0) + self.replicas[role] * shape.gpus
        return found

    def __str__(self) -> str:
        """Write as `sizing predict` takes it."""
        shapes = self.layout.shapes
        several = len({shape.gpu for shape in shapes.values()}) > 1
        return " ".join(
            f"--{role} {count}x{shapes[role]}" + (f"@{shapes[role].gpu}" if several else "")
            for role, count in self.replicas.items()
        )

    def limited(self, max_batch_size: int) -> Candidate:
        """Return the same with another limit on the decode batch."""
        stage = replace(self.tandem.decode, max_batch_size=max_batch_size)
        return replace(self, tandem=replace(self.tandem, decode=stage))

    def at_rate(self, requests_per_s: float) -> Candidate:
        """Return the same under another rate of the same requests."""
        load = self.tandem.workload.at_rate(requests_per_s)
        return replace(self, tandem=replace(self.tandem, workload=load))

    def sized(self, prefill: int, decode: int) -> Candidate:
        """Return the same with other numbers of replicas; *prefill* is 0 where pools are mixed."""
        first, last = self.layout.prefill or self.layout.decode, self.layout.decode
        tandem = replace(
            self.tandem,
            prefill=replace(self.tandem.prefill, replicas=max(1, prefill) * first.lanes),
            decode=replace(self.tandem.decode, replicas=decode * last.lanes),
        )
        return replace(self, tandem=tandem)

    def with_errors(self, errors: StepErrors) -> Candidate:
        """Return the same with steps that take *errors* times as long as the model says."""
        model = _slowed(self.tandem.step_model, errors, mixed=self.layout.prefill is None)
        return replace(self, tandem=replace(self.tandem, step_model=model))


@lru_cache(maxsize=1024)
def _slowed(model: StepModel, errors: StepErrors, *, mixed: bool) -> StepModel:
    return model.slowed(prefill=errors.prefill, decode=errors.decode, mixed=mixed)


def one_replica_each(inputs: Inputs, layout: Layout, models: StepModels) -> Candidate:
    """Return one replica a pool, with the largest decode batch that memory and engine allow."""
    budget = {gpu: inputs.engine_on(gpu).max_num_batched_tokens for gpu in inputs.kinds}
    first = layout.prefill or layout.decode
    one = PoolStage(replicas=1, max_batch_size=1, max_batched_tokens=budget[first.gpu])
    local = 0 if layout.prefill is None else inputs.scenario.search.local_threshold_tokens or 0
    tandem = TandemLoad(
        workload=inputs.scenario.workload,
        step_model=models.of(layout),
        prefill=one,
        decode=replace(one, max_batched_tokens=budget[layout.decode.gpu]),
        local_threshold_tokens=local,
        routing=inputs.scenario.search.routing,
        tokens_per_step=inputs.engine.tokens_per_step,
    )
    mean, deviation = tandem.context
    most = models.max_decode_batch(layout.decode, context=mean, deviation=deviation)
    # Of a measured machine batches of prompts were not timed.
    alone = layout.prefill is None or inputs.calibration is not None
    batch = 1 if alone else prefill_batch(tandem)
    whole = replace(tandem, prefill=replace(one, max_batch_size=batch))
    found = Candidate(layout=layout, max_batch=most, tandem=whole).limited(max(1, most))
    return found.sized(1, 1)


def prefill_batch(tandem: TandemLoad) -> int:
    """
    Prompts that a prefill step should hold.

        largest k with t(k) <= 1.5 t(1) and k E[n] <= budget      (docs/model.md, eq. L1)

    A prompt that saturates compute by itself gains nothing from a batch, and waits for it.
    """
    most = int(tandem.prefill.max_batched_tokens // tandem.computed_tokens.mean())
    longest_s = MAX_BATCH_SLOWDOWN * bounds.prefill_batch_s(tandem, 1)
    batch = 1
    while batch < most and bounds.prefill_batch_s(tandem, batch + 1) <= longest_s:
        batch += 1
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """
    The layouts that `search.pools` allows, each with one replica per pool.

    Attributes:
        split: layouts of two pools whose unloaded latencies hold the SLO.
        mixed: layouts of one pool whose unloaded latencies hold the SLO.
        unloaded: every layout that fits memory, with its tightest limit at no load.
        unfit: the memory rule that each dropped shape breaks.
    """

    split: tuple[Candidate, ...]
    mixed: tuple[Candidate, ...]
    unloaded: tuple[tuple[Check, Candidate], ...]
    unfit: tuple[str, ...]


def with_search(inputs: Inputs, **keys: Any) -> Inputs:  # noqa: ANN401  (as `replace` has them)
    """Return the same with other values of keys of `[search]`."""
    search = replace(inputs.scenario.search, **keys)
    return replace(inputs, scenario=replace(inputs.scenario, search=search))


def with_load(inputs: Inputs, load: WorkloadSpec) -> Inputs:
    """Return the same under another load."""
    return replace(inputs, scenario=replace(inputs.scenario, workload=load))


def list_candidates(inputs: Inputs, models: StepModels, errors: StepErrors) -> Candidates:
    """
    List the layouts that rules, memory and the unloaded latencies allow.

    Raises:
        InputError: a degree that the scenario asks for cannot be had, or one pool of a machine that
            was calibrated: its steps that hold prompts and decoded tokens were not timed.
    """
    wanted, timed = inputs.scenario.search.pools, inputs.calibration is not None
    apart = inputs.engine.all_to_all is not None
    if wanted == "mixed" and timed:
        expected = '"split" or "any": a calibration times the steps of split pools'
        raise InputError("search.pools", wanted, expected)
    rules = {shape: memory_rule(inputs, shape) for shape in legal_shapes(inputs)}
    fit = [shape for shape, rule in rules.items() if rule is None]
    layouts = [Layout(prefill=p, decode=d) for p, d in product(fit, fit)]
    layouts = [each for each in layouts if pairing_rule(inputs.model, each) is None]
    if inputs.scenario.search.layouts == "deployable":
        layouts = [each for each in layouts if profile_rule(inputs, each) is None]
    slos = inputs.scenario.promises
    one_pool = [Layout(prefill=None, decode=shape) for shape in fit]
    split, mixed = (
        _unloaded([one_replica_each(inputs, each, models) for each in asked], slos, errors)
        for asked in (
            [] if wanted == "mixed" else layouts,
            [] if wanted == "split" or timed or apart else one_pool,
        )
    )
    return Candidates(
        split=tuple(candidate for check, candidate in split if check.ratio <= 1),
        mixed=tuple(candidate for check, candidate in mixed if check.ratio <= 1),
        unloaded=(*split, *mixed),
        unfit=tuple(rule for rule in rules.values() if rule is not None),
    )


def _unloaded(
    candidates: list[Candidate], slos: Promises, errors: StepErrors
) -> list[tuple[Check, Candidate]]:
    """Pair each candidate that has room for a sequence with its tightest limit at no load."""
    found = []
    for candidate in candidates:
        if candidate.max_batch:
            checks = unloaded_checks(candidate, slos, errors)
            found.append((max(checks, key=lambda check: check.ratio), candidate))
    return found


def unloaded_checks(candidate: Candidate, slos: Promises, errors: StepErrors) -> tuple[Check, ...]:
    """
    Compare the latencies of a request that is alone in the system with every limit of its class.

    Each limit has to hold with slow steps, and with latencies as far off as those measured.
    """
    one = candidate.limited(1).sized(1, 1)
    slow = _checks(one.with_errors(errors), slos)
    late = [check.with_errors(errors) for check in _checks(one, slos)]
    return tuple(max(pair, key=lambda check: check.ratio) for pair in zip(slow, late, strict=True))


def _checks(candidate: Candidate, slos: Promises) -> list[Check]:
    alone = (replace(candidate, tandem=each) for each in candidate.tandem.by_class)
    checks = (_unloaded_checks(one, *own) for one, own in zip(alone, slos.items(), strict=True))
    return list(chain.from_iterable(checks))


@lru_cache(maxsize=1024)
def _unloaded_checks(candidate: Candidate, of: str, slo: SloSpec) -> tuple[Check, ...]:
    tandem = candidate.tandem
    found = bounds.unloaded_s(tandem, split=candidate.layout.prefill is not None)
    if slo.e2e_s is not None:  # every prompt with its answer, or with every answer
        answers_s = (tandem.output_tokens - 1) * found["tpot"]
        together = np.add if tandem.paired else np.add.outer
        found["e2e"] = together(found["ttft"], answers_s).ravel()
    return tuple(
        Check(
            metric=name,
            percentile=slo.percentile,
            of=of,
            seconds=float(np.quantile(found[name], slo.level, method="lower")),
            limit_s=limit_s,
        )
        for name, limit_s in slo.limits_s.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedCandidate:
    """
    A layout and batch limit, with steps as slow as the confidence asks for.

    Attributes:
        slow: one replica per pool.
        lowest: fewest replicas of each pool by utilisation alone.
        bound: cost of those: no configuration of this layout and limit costs less.
    """

    slow: Candidate
    lowest: tuple[int, int]
    bound: float


def batch_limits(slow: Candidate, inputs: Inputs) -> Iterator[BoundedCandidate]:
    """
    Yield the decode batch limits that are worth sizing.

    The first is the largest whose full batches keep TPOT and fit memory; each next one is half of
    it, which interference between the pools may ask for; without that, none that costs twice as
    much as the largest. On a calibrated machine the largest batch that was measured comes before
    them: with it a plan can keep the engines that were measured.
    """
    first = np.inf
    limit = largest_batch(slow, inputs.scenario.promises)
    limits = [limit >> halvings for halvings in range(limit.bit_length())]
    if inputs.calibration is not None and 0 < limit < slow.max_batch:
        limits.insert(0, slow.max_batch)
    for limit in limits:
        one = slow.limited(limit)
        lowest = fewest_by_utilisation(one, inputs)
        bound = cost(inputs, one.sized(*lowest))
        if inputs.calibration is None and bound > 2 * first:
            return
        first = min(first, bound)
        yield BoundedCandidate(slow=one, lowest=lowest, bound=bound)


def largest_batch(candidate: Candidate, slos: Promises) -> int:
    """Return the largest batch limit at which full batches of mean context keep every limit."""
    limit_s = step_limit_s(candidate.tandem, slos)
    batches = range(1, candidate.max_batch + 1)
    return bisect_right(
        batches, limit_s, key=lambda batch: bounds.decode_step_s(candidate.tandem, batch)
    )


def step_limit_s(tandem: TandemLoad, slos: Promises) -> float:
    """
    Return the longest decode step that TPOT, ITL and E2E of every class allow.

    Of E2E it is what is left for each token of an answer at the percentile, after no time for TTFT.
    """
    found = [np.inf]
    for each, slo in zip(tandem.by_class, slos.values(), strict=True):
        if slo.tpot_s is not None:
            found.append(slo.tpot_s * tandem.tokens_per_step)
        if slo.itl_s is not None:
            found.append(slo.itl_s)
        if slo.e2e_s is not None:
            tokens = float(np.quantile(each.output_tokens, slo.level, method="lower"))
            found.append(slo.e2e_s / tokens * tandem.tokens_per_step)
    return min(found)


def utilisations(candidate: Candidate) -> dict[str, float]:
    """
    Return the share of each pool's capacity that the load takes, without queues and interference.

    No scheduling serves a prompt in less than its share of a full batch, nor a token in less than
    its share of a full decode step (docs/model.md, eq. T2 and T3).
    """
    tandem, split = candidate.tandem, candidate.layout.prefill is not None
    one = candidate.sized(1, 1).tandem
    decode_load = bounds.decode_load(one.only("decode"), split=split)
    if not split:
        return {"mixed": decode_load / tandem.decode.replicas}
    return {
        "prefill": bounds.prefill_load(one.only("prefill")) / tandem.prefill.replicas,
        "decode": decode_load / tandem.decode.replicas,
    }


def fewest_by_utilisation(candidate: Candidate, inputs: Inputs) -> tuple[int, int]:
    """Return the fewest replicas, as `Candidate.sized` takes them, at the allowed utilisation."""
    ceiling = inputs.scenario.search.max_utilisation_fraction
    used = utilisations(candidate.sized(0 if candidate.layout.prefill is None else 1, 1))
    fewest = {role: max(1, int(np.ceil(u / ceiling - 1e-9))) for role, u in used.items()}
    return fewest.get("prefill", 0), fewest.get("decode") or fewest["mixed"]

"""GPUs that a plan needs when one decision, or one forecast of the load, is changed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.routing import POLICIES
from minicluster.stats.shares import LEVELS
from sizing import catalog
from sizing.planner.studies.changes import (
    link_bytes_per_s,
    spine_oversubscription,
    with_demand,
    with_lengths,
    with_links,
    with_prefix,
    with_spine,
)
from sizing.planner.studies.defaults import DECISIONS
from sizing.planner.studies.result import StudyResult, figures, plan_scenario
from sizing.planner.workers import NO_WORKERS, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from minicluster.plan import Inputs

CONFIDENCES = (0.5, 0.8, 0.9, 0.95)
DTYPES = ("bf16", "fp8")
PREFIX_SHARES = (0.0, 0.25, 0.5)
SCALES = (0.75, 1.25)
"""Factors on numbers that are measured or forecast: lengths, rate."""
LINK_SCALES = (0.5, 2.0)
SPINES = (1.0, 2.0, 8.0, 32.0)
"""Downlinks per uplink of the tier that the pools meet in."""
BUDGETS = ("max_gpus", "max_usd_per_hour", "max_power_w")
"""Budgets that an infeasible result may exceed while it says how many GPUs hold the SLO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """
    The plan with one thing changed.

    Attributes:
        name: what is decided, or forecast.
        value: what it is changed to, as a scenario key where it is one.
        against_gpus: GPUs more than the plan as given; `None` where one of the two is unknown.
    """

    name: str
    value: str
    result: StudyResult
    against_gpus: int | None

    @property
    def gpus(self) -> int | None:
        """GPUs needed, also where they are beyond the budget; `None`: no number is enough."""
        return needed(self.result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions(Shown):
    """
    The plan as given, and its changes: the fewest GPUs first, those without a number last.

    Attributes:
        interrupted: whether it was stopped before the last change.
    """

    base: StudyResult
    rows: tuple[Decision, ...]
    interrupted: bool


def needed(result: StudyResult) -> int | None:
    """Return the GPUs of a result, also of one beyond a budget."""
    if result.plans:
        return figures(result.plans).gpus
    found = result.infeasible
    return found.nearest_gpus if found is not None and found.binds in BUDGETS else None


def decisions(
    inputs: Inputs,
    *,
    only: Collection[str] = (),
    workers: Workers = NO_WORKERS,
    progress: Callable[[int, int], None] | None = None,
) -> Decisions:
    """
    Plan anew with one decision or one forecast changed at a time.

    Args:
        only: names of what is changed, of `DECISIONS`; empty: everything.
        workers: processes that plan; they do not change the rows.
        progress: is told how many plans are done, and of how many.

    Raises:
        InputError: a name that is none.
        KeyboardInterrupt: Ctrl-C before the first change; after it the rows so far are returned.

    Ignores:
        Changes of two things at once: what they save together is not the sum.
    """
    unknown = sorted(set(only) - set(DECISIONS))
    if unknown:
        raise InputError("--only", ", ".join(unknown), "names among: " + ", ".join(DECISIONS))
    asked = [each for each in changes(inputs) if not only or each[0] in only]
    missing = sorted(set(only) - {name for name, _, _ in asked})
    if missing:
        known = dict.fromkeys(name for name, _, _ in changes(inputs))
        raise InputError(
            "--only", ", ".join(missing), f"what this scenario has to change: {', '.join(known)}"
        )
    tell = progress or (lambda *_: None)
    todo = [_Todo("the scenario as given", partial(_as_given, inputs))]
    todo += [_Todo(f"{name} {value}", change) for name, value, change in asked]
    results = workers.map(_planned, todo)
    base = next(results)
    before = needed(base)
    rows = []
    try:
        for at, ((name, value, _), result) in enumerate(zip(asked, results, strict=True), start=1):
            tell(at, 1 + len(asked))
            gpus = needed(result)
            against = None if gpus is None or before is None else gpus - before
            rows.append(Decision(name=name, value=value, result=result, against_gpus=against))
    except KeyboardInterrupt:
        if not rows:
            raise
    tell(1 + len(asked), 1 + len(asked))
    interrupted = len(rows) < len(asked)
    rows.sort(key=lambda row: math.inf if row.gpus is None else row.gpus)
    return Decisions(base=base, rows=tuple(rows), interrupted=interrupted)


class _Todo(NamedTuple):
    label: str
    change: Callable[[], Inputs]


def _as_given(inputs: Inputs) -> Inputs:
    return inputs


def _planned(todo: _Todo) -> StudyResult:
    try:
        changed = todo.change()
    except InputError as error:
        return StudyResult(label=todo.label, refused=str(error))
    result = plan_scenario(changed, todo.label, keep_refusals=True)
    if result.interrupted:
        raise KeyboardInterrupt(f"while planning {todo.label}")
    return result


def changes(inputs: Inputs) -> Iterator[tuple[str, str, Callable[[], Inputs]]]:
    """Yield name, value and changed inputs of every change that the scenario leaves room for."""
    for name, override in (*_choices(inputs), *_drafts(inputs)):
        yield name, override, _with_key(inputs, override)
    yield from _forecasts(inputs)


def _with_key(inputs: Inputs, override: str) -> Callable[[], Inputs]:
    return partial(catalog.with_keys, inputs, [override], "sizing decisions")


def _choices(inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Yield the keys of promise, pools and precision at other values than their own."""
    search, slo = inputs.scenario.search, inputs.scenario.slo
    tokens = inputs.engine_on(next(iter(inputs.kinds))).max_num_batched_tokens
    sureties = CONFIDENCES if inputs.calibration is None else ()
    class_pools = ("shared", "own") if len(inputs.scenario.workload.classes) > 1 else ()
    spares = {0, search.spare_replicas, search.spare_replicas + 1}
    asked: dict[tuple[str, str], tuple[object, tuple[object, ...]]] = {
        ("router", "search.routing"): (search.routing, tuple(POLICIES)),
        ("percentile", "slo.percentile"): (slo.percentile, tuple(LEVELS)),
        ("confidence", "search.confidence_fraction"): (search.confidence_fraction, sureties),
        ("pools", "search.pools"): (search.pools, ("split", "mixed")),
        ("class pools", "search.class_pools"): (search.class_pools, class_pools),
        ("chunk size", "engine.max_num_batched_tokens"): (tokens, (tokens // 2, 2 * tokens)),
    }
    if search.availability_fraction is None:
        asked["spares", "search.spare_replicas"] = search.spare_replicas, tuple(sorted(spares))
    asked["weights", "model.weight_dtype"] = inputs.model.weight_dtype, DTYPES
    asked["KV cache", "model.kv_dtype"] = inputs.model.kv_dtype, DTYPES
    if inputs.engine.all_to_all is not None:
        own_overlap = str(inputs.engine.two_batch_overlap).lower()
        asked["overlap", "engine.two_batch_overlap"] = own_overlap, ("true", "false")
    for (name, key), (own, values) in asked.items():
        for value in values:
            if value != own:
                yield name, f"{key}={value}"


def _drafts(inputs: Inputs) -> Iterator[tuple[str, str]]:
    engine = inputs.engine
    if not engine.speculative_tokens:
        return
    own = inputs.scenario.engine.mean_accepted_tokens or 0.0
    for value in (0.5 * own, (own + engine.speculative_tokens) / 2):
        yield "accepted drafts", f"engine.mean_accepted_tokens={value:.3g}"


def _forecasts(inputs: Inputs) -> Iterator[tuple[str, str, Callable[[], Inputs]]]:
    """Yield what a scenario states of the load and the network, and cannot decide."""
    load = inputs.scenario.workload
    for share in PREFIX_SHARES:
        other = with_prefix(inputs, share)
        if other != inputs:
            tokens = other.scenario.workload.longest_prefix_tokens
            yield "prefix hits", f"{tokens:,} tokens", partial(with_prefix, inputs, share)
    for scale in SCALES:
        change = f"{scale - 1:+.0%}"
        rate = f"workload.requests_per_s={load.requests_per_s * scale:g}"
        if load.has_users:
            yield "rate", f"users {change}", partial(with_demand, inputs, scale)
        else:
            yield "rate", rate, _with_key(inputs, rate)
        yield "prompts", change, partial(with_lengths, inputs, prompts=scale)
        yield "answers", change, partial(with_lengths, inputs, answers=scale)
    link = link_bytes_per_s(inputs)
    for scale in LINK_SCALES if link else ():
        yield "links", f"{(link or 0) * scale / 1e9:.3g} GB/s", partial(with_links, inputs, scale)
    spine = spine_oversubscription(inputs)
    for ratio in SPINES if spine else ():
        if ratio != spine:
            value = f"{ratio:g}:1 in place of {spine:g}:1"
            yield "spine", value, partial(with_spine, inputs, ratio)

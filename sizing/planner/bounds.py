"""The offered load, and bounds without queues: what no schedule beats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.plan import StepModel, step_time
from minicluster.specs.step import StepTable
from minicluster.specs.workload import WorkloadSpec
from minicluster.workload.arrivals import EquallyLikely, equally_likely
from sizing.latency.op import pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.step import StepSpec


QUANTILES = 128
"""Equally likely lengths that stand for a distribution."""

NEXT_TO_NONE = 1e-9
"""Share of the prompts that a prefill pool gets which is left with none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """
    Limits of one step.

    Attributes:
        max_batch_size: sequences, memory included; of a prefill pool prompts.
        max_batched_tokens: prompt tokens.
    """

    max_batch_size: int
    max_batched_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class OfferedLoad:
    """
    The requests of a scenario, and the steps of one batch of each pool that serves them.

    Attributes:
        split: whether a prefill pool computes the prompts above the local threshold; else one pool
            does both, and *prefill* is of its steps that hold a prompt.
        local_threshold_tokens: longest prompt that its decode replica computes.
        tokens_per_step: mean tokens per sequence and decode step; above 1 with drafts.
    """

    workload: WorkloadSpec
    step_model: StepModel
    prefill: StepLimits
    decode: StepLimits
    split: bool
    local_threshold_tokens: int
    tokens_per_step: float

    @cached_property
    def all_tokens(self) -> NDArray[np.float64]:
        """Prompt tokens, cached ones included: equally likely lengths, ascending."""
        return self._requests.input_tokens

    @cached_property
    def num_local(self) -> int:
        """Number of those lengths that the decode pool computes."""
        return int(np.searchsorted(self.all_tokens, self.local_threshold_tokens, side="right"))

    @cached_property
    def computed_tokens(self) -> NDArray[np.float64]:
        """Prompt tokens that the prefill pool computes, cached prefix left out: equally likely."""
        return np.maximum(1.0, self.all_tokens[self._remote] - self.cached_tokens)

    @property
    def cached_tokens(self) -> NDArray[np.float64]:
        """Tokens of the cached prefix of each of `computed_tokens`."""
        return self.prefix_tokens[self._remote]

    @property
    def _remote(self) -> slice:
        return slice(min(self.num_local, len(self.all_tokens) - 1), None)

    @cached_property
    def prefix_tokens(self) -> NDArray[np.float64]:
        """Tokens in the prefix cache of each of `all_tokens`."""
        return self._of_class([float(part.prefix_tokens) for part in self.workload.parts])

    @property
    def prefill_requests_per_s(self) -> float:
        """Rate of prompts that the prefill pool computes."""
        share = max(1 - self.num_local / len(self.all_tokens), NEXT_TO_NONE)
        return self.workload.requests_per_s * share

    @cached_property
    def output_tokens(self) -> NDArray[np.float64]:
        """Output lengths, equally likely."""
        return self._requests.output_tokens

    @cached_property
    def answer_moments(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """
        Mean and mean square of the answers to each of `all_tokens`.

        Of lengths that were counted together, those of the answer to it; else those of its class.
        """
        if self.paired:
            return self.output_tokens, self.output_tokens**2
        answers = [each.output_tokens for each in self.by_class]
        means = [float(each.mean()) for each in answers]
        return self._of_class(means), self._of_class([float(np.mean(o**2)) for o in answers])

    @property
    def paired(self) -> bool:
        """Whether each answer belongs to the prompt beside it."""
        return all(part.lengths for part in self.workload.parts)

    def _of_class(self, values: list[float]) -> NDArray[np.float64]:
        return np.array(values)[self._requests.class_of]

    @property
    def _requests(self) -> EquallyLikely:
        return equally_likely(self.workload, QUANTILES)

    @cached_property
    def by_class(self) -> tuple[OfferedLoad, ...]:
        """The same under the requests of each class alone; itself where there are none."""
        if not self.workload.classes:
            return (self,)
        return tuple(replace(self, workload=each) for each in self.workload.apart)

    @cached_property
    def context(self) -> tuple[float, float]:
        """
        Mean and standard deviation of the tokens that a sequence in decode has cached.

            E = E[n o] / E[o] + E[o^2] / (2 E[o])      (docs/model.md, eq. T5)

        A long answer is met more often than it is drawn, and half of it is there on average; of
        several classes each counts as often as its answers are met. Prompts that do not depend on
        answers are met as they are drawn: E[n o] = E[n] E[o].
        """
        if self.workload.classes:
            return self._context_of_classes()
        prompts, out = self.all_tokens, self.output_tokens
        if self.paired:
            mean = float(np.mean(out * (prompts + out / 2)) / np.mean(out))
            # Of a sequence that is met, all of the answer up to its end is equally likely.
            met = float(np.mean(out * (prompts**2 + prompts * out + out**2 / 3)) / np.mean(out))
            return mean, max(0.0, met - mean**2) ** 0.5
        mean = float(np.mean(out**2) / (2 * np.mean(out)))
        square = float(np.mean(out**3) / (3 * np.mean(out)))
        spread = float(np.var(prompts)) + square - mean**2
        return float(np.mean(prompts)) + mean, float(np.sqrt(spread))

    def _context_of_classes(self) -> tuple[float, float]:
        met = [
            each.workload.requests_per_s * float(each.output_tokens.mean())
            for each in self.by_class
        ]
        means, deviations = np.array([each.context for each in self.by_class]).T
        mean = np.average(means, weights=met)
        spread = np.average(deviations**2 + (means - mean) ** 2, weights=met)
        return float(mean), float(np.sqrt(spread))


FIXED_POINT_STEPS = 50
"""Iterations of the decode batch: a step of twice the batch takes less than twice as long."""

PRICES, PRICE_ROUNDS = 12, 4
"""Prices of a token that are tried at a time, and how often between the best of them."""


def prompt_prefill_s(load: OfferedLoad) -> NDArray[np.float64]:
    """Return the seconds to prefill each of the load's prompts alone (eq. T1)."""
    return _prompt_s(
        load.step_model.prefill,
        load.computed_tokens,
        load.cached_tokens,
        load.prefill.max_batched_tokens,
    )


def _prompt_s(
    step: StepSpec, tokens: NDArray[np.float64], cached: NDArray[np.float64], budget: int
) -> NDArray[np.float64]:
    """
    Return the seconds of prompts that are alone in their steps, in chunks of the token budget.

        S = sum over i < k of t(budget, p + i budget) + t(n - k budget, p + k budget),
        k = ceil(n / budget) - 1      (docs/model.md, eq. T1)
    """
    whole = np.ceil(tokens / budget) - 1
    last = step_time.prefill_s(step, tokens - whole * budget, cached + whole * budget)
    if not whole.any():
        return last
    # A step is linear in the tokens before its chunk.
    before = cached + budget * np.maximum(0.0, whole - 1) / 2
    return np.asarray(last + whole * step_time.prefill_s(step, budget, before))


def prefill_batch_s(load: OfferedLoad, prompts: int) -> float:
    """Return the mean seconds of a step that prefills so many equal prompts (eq. S2)."""
    step, cached = load.step_model.prefill, load.cached_tokens
    return float(step_time.prefill_s(step, load.computed_tokens, cached, prompts).mean())


def decode_step_s(load: OfferedLoad, batch: float) -> float:
    """Return the seconds of a decode step of mean context (eq. S3)."""
    return load.step_model.decode.step_s(0, 0, batch, batch * load.context[0])


def pace_s(load: OfferedLoad, batch: float) -> float:
    """Return the seconds a token of sequences that decode, whose steps may give several tokens."""
    return decode_step_s(load, batch) / load.tokens_per_step


def busy_prefill(load: OfferedLoad) -> float:
    """
    Return the prefill replicas that the load keeps busy all the time.

        lambda E[S] where a step holds one prompt; else lambda (u E[n] + w / b_max + c E[pairs]),
        the largest with u n + w <= t(n, 0, 0, 0) at every n that a step may hold
        (docs/model.md, eq. T2)
    """
    most, rate = load.prefill.max_batch_size, load.prefill_requests_per_s
    if most == 1:
        return rate * float(prompt_prefill_s(load).mean())
    computed, cached = load.computed_tokens, load.cached_tokens
    least = _Corners.of(load.step_model.prefill, load.prefill.max_batched_tokens, 0)
    least = replace(least, sequences=np.ones_like(least.tokens))  # the step itself is shared
    attended = float(pairs(computed, cached).mean())
    return rate * least.seconds(float(computed.mean()), 1 / most, pairs=attended)


def busy_decode(load: OfferedLoad) -> float:
    """
    Return the decode or mixed replicas that the load keeps busy all the time.

        lambda (u E[n] + v E[steps] + c E[pairs] + d E[context]),
        the largest with u n + v B <= t(n, B, 0, 0) at every n and B that a step may hold
        (docs/model.md, eq. T3; of a mixed pool eq. L6)
    """
    prompts, cached = load.all_tokens, load.prefix_tokens
    local = np.arange(len(prompts)) < (load.num_local if load.split else len(prompts))
    computed = np.where(local, np.maximum(1.0, prompts - cached), 0.0)
    # The step that computes a prompt gives a token; of a pulled one the last token comes again.
    own, pulled = local.astype(float), 1.0 - local
    mean, square = load.answer_moments
    each = load.tokens_per_step
    steps = (mean - own) / each
    # E[k (each k - 1) / 2] of so many steps k: the tokens that the context has grown by in them.
    grown = (square - (2 * own + 1) * mean + 2 * own) / 2 / each - (1 - 1 / each) * (mean - own) / 2
    stage = load.decode
    least = _Corners.of(load.step_model.decode, stage.max_batched_tokens, stage.max_batch_size)
    return load.workload.requests_per_s * least.seconds(
        float(computed.mean()),
        float(steps.mean()),
        pairs=float(pairs(computed, cached).mean()),
        context=float(np.mean(steps * (prompts - pulled) + grown)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corners:
    """
    Steps between which those of a pool lie: no step takes less than the line between two of them.

    Attributes:
        tokens, sequences, fixed_s: of each, without attention; arrays of one shape.
        per_pair_s, per_context_token_s: the least of any step.
    """

    tokens: NDArray[np.float64]
    sequences: NDArray[np.float64]
    fixed_s: NDArray[np.float64]
    per_pair_s: float
    per_context_token_s: float

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, step: StepSpec, max_tokens: int, max_sequences: int) -> _Corners:
        """Return the points of a table up to the limits of a step, or the limits themselves."""
        if isinstance(step, StepTable):
            tokens, columns = _up_to(step.tokens, [*step.fixed_s, step.per_key_s], max_tokens)
            fixed, key_s = columns[:-1].T, columns[-1]
            sequences, rows = _up_to(
                step.sequences, [*fixed, step.per_context_token_s], max_sequences
            )
            fixed_s, context_s = rows[:-1], float(rows[-1].min())
            pair_s = float((key_s[1:] / tokens[1:]).min())
        else:
            knees = [knee for knee in step.knee_tokens if knee < max_tokens]
            tokens = np.array([0.0, *knees, max_tokens])
            sequences = np.unique([0.0, 1.0, max_sequences])
            fixed_s = np.array([[step.step_s(n, 0, b, 0) for b in sequences] for n in tokens])
            pair_s, context_s = step.per_pair_s, step.per_context_token_s
        n, b = np.meshgrid(tokens, sequences, indexing="ij")
        return cls(
            tokens=n.ravel()[1:],
            sequences=b.ravel()[1:],
            fixed_s=fixed_s.ravel()[1:],
            per_pair_s=pair_s,
            per_context_token_s=context_s,
        )

    def seconds(
        self, tokens: float, sequences: float, *, pairs: float, context: float = 0.0
    ) -> float:
        """
        Return the least seconds of steps that hold so much together, whatever shares a step.

        The dual of a linear program: every price of a token, u, at which no step is worth more
        than it takes gives a bound, and the largest is concave in u.
        """
        prompts, decodes = self.tokens > 0, self.sequences > 0
        low, high = 0.0, float((self.fixed_s[prompts] / self.tokens[prompts]).min())
        n, b, fixed_s = (each[decodes] for each in (self.tokens, self.sequences, self.fixed_s))
        for _ in range(PRICE_ROUNDS):
            prices = np.linspace(low, high, PRICES if tokens else 1)
            rest = ((fixed_s - prices[:, None] * n) / b).min(axis=1)
            worth = prices * tokens + rest * sequences
            best = int(worth.argmax())
            low, high = prices[max(best - 1, 0)], prices[min(best + 1, len(prices) - 1)]
        attention_s = self.per_pair_s * pairs + self.per_context_token_s * context
        return float(worth[best]) + attention_s


def _up_to(
    grid: Sequence[float], rows: Sequence[Sequence[float]], limit: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cut a grid at a limit, or extend it, and interpolate rows over it there."""
    points, values = np.asarray(grid), np.asarray(rows)
    if limit <= 0:
        return points[:1], values[:, :1]
    at = int(np.clip(np.searchsorted(points, limit) - 1, 0, len(points) - 2))
    share = (limit - points[at]) / (points[at + 1] - points[at])
    end = values[:, at] + share * (values[:, at + 1] - values[:, at])
    kept = points < limit
    return np.append(points[kept], limit), np.column_stack([values[:, kept], end])


def steady_decode(load: OfferedLoad, lanes: int) -> tuple[float, float]:
    """
    Return the seconds per token and the sequences of a decode replica in the steady state.

        t = t_d(b) / (1 + a) / (1 - rho_p), b = (lambda / D) E[o] t,
        rho_p = 0 where pools are split
        (docs/model.md, eq. T6)

    Returns:
        Infinite both, where the load exceeds the largest batch.

    Ignores:
        That batches vary, and the other pool's interference.
    """
    rate = load.workload.requests_per_s / lanes
    left = 1.0 if load.split else 1 - rate * float(prompt_prefill_s(load).mean())
    tokens_per_s = rate * float(load.output_tokens.mean())
    seconds, batch = np.inf, 1.0
    for _ in range(FIXED_POINT_STEPS):
        seconds = pace_s(load, max(1.0, batch)) / left if left > 0 else np.inf
        before, batch = batch, tokens_per_s * seconds
        if batch > load.decode.max_batch_size:
            return np.inf, np.inf
        if batch == before:
            break
    return float(seconds), float(batch)


def unloaded_s(load: OfferedLoad) -> dict[str, NDArray[np.float64]]:
    """
    Return the latencies of requests that are alone in the system.

        split: TTFT = request + S + pull + t_d(1, n - 1);  aggregated: request + S
        ITL = t_d(1, n + o / 2 - 1), TPOT = ITL / (1 + a)      (docs/model.md, eq. T4)

    Returns:
        Seconds by latency, `ttft`, `tpot` and `itl`: of equally likely requests.

    Ignores:
        The other pool's interference, which is not there without load.
    """
    model, cached, prompts = load.step_model, load.prefix_tokens, load.all_tokens
    computed = np.maximum(1.0, prompts - cached)
    local_s = model.path.request_s + _prompt_s(
        model.decode, computed, cached, load.decode.max_batched_tokens
    )
    if load.split:
        remote_s = model.path.request_s + _prompt_s(
            model.prefill, computed, cached, load.prefill.max_batched_tokens
        )
        remote_s = remote_s + step_time.transfer_s(model.path, prompts)
        remote_s = remote_s + step_time.decode_s(model.decode, 1, prompts - 1)
        local = prompts <= load.local_threshold_tokens
        ttft = np.where(local, local_s, remote_s)
    else:
        ttft = local_s
    context = prompts.mean() + load.output_tokens / 2 - 1
    gap = step_time.decode_s(model.decode, 1, context)
    pace = gap / load.tokens_per_step
    return {"ttft": np.sort(ttft), "tpot": np.sort(pace), "itl": np.sort(gap)}


def interference(
    load: OfferedLoad, lanes: int, *, prefill_busy: float, mean_batch: float
) -> dict[str, float]:
    """
    Return by role the share by which the other pool slows steps, at a run's mean state.

        prefill: f_p + L g_p + h_p / S;  decode: (1 + u f_d) / (1 - joins/s h_d) - 1
        (docs/model.md, eq. Q9)

    Args:
        load: of pools on the same cores; zero where they share nothing.
        lanes: batches of the decode pool.
        prefill_busy: u, share of the time in which a prefill replica computes.
        mean_batch: L, sequences of a decode replica.
    """
    between = load.step_model.interference
    alone_s = float(prompt_prefill_s(load).mean())
    joins_per_s = load.workload.requests_per_s / lanes
    delayed = min(0.99, joins_per_s * between.decode_per_request_s)
    return {
        "prefill": between.prefill_fraction
        + mean_batch * between.prefill_per_sequence_fraction
        + between.prefill_per_request_s / alone_s,
        "decode": (1 + prefill_busy * between.decode_fraction) / (1 - delayed) - 1,
    }

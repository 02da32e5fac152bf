"""The load: how often requests come, and how long they are."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from minicluster.errors import SET, InputError
from minicluster.specs.checks import Count, NotNegative, Positive, Spec, Whole, choice
from minicluster.specs.slo import ClassSlo, SloSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

NEEDED = {"fixed": {"mean"}, "uniform": {"low", "high"}, "lognormal": {"median", "sigma", "high"}}
"""Keys that each distribution of lengths needs; it takes no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Spec):
    """
    A distribution of token counts, each at least 1.

    `fixed`: always `mean`. `uniform`: integers from `low` to `high`, both included.
    `lognormal`: median `median`, standard deviation of the logarithm `sigma`, cut at `high`.

    Attributes:
        distribution: fixed, uniform or lognormal.
        mean: fixed: the length.
        low: uniform: the shortest.
        high: uniform and lognormal: the longest.
        median: lognormal: half of the lengths are below.
        sigma: lognormal: standard deviation of the logarithm.
    """

    distribution: Annotated[str, choice(*NEEDED)] = "fixed"
    mean: Count | None = None
    low: Count | None = None
    high: Count | None = None
    median: Positive | None = None
    sigma: NotNegative | None = None

    def _check(self) -> None:
        needed = NEEDED[self.distribution]
        for key in ("mean", "low", "high", "median", "sigma"):
            value = getattr(self, key)
            if key in needed and value is None:
                raise InputError(key, None, f"a number: lengths are {self.distribution}")
            if key not in needed and value is not None:
                raise InputError(key, value, f"no such key: lengths are {self.distribution}")
        floor = self.low if self.low is not None else self.median
        if floor is not None and self.high is not None and floor > self.high:
            raise InputError("high", self.high, f"at least {floor}")

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """Return the distribution that always gives *tokens*."""
        return cls(mean=tokens)

    @property
    def max_tokens(self) -> int:
        """Largest length that can occur."""
        return self.high if self.high is not None else int(self.mean or 0)


LengthRow = tuple[int, int, int]
"""Tokens of a prompt, tokens of its answer, and how many requests have these lengths."""

OF_A_CLASS = ("input_tokens", "output_tokens", "lengths", "prefix_tokens", "users", "think_s")
"""Keys beside its rate that a load has without classes, and each class where there are some."""

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")  # names of classes: they stand in names of files
MOST_TOKENS = 100_000_000  # most tokens of a prompt or an answer; more are a slip
MOST_ROWS = 4_096  # most rows of `lengths`: a plan holds them, and every page of it

LEAST_CLASS_FRACTION = 0.02
"""Least share of the requests that a class may have: one simulation of them all has too few of a
rarer one to prove its p99."""

RATE_TOLERANCE = 1e-9
"""Relative difference of the classes' rates together from the whole rate that is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass(Spec):
    """
    `[[workload.classes]]`: requests of one kind, with a rate, lengths and limits of their own.

    Attributes:
        name: lower-case letters, digits, - and _; plans of a class's own pool are named by it.
        requests_per_s: mean arrival rate of the class; with users it follows from theirs.
        input_tokens: prompt length, a number or a distribution.
        output_tokens: answer length, a number or a distribution.
        lengths: in place of both, as in `[workload]`.
        prefix_tokens: of the input, already in the prefix cache.
        users: in place of a rate, as in `[workload]`.
        think_s: likewise.
        slo: limits of this class; those absent are those of `[slo]`.
    """

    name: str
    requests_per_s: Positive
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    lengths: tuple[LengthRow, ...] = ()
    prefix_tokens: Whole = 0
    users: Count | None = None
    think_s: NotNegative = 0.0
    slo: ClassSlo = field(default_factory=ClassSlo)

    def _check(self) -> None:
        if self.users is None and self.think_s:
            expected = "no such key without users"
            raise InputError(self._place("think_s"), self.think_s, expected, "give users, too")
        self._check_lengths()
        if self.prefix_tokens >= self.longest_prompt_tokens:
            expected = f"less than the longest input, {self.longest_prompt_tokens}"
            raise InputError(self._place("prefix_tokens"), self.prefix_tokens, expected)

    def _check_lengths(self) -> None:
        for key in ("input_tokens", "output_tokens"):
            length = getattr(self, key)
            if self.lengths and length is not None:
                expected = "no such key beside lengths, which say both"
                raise InputError(self._place(key), SET, expected, "leave one of them out")
            if not self.lengths and length is None:
                other = "" if self.name else ", or [[workload.classes]]"
                expected = f"a value, or `lengths`{other}"
                raise InputError(self._place(key), None, expected)
        if len(self.lengths) > MOST_ROWS:
            expected = f"at most {MOST_ROWS:,} rows; `sizing traffic` writes so many"
            raise InputError(self._place("lengths"), f"{len(self.lengths):,} rows", expected)
        for at, row in enumerate(self.lengths):
            if min(row) < 1 or max(row) > MOST_TOKENS:
                expected = f"prompt tokens, answer tokens and requests, each 1 to {MOST_TOKENS:,}"
                raise InputError(self._place(f"lengths.{at}"), list(row), expected)

    @property
    def place(self) -> str:
        """How errors name its table."""
        return f"workload.classes[{self.name}]" if self.name else "workload"

    @property
    def shortest_prompt_tokens(self) -> int:
        """Tokens of the shortest prompt; of a lognormal distribution those of the longest."""
        if self.input_tokens is None:
            return min(prompt for prompt, _, _ in self.lengths)
        return self.input_tokens.low or self.input_tokens.max_tokens

    @property
    def longest_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        if self.input_tokens is None:
            return max(prompt for prompt, _, _ in self.lengths)
        return self.input_tokens.max_tokens

    @property
    def longest_answer_tokens(self) -> int:
        """Tokens of the longest answer."""
        if self.output_tokens is None:
            return max(answer for _, answer, _ in self.lengths)
        return self.output_tokens.max_tokens

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request: its prompt and its answer together."""
        if self.lengths:
            return max(prompt + answer for prompt, answer, _ in self.lengths)
        return self.longest_prompt_tokens + self.longest_answer_tokens

    def _place(self, key: str) -> str:
        return f"{self.place}.{key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec(Spec):
    """
    Poisson arrivals with given lengths, or of several classes.

    Attributes:
        requests_per_s: mean arrival rate; with classes their sum, or the sum to scale them to; with
            users it follows from their number, their think time and the predicted latency.
        input_tokens: prompt length, a number or a distribution; needed without classes.
        output_tokens: answer length, a number or a distribution; needed without classes.
        lengths: in place of both, requests as they were counted: rows of prompt tokens, answer
            tokens and number of requests, as `sizing traffic` writes them; a request's prompt and
            answer are drawn together.
        prefix_tokens: of the input, already in the prefix cache.
        users: in place of a rate: so many users, each of whom sends the next request a think time
            after the last answer.
        think_s: from an answer to the same user's next request.
        trace: file of arrivals, of which `lengths` and, where it is not given, the rate of the
            busiest five minutes are taken.
        classes: kinds of requests that come together, in place of the lengths here.
        lora_adapters: LoRA adapters, of which each request names one; 0: none do.
        lora_popularity_exponent: s of the adapters' shares of the requests, the i-th one's being
            as 1/i^s; 0: all alike.
    """

    _TABLE: ClassVar[str] = "workload"

    requests_per_s: Positive
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    lengths: tuple[LengthRow, ...] = ()
    prefix_tokens: Whole = 0
    users: Count | None = None
    think_s: NotNegative = 0.0
    trace: str | None = None
    classes: tuple[RequestClass, ...] = ()
    lora_adapters: Whole = 0
    lora_popularity_exponent: NotNegative = 0.0

    def _check(self) -> None:
        if self.classes:
            self._check_classes()
        else:
            _ = self.parts  # refuses what is missing or impossible

    def _check_classes(self) -> None:
        for key in (*OF_A_CLASS, "trace"):
            if getattr(self, key):
                way_out = "give each class its own, or leave out [[workload.classes]]"
                raise InputError(self._place(key), SET, "no such key beside classes", way_out)
        self._check_names()
        total = sum(part.requests_per_s for part in self.classes)
        if not math.isclose(total, self.requests_per_s, rel_tol=RATE_TOLERANCE):
            expected = f"{total:g}, the rates of the classes together"
            raise InputError(
                self._place("requests_per_s"), self.requests_per_s, expected, "leave it out"
            )
        for part in self.classes:
            if part.requests_per_s < LEAST_CLASS_FRACTION * total:
                raise InputError(
                    f"{part.place}.requests_per_s",
                    part.requests_per_s,
                    f"at least {LEAST_CLASS_FRACTION:.0%} of the {total:g} requests/s of all",
                    "leave the class out, and plan it as a scenario of its own",
                )

    def _check_names(self) -> None:
        names = [part.name for part in self.classes]
        for at, name in enumerate(names):
            if not NAME.fullmatch(name):
                expected = "at most 40 lower-case letters, digits, - and _"
                raise InputError(f"workload.classes.{at}.name", name, expected)
            if name in names[:at]:
                way_out = "rename one, or add their rates"
                raise InputError(f"workload.classes.{at}.name", name, "no name twice", way_out)

    @property
    def parts(self) -> tuple[RequestClass, ...]:
        """The classes; without any the requests as one, with an empty name."""
        if self.classes:
            return self.classes
        own = {key: getattr(self, key) for key in OF_A_CLASS}
        return (RequestClass(name="", requests_per_s=self.requests_per_s, **own),)

    @property
    def apart(self) -> tuple[WorkloadSpec, ...]:
        """Each class as a workload of its own; without any this one."""
        if not self.classes:
            return (self,)
        return tuple(
            replace(
                self,
                classes=(),
                requests_per_s=part.requests_per_s,
                **{key: getattr(part, key) for key in OF_A_CLASS},
            )
            for part in self.classes
        )

    def promises(self, slo: SloSpec) -> dict[str, SloSpec]:
        """Return the limits of each class by its name; without any *slo* by an empty one."""
        return {part.name: part.slo.over(slo) for part in self.parts}

    def at_rate(self, requests_per_s: float) -> WorkloadSpec:
        """Return the same requests at another rate, of no users; the shares of the classes stay."""
        factor = requests_per_s / self.requests_per_s
        classes = tuple(
            replace(part, requests_per_s=part.requests_per_s * factor, users=None, think_s=0.0)
            for part in self.classes
        )
        return replace(
            self, requests_per_s=requests_per_s, users=None, think_s=0.0, classes=classes
        )

    def with_rates(self, rates: Mapping[str, float]) -> WorkloadSpec:
        """Return the same load, users included, at other rates of some classes by name."""
        parts = tuple(
            replace(part, requests_per_s=rates.get(part.name, part.requests_per_s))
            for part in self.parts
        )
        total = sum(part.requests_per_s for part in parts)
        return replace(self, requests_per_s=total, classes=parts if self.classes else ())

    @property
    def has_users(self) -> bool:
        """Tell whether users are given in place of a rate, for the load or for a class."""
        return self.users is not None or any(part.users is not None for part in self.classes)

    @property
    def demand_key(self) -> str:
        """Key that says how much is asked for."""
        return "workload.users" if self.has_users else "workload.requests_per_s"

    @property
    def rarest_fraction(self) -> float:
        """Share of the requests that the rarest class has; 1 without classes."""
        return min(part.requests_per_s for part in self.parts) / self.requests_per_s

    @property
    def longest_answer_tokens(self) -> int:
        """Tokens of the longest answer."""
        return max(part.longest_answer_tokens for part in self.parts)

    @property
    def longest_prefix_tokens(self) -> int:
        """Tokens of the longest prefix in the cache."""
        return max(part.prefix_tokens for part in self.parts)

"""A job: endpoint, load, window and SLO of one run, kept in `run.json`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loadtest.run.schedule import ArrivalShape, Window, draw
from minicluster.config import parse, read_json
from minicluster.errors import InputError
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import WorkloadSpec
from minicluster.units import scaled

if TYPE_CHECKING:
    from pathlib import Path

    from minicluster.workload.schedule import ScheduledRequest

SCHEMA_VERSION = 1  # version of `run.json`

MIN_WARMUP_S = 5.0
"""Shortest default warm-up: connections, first compilations and CPU clocks take seconds."""

MIN_TIMEOUT_S = 30.0
"""Shortest default time limit of a request: below it a pause of the endpoint is no failure."""

FIRST_PLAIN_TOKEN = 3
"""Least token id in prompts: lower ids are special (unknown, begin, end) in most vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """
    The form of chat messages whose length in tokens is known without a tokenizer.

    Attributes:
        words: words of one token each at any place after the first word.
        separator: text between words.
        overhead_tokens: tokens of the model's chat template around one message.
    """

    words: tuple[str, ...]
    separator: str
    overhead_tokens: int

    def text(self, numbers: list[int]) -> str:
        """Return the message of the words with these numbers."""
        return self.separator.join([self.words[number] for number in numbers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """
    Everything that the client needs for one run.

    Attributes:
        host: base address of the endpoint, without `/v1`.
        prompt_salt: new for each run, so that no prompt of an earlier run is in the endpoint's
            prefix cache.
        timeout_s: time limit of one request, from its send.
        num_requests: number of measured requests; a closed loop keeps its window open for them.
        workers: client processes that share the schedule.
        plan: name of the plan's copy beside `run.json`; `None`: a run without a plan.
        chat: form of chat messages; `None`: completions of token ids.
        insecure: whether any certificate is accepted, and no API key sent.
        adapters: names of LoRA adapters, the most popular one first.
        plain: whether requests have OpenAI's own parameters only, so that answers end when the
            model ends them.
        limit_name: parameter that limits the length of an answer.
        remarks, caveats: what a reader of the run's figures has to know, in sentences, and in a
            few words that stand beside the figures.
        queued_in_client: whether requests waited in the client for a place among those in flight.
        slowdown: seconds of the clock that each second of simulated engines takes; `None`: they
            are real.
    """

    schema_version: int = SCHEMA_VERSION
    host: str
    model: str
    vocab_size: int
    seed: int
    prompt_salt: int
    workload: WorkloadSpec
    slo: SloSpec
    window: Window
    timeout_s: float
    shape: ArrivalShape = field(default_factory=ArrivalShape)
    num_requests: int = 0
    workers: int = 1
    plan: str | None
    chat: ChatForm | None = None
    insecure: bool = False
    adapters: tuple[str, ...] = ()
    slowdown: float | None = None
    plain: bool = False
    limit_name: str = "max_tokens"
    remarks: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    queued_in_client: bool = False

    def by_the_clock(self) -> Job:
        """Return the job with its times in seconds of the clock, as the client needs them."""
        factor = self.slowdown or 1.0
        return replace(scaled(self, factor), window=scaled(self.window, factor))

    def requests(self) -> tuple[ScheduledRequest, ...]:
        """Draw the schedule; equal jobs have equal schedules."""
        return draw(
            self.workload, self.shape, self.window, seed=self.seed, num_requests=self.num_requests
        )


def default_warmup_s(e2e_s: float) -> float:
    """
    Return the warm-up: three times the expected time of a request, at least 5 s.

    After one such time the number of requests in the system no longer grows because the run has
    just begun; the other two let queues settle.
    """
    return max(MIN_WARMUP_S, 3 * e2e_s)


def slowest_s(slo: SloSpec, workload: WorkloadSpec) -> float:
    """Return the time that the SLO allows the longest request."""
    return max(
        each.e2e_s or each.ttft_s + (each.per_token_s or 0.0) * part.longest_answer_tokens
        for part, each in zip(workload.parts, workload.promises(slo).values(), strict=True)
    )


def timeout_s(slo: SloSpec, workload: WorkloadSpec) -> float:
    """Return the time limit of a request: ten times what the SLO allows, at least 30 s."""
    return max(MIN_TIMEOUT_S, 10 * slowest_s(slo, workload))


def read_job(path: Path) -> Job:
    """Read a job. Raises InputError: no such file, or not one that this version wrote."""
    raw = read_json(path, "a run that `loadtest run` wrote")
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema_version", version, str(SCHEMA_VERSION))
    return parse(Job, raw, place=str(path))

"""Forecasts and decisions computed by hand from docs/model.md, eq. G1 to G5; costs of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import StepModel
from minicluster.specs.slo import SloSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from serving.admission.policy import (
    AdmissionForecast,
    InflightLoad,
    Margin,
    RequestCost,
    Shed,
    decide,
    forecast,
    request_cost,
    work_s,
)
from serving.request.length import DEFAULT_ESTIMATE, TokenEstimate
from serving.request.validation import check

if TYPE_CHECKING:
    from serving.protocol.endpoint_config import EndpointConfig


def _step(**terms: float) -> StepCoefficients:
    """Return a pool's step of these terms alone."""
    names = ("base_s", "stream_s", "per_prefill_token_s", "per_sequence_s", "per_pair_s")
    none = dict.fromkeys((*names, "per_context_token_s", "error_fraction"), 0.0)
    limits = {"max_tokens": 1000, "max_batch": 16, "max_context_tokens": 2000}
    return StepCoefficients(**{**none, **terms}, **limits)  # type: ignore[arg-type]


MODEL = StepModel(
    prefill=_step(base_s=10e-3, per_prefill_token_s=0.1e-3, per_pair_s=1e-6),
    decode=_step(
        base_s=4e-3, per_prefill_token_s=0.05e-3, per_sequence_s=0.1e-3, per_context_token_s=1e-6
    ),
    path=PathCoefficients(
        request_s=1e-3, transfer_base_s=2e-3, transfer_per_token_s=0.01e-3, error_fraction=0.0
    ),
    interference=Interference(
        prefill_fraction=0.2,
        prefill_per_sequence_fraction=0.01,
        prefill_per_request_s=3e-3,
        decode_fraction=0.25,
        decode_per_request_s=50e-3,
    ),
)
ASKED = RequestCost(prompt_tokens=100, output_tokens=20)
"""Alone its prompt takes 10 + 0.1 x 100 + 0.001 x 100 x 101/2 = 25.05, its pull 2 + 1 = 3."""

IDLE = InflightLoad(
    prefill_work_s=0.0,
    prefill_replicas=2,
    sequences=0,
    context_tokens=0.0,
    decode_replicas=2,
    max_batch_size=8,
    max_step_tokens=1000,
)
BUSY = replace(IDLE, prefill_work_s=80e-3, sequences=7, context_tokens=1880.0)
"""With it four sequences on each decode replica, and (1880 + 120)/2 = 1000 cached tokens."""

BUSY_STEP_MS = (4 + 0.1 * 4 + 0.001 * 1000) * 1.25
LOCAL = replace(ASKED, local=True)


def _seen(asked: RequestCost, load: InflightLoad) -> tuple[float, float]:
    """Return TTFT and TPOT in milliseconds."""
    found = forecast(MODEL, asked, load)
    return found.ttft_s * 1e3, found.tpot_s * 1e3


def test_on_an_emptied_cluster_a_request_waits_for_its_own_work() -> None:
    """Path, prompt, pull and a step with one sequence, which no prefill slows down."""
    prompt_ms = 25.05 * (1 + 0.2) + 3
    step_ms = 4 + 0.1 + 0.001 * 120
    assert _seen(ASKED, BUSY.emptied()) == pytest.approx((1 + prompt_ms + 3 + step_ms, step_ms))


def test_prefill_slows_decode_for_the_share_of_the_time_in_which_it_is_busy() -> None:
    """A quarter slower while prefill computes: a tenth if that is two fifths of the time."""
    load = replace(BUSY, prefill_busy_fraction=0.4)
    assert _seen(ASKED, load)[1] == pytest.approx(BUSY_STEP_MS / 1.25 * 1.1)
    alone_ms = 4 + 0.1 + 0.001 * 120
    assert _seen(ASKED, replace(IDLE, prefill_busy_fraction=0.4))[1] == pytest.approx(
        alone_ms * 1.1
    )


def test_work_ahead_is_shared_and_the_batch_slows_everything() -> None:
    """Half of the work ahead, the prompt beside 3.5 sequences, the pull, a step of a full batch."""
    prompt_ms = 25.05 * (1 + 0.2 + 3.5 * 0.01) + 3
    ttft_ms = 1 + 80 / 2 + prompt_ms + 3 + BUSY_STEP_MS
    assert _seen(ASKED, BUSY) == pytest.approx((ttft_ms, BUSY_STEP_MS))


@pytest.mark.parametrize(("sequences", "beyond"), [(7, 0), (8, 1), (11, 4)])
def test_beyond_the_places_a_request_waits_for_answers_to_end(sequences: int, beyond: int) -> None:
    """Of eight places each that it lacks comes free in an eighth of an answer of 20 tokens."""
    full = replace(BUSY, prefill_work_s=0.0, max_batch_size=4, sequences=sequences)
    prompt_ms = 25.05 * (1 + 0.2 + sequences / 2 * 0.01) + 3
    wait_ms = beyond / 8 * 20 * BUSY_STEP_MS
    ttft_ms = 1 + prompt_ms + 3 + wait_ms + BUSY_STEP_MS
    assert _seen(ASKED, full) == pytest.approx((ttft_ms, BUSY_STEP_MS))


def test_the_answers_of_one_request_decode_together() -> None:
    """Four answers of one request are one batch, whatever the number of replicas."""
    four = replace(ASKED, sequences=4)
    step_ms = 4 + 0.1 * 4 + 0.001 * 4 * 120
    assert _seen(four, IDLE.emptied())[1] == pytest.approx(step_ms)


def test_a_prompt_that_decode_computes_needs_no_pull() -> None:
    """Its work ahead and the tokens between are decode's: half of 60, half of 4 a token."""
    load = replace(BUSY, local_work_s=60e-3, local_per_token_s=4e-3)
    own_ms = 4 + 0.05 * 100
    assert _seen(LOCAL, load) == pytest.approx(
        (1 + 60 / 2 + own_ms + BUSY_STEP_MS, BUSY_STEP_MS + 4 / 2)
    )


def test_a_step_computes_at_most_its_budget_of_prompts() -> None:
    """A thousand prompt tokens are 50 ms, however much waits to be computed between tokens."""
    load = replace(BUSY, local_per_token_s=400e-3)
    assert _seen(LOCAL, load)[1] == pytest.approx(BUSY_STEP_MS + 50)


def test_prompts_that_decode_computes_fill_its_steps() -> None:
    """Three hundred tokens are 15 ms, and three tenths of a step with all sequences in it."""
    both = replace(LOCAL, sequences=2, other_tokens=(200,))
    step_ms = (4 + 0.1 * 9 / 2 + 0.001 * (1880 + 240) / 2) * 1.25
    assert work_s(MODEL, both, BUSY) * 1e3 == pytest.approx(0.05 * 300 + 0.3 * step_ms)


@pytest.mark.parametrize(("work_ahead_s", "retry_after_s"), [(2.1, 1), (10.0, 5), (1000.0, 60)])
def test_a_shed_request_gets_when_the_queue_is_short_enough(
    work_ahead_s: float, retry_after_s: int
) -> None:
    """What is late beyond a limit of 1 s, in whole seconds up to a minute."""
    load = replace(BUSY, prefill_work_s=work_ahead_s)
    found = decide(MODEL, SloSpec(ttft_s=1.0, tpot_s=0.05), ASKED, load, Margin())
    assert isinstance(found, Shed)
    assert (found.reason, found.retry_after_s) == ("ttft", retry_after_s)


@pytest.mark.parametrize(
    ("margin", "limit_ms"),
    [
        (Margin(), 84.68675),
        (Margin(ttft_s=10e-3), 94.68675),
        # Of the room between 41.28, which an idle cluster takes, and the limit six tenths at most.
        (Margin(ttft_s=1.0), 41.28 + (84.68675 - 41.28) / 0.4),
        # What is typical counts whole, up to nine tenths.
        (Margin(ttft_s=1.0, median_ttft_s=1.0), 41.28 + (84.68675 - 41.28) / 0.1),
    ],
)
def test_a_request_is_admitted_up_to_the_limit_less_the_margin(
    margin: Margin, limit_ms: float
) -> None:
    """Forecast and margin, within its bounds, just fit into the limit."""
    above, below = (SloSpec(ttft_s=limit_ms * part / 1e3, tpot_s=0.05) for part in (1.001, 0.999))
    assert isinstance(decide(MODEL, above, ASKED, BUSY, margin), AdmissionForecast)
    assert isinstance(decide(MODEL, below, ASKED, BUSY, margin), Shed)


@pytest.mark.parametrize(("median_s", "kind"), [(0.0, AdmissionForecast), (0.5, Shed)])
def test_stalls_shed_nothing_but_a_wrong_model_does(median_s: float, kind: type) -> None:
    """Paces beyond every limit shed only if they are typical: 6.75 + 0.6 or 0.9 x (12 - 4.22)."""
    margin = Margin(tpot_s=0.5, median_tpot_s=median_s)
    assert isinstance(decide(MODEL, SloSpec(ttft_s=1.0, tpot_s=0.012), ASKED, BUSY, margin), kind)


LONG = [{"role": "user", "content": "x" * 4000}]


def _asked(
    kind: str,
    body: dict[str, object],
    config: EndpointConfig,
    size: TokenEstimate = DEFAULT_ESTIMATE,
) -> RequestCost:
    """Return the cost of a request as the endpoint does."""
    limits = {"model_id": config.model_id, "max_model_len": config.max_model_len}
    return request_cost(kind, check(kind, body, **limits), config, size)


@pytest.mark.parametrize(
    ("kind", "lengths", "tokens"),
    [
        ("completions", {}, 16),
        ("completions", {"max_tokens": None}, 10),
        ("completions", {"max_tokens": 900, "max_completion_tokens": 1}, 900),
        ("completions", {"max_tokens": 0, "echo": True}, 1),
        ("chat", {}, 10),
        ("chat", {"max_tokens": 900}, 900),
        ("chat", {"max_tokens": 900, "max_completion_tokens": 7}, 7),
    ],
)
def test_answers_are_as_long_as_the_engine_makes_them(
    config: EndpointConfig, kind: str, lengths: dict[str, object], tokens: int
) -> None:
    """Named, or vLLM's default, or where that is all the context the longest planned."""
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **lengths}
    assert _asked(kind, body, config).output_tokens == tokens


def test_a_chat_is_sized_by_its_messages(config: EndpointConfig) -> None:
    """Neither its size nor its way depend on a prompt that the engine does not read."""
    for prompt in ("x", ["a", "b"], [[1], [2]]):
        asked = _asked("chat", {"messages": LONG, "prompt": prompt}, config)
        assert (asked.prompt_tokens, asked.sequences, asked.local) == (1000, 1, False)


def test_the_size_of_text_is_the_learned_one(config: EndpointConfig) -> None:
    """Overhead and all, but never more than the context; ids are counted."""
    size = TokenEstimate(overhead_tokens=100, tokens_per_byte=0.5)
    assert _asked("completions", {"prompt": "x" * 400}, config, size).prompt_tokens == 300
    assert _asked("completions", {"prompt": [5] * 400}, config, size).prompt_tokens == 400
    assert _asked("chat", {"messages": LONG}, config, size).prompt_tokens == 2048

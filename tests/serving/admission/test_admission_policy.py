"""Forecasts and decisions: by hand from docs/model.md, eq. G1 to G5, and for whatever numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.plan import StepModel
from minicluster.specs.slo import SloSpec
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from serving.admission.controller import Margin, Shed, decide
from serving.protocol.messages import EndpointConfig
from serving.request.cost import (
    DEFAULT_ESTIMATE,
    AdmissionForecast,
    InflightLoad,
    PoolInFlight,
    RequestCost,
    TokenEstimate,
    forecast,
    request_cost,
    request_size,
    work_s,
)
from serving.request.validation import check

MOST = {
    "base_s": 0.02,
    "stream_s": 0.02,
    "per_prefill_token_s": 1e-4,
    "per_sequence_s": 1e-3,
    "per_pair_s": 1e-8,
    "per_context_token_s": 1e-6,
    "error_fraction": 0.5,
}
"""The largest coefficients of a step that are drawn."""


def _step(**terms: float) -> StepCoefficients:
    """Return a pool's step of these terms alone."""
    limits = {"max_tokens": 1000, "max_batch": 16, "max_context_tokens": 2000}
    return StepCoefficients(**{**dict.fromkeys(MOST, 0.0), **terms}, **limits)  # type: ignore[arg-type]


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

LOCAL = replace(ASKED, local=True)
IDLE = InflightLoad(
    prefill=PoolInFlight(2),
    decode=PoolInFlight(2),
    max_batch_size=8,
    max_step_tokens=1000,
    prefill_busy_fraction=1.0,
    tokens_per_step=1.0,
)
BUSY = replace(
    IDLE,
    prefill=PoolInFlight(2, work_s=80e-3),
    decode=PoolInFlight(2, sequences=7, context_tokens=1880.0),
)
"""With it four sequences on each decode replica, and (1880 + 120)/2 = 1000 cached tokens."""

ALONE_MS = 4 + 0.1 + 0.001 * 120
BUSY_STEP_MS = (4 + 0.1 * 4 + 0.001 * 1000) * 1.25
PROMPT_MS = 25.05 * (1 + 0.2 + 3.5 * 0.01) + 3


def _decoding(load: InflightLoad, **changes: float) -> InflightLoad:
    return replace(load, decode=replace(load.decode, **changes))


def _full(sequences: int) -> InflightLoad:
    """Return two replicas of four places each, with an empty prefill pool."""
    load = replace(BUSY, prefill=PoolInFlight(2), max_batch_size=4)
    return _decoding(load, sequences=sequences)


def _full_ms(sequences: int, beyond: int) -> float:
    """Return the TTFT there: each place that is lacking comes free in an eighth of an answer."""
    own_ms = 25.05 * (1 + 0.2 + sequences / 2 * 0.01) + 3
    return 1 + own_ms + 3 + beyond / 8 * 20 * BUSY_STEP_MS + BUSY_STEP_MS


@pytest.mark.parametrize(
    ("asked", "load", "ttft_ms", "tpot_ms"),
    [
        # Path, prompt, pull and a step of one sequence, which no prefill slows down.
        (ASKED, BUSY.emptied(), 1 + 25.05 * 1.2 + 3 + 3 + ALONE_MS, ALONE_MS),
        # A quarter slower while prefill computes: a tenth if that is two fifths of the time.
        (ASKED, replace(IDLE, prefill_busy_fraction=0.4), None, ALONE_MS * 1.1),
        (ASKED, replace(BUSY, prefill_busy_fraction=0.4), None, BUSY_STEP_MS / 1.25 * 1.1),
        # Half of the work ahead, the prompt beside 3.5 sequences, the pull, a step of the batch.
        (ASKED, BUSY, 1 + 80 / 2 + PROMPT_MS + 3 + BUSY_STEP_MS, BUSY_STEP_MS),
        *((ASKED, _full(n), _full_ms(n, n - 7), BUSY_STEP_MS) for n in (7, 8, 11)),
        # Four answers of one request are one batch, whatever the number of replicas.
        (replace(ASKED, sequences=4), IDLE.emptied(), None, 4 + 0.1 * 4 + 0.001 * 4 * 120),
        # Decode's own prompts need no pull: half of the work of 60 there, half of 4 a token.
        (
            LOCAL,
            _decoding(BUSY, work_s=60e-3, per_token_s=4e-3),
            1 + 60 / 2 + (4 + 0.05 * 100) + BUSY_STEP_MS,
            BUSY_STEP_MS + 4 / 2,
        ),
        # A step computes no more than its budget of a thousand prompt tokens, 50 ms.
        (LOCAL, _decoding(BUSY, per_token_s=400e-3), None, BUSY_STEP_MS + 50),
    ],
)
def test_forecasts(
    asked: RequestCost, load: InflightLoad, ttft_ms: float | None, tpot_ms: float
) -> None:
    """TTFT and TPOT are those of eq. G2 to G4."""
    found = forecast(MODEL, asked, load)
    assert found.tpot_s * 1e3 == pytest.approx(tpot_ms)
    assert ttft_ms is None or found.ttft_s * 1e3 == pytest.approx(ttft_ms)


def test_prompts_that_decode_computes_fill_its_steps() -> None:
    """Three hundred tokens are 15 ms, and three tenths of a step with all sequences in it."""
    both = replace(LOCAL, sequences=2, other_tokens=(200,))
    step_ms = (4 + 0.1 * 9 / 2 + 0.001 * (1880 + 240) / 2) * 1.25
    assert work_s(MODEL, both, BUSY) * 1e3 == pytest.approx(0.05 * 300 + 0.3 * step_ms)


QUEUED = [
    (replace(BUSY, prefill=PoolInFlight(2, work_s=work)), s) for work, s in ((2.1, 1), (10.0, 5))
]


@pytest.mark.parametrize(
    ("asked", "load", "reason", "retry_after_s"),
    [
        # What is late beyond a limit of 1 s, up to a minute; the client gets whole seconds.
        *((ASKED, load, "ttft", seconds) for load, seconds in QUEUED),
        (ASKED, replace(BUSY, prefill=PoolInFlight(2, work_s=1000.0)), "ttft", 60),
        # An answer of a thousand tokens at (4 + 0.4 + 1.49) x 1.25 = 7.36 ms each.
        (replace(ASKED, output_tokens=1000), BUSY, "tpot", 8),
    ],
)
def test_a_shed_request_gets_when_to_retry(
    asked: RequestCost, load: InflightLoad, reason: str, retry_after_s: int
) -> None:
    """When the queue is short enough, or when an answer like it has ended."""
    found = decide(MODEL, SloSpec(ttft_s=1.0, tpot_s=0.007), asked, load, Margin())
    assert isinstance(found, Shed)
    assert (found.reason, found.refusal.retry_after_s) == (reason, retry_after_s)
    assert f"in {retry_after_s} s" in found.refusal.message


FORECAST_MS, IDLE_MS = 84.68675, 41.28
ROOM_MS = FORECAST_MS - IDLE_MS


@pytest.mark.parametrize(
    ("margin", "limit_ms"),
    [
        (Margin(), FORECAST_MS),
        (Margin(ttft_s=10e-3), FORECAST_MS + 10),
        # Of the room between what an idle cluster takes and the limit six tenths at most.
        (Margin(ttft_s=1.0), IDLE_MS + ROOM_MS / 0.4),
        # What is typical counts whole, up to nine tenths.
        (Margin(ttft_s=1.0, median_ttft_s=1.0), IDLE_MS + ROOM_MS / 0.1),
    ],
)
def test_a_request_is_admitted_up_to_the_limit_less_margin(margin: Margin, limit_ms: float) -> None:
    """Where forecast and margin just fit; with nothing ahead, always."""
    above, below = (SloSpec(ttft_s=limit_ms * part / 1e3, tpot_s=0.05) for part in (1.001, 0.999))
    assert isinstance(decide(MODEL, above, ASKED, BUSY, margin), AdmissionForecast)
    assert isinstance(decide(MODEL, below, ASKED, BUSY, margin), Shed)
    assert isinstance(decide(MODEL, below, ASKED, BUSY.emptied(), margin), AdmissionForecast)


@pytest.mark.parametrize(("median_s", "kind"), [(0.0, AdmissionForecast), (0.5, Shed)])
def test_stalls_shed_nothing_but_a_wrong_model_does(median_s: float, kind: type) -> None:
    """Paces beyond every limit shed only if they are typical: 6.75 + 0.6 or 0.9 x (12 - 4.22)."""
    margin = Margin(tpot_s=0.5, median_tpot_s=median_s)
    slo = SloSpec(ttft_s=1.0, tpot_s=0.012)
    assert isinstance(decide(MODEL, slo, ASKED, BUSY, margin), kind)


SLOS = st.builds(SloSpec, ttft_s=st.floats(0.05, 2), tpot_s=st.floats(0.005, 0.1))
STEPS = st.builds(_step, **{name: st.floats(0, most) for name, most in MOST.items()})
POOLS = st.builds(
    PoolInFlight,
    replicas=st.integers(1, 4),
    work_s=st.floats(0, 3),
    sequences=st.integers(0, 60),
    context_tokens=st.floats(0, 60_000),
    per_token_s=st.floats(0, 0.1),
)
DECISIONS = st.fixed_dictionaries(
    {
        "model": st.builds(replace, st.just(MODEL), prefill=STEPS, decode=STEPS),
        "slo": SLOS,
        "cost": st.builds(
            RequestCost,
            prompt_tokens=st.integers(1, 3000),
            output_tokens=st.integers(1, 300),
            sequences=st.integers(1, 4),
            other_tokens=st.lists(st.integers(1, 3000), max_size=2).map(tuple),
            local=st.booleans(),
        ),
        "load": st.builds(
            InflightLoad,
            prefill=POOLS,
            decode=POOLS,
            max_batch_size=st.integers(1, 32),
            max_step_tokens=st.integers(1, 4000),
            prefill_busy_fraction=st.floats(0, 1),
            tokens_per_step=st.floats(1, 4),
        ),
        "margin": st.builds(Margin, **dict.fromkeys(Margin.__slots__, st.floats(0, 1))),
    }
)
"""The arguments of `decide`."""

TIMES = ("base_s", "stream_s", "per_prefill_token_s", "per_sequence_s", "per_pair_s")
AHEAD = ("work_s", "sequences", "context_tokens", "per_token_s")


def _scaled(value: Any, factor: float, *names: str) -> Any:  # noqa: ANN401
    """Return *value* with these fields times *factor*; whole numbers are rounded down."""
    fields = {name: getattr(value, name) for name in names}
    return replace(value, **{name: type(old)(old * factor) for name, old in fields.items()})


@pytest.mark.parametrize(
    ("argument", "part", "easier"),
    [
        ("load", "prefill", lambda pool, share: _scaled(pool, share, *AHEAD)),
        ("load", "decode", lambda pool, share: _scaled(pool, share, *AHEAD)),
        ("load", "prefill", lambda pool, share: _scaled(pool, 1 + 4 * share, "replicas")),
        ("load", "decode", lambda pool, share: _scaled(pool, 1 + 4 * share, "replicas")),
        ("model", "prefill", lambda step, share: _scaled(step, share, *TIMES)),
        ("model", "decode", lambda step, share: _scaled(step, share, *TIMES)),
        ("model", "path", lambda path, share: _scaled(path, share, "transfer_base_s")),
        ("margin", "ttft_s", lambda seconds, share: seconds * share),
        ("margin", "tpot_s", lambda seconds, share: seconds * share),
        ("slo", "ttft_s", lambda seconds, share: seconds * (1 + share)),
        ("slo", "tpot_s", lambda seconds, share: seconds * (1 + share)),
    ],
)
@given(decision=DECISIONS, share=st.floats(0, 1))
def test_what_is_easier_is_never_admitted_less(
    argument: str,
    part: str,
    easier: Callable[[Any, float], Any],
    decision: dict[str, Any],
    share: float,
) -> None:
    """What is admitted is also admitted with less ahead, faster steps and the like."""
    if isinstance(decide(**decision), AdmissionForecast):
        old = decision[argument]
        new = replace(old, **{part: easier(getattr(old, part), share)})
        assert isinstance(decide(**{**decision, argument: new}), AdmissionForecast)


@given(DECISIONS)
def test_an_idle_cluster_admits_what_its_floor_allows(decision: dict[str, Any]) -> None:
    """On an idle cluster a request is admitted exactly if the steps alone keep the SLO."""
    idle, slo = decision["load"].emptied(), decision["slo"]
    floor = forecast(decision["model"], decision["cost"], idle)
    found = decide(**{**decision, "load": idle})
    assert isinstance(found, Shed) == (floor.ttft_s > slo.ttft_s or floor.tpot_s > slo.tpot_s)
    if isinstance(found, Shed):
        assert (found.reason, found.retry_after_s) == ("unreachable", None)
        assert ("to the first token" in found.message) == (floor.ttft_s > slo.ttft_s)


HI = {"role": "user", "content": "hi"}
LONG = [{"role": "user", "content": "x" * 4000}]
"""With its role 4,004 bytes."""

TEMPLATE: tuple[tuple[dict[str, Any], int], ...] = (
    ({"documents": [{"a": "b"}]}, 12),
    ({"chat_template_kwargs": {"a": "b"}}, 10),
    ({"tools": [{"function": {"name": "f"}}]}, 29),
)
WRITTEN = ("content", "name", "reasoning", "reasoning_content", "refusal", "tool_call_id", "other")
CALL = {"id": "a", "type": "function", "function": {"name": "xy", "arguments": "{}"}}
LENGTHS: list[tuple[str, dict[str, Any], int]] = [
    ("completions", {}, 16),
    ("completions", {"max_tokens": None}, 16),
    ("completions", {"max_tokens": 900, "max_completion_tokens": 1}, 900),
    ("completions", {"max_tokens": 0, "echo": True}, 1),
    ("completions", {"max_tokens": None, "prompt": [5] * 2040}, 8),
    ("chat", {}, 10),
    ("chat", {"max_tokens": 900}, 900),
    ("chat", {"max_tokens": 900, "max_completion_tokens": 7}, 7),
]
"""Named, or vLLM's default, or where that is all the context the longest planned, if it fits."""

SIZES: list[tuple[str, dict[str, Any], int]] = [
    ("completions", {"prompt": "abc"}, 3),
    ("completions", {"prompt": "abc", "messages": [HI]}, 3),
    ("completions", {"prompt": "abc", "truncate_prompt_tokens": 1}, 0),
    ("completions", {"prompt": [1, 2]}, 0),
    ("completions", {"prompt": ["a", "b"]}, 0),
    ("chat", {"messages": [HI], "prompt": "x"}, 2 + 4),
    ("chat", {"messages": [HI, {"role": "assistant", "content": None}]}, 2 + 4 + 9),
    ("chat", {"messages": [{"role": "r", "content": [{"type": "text", "text": "é"}]}]}, 2 + 4 + 1),
    *(("chat", {"messages": [HI], **more}, 2 + 4 + size) for more, size in TEMPLATE),
    *(("chat", {"messages": [{"role": "r", name: "x" * 40}]}, 41) for name in WRITTEN),
    ("chat", {"messages": [{"role": "x" * 40}]}, 40),
    ("chat", {"messages": [{"role": "r", "tool_calls": [CALL]}]}, 1 + 1 + 8 + 2 + 2),
    ("chat", {"messages": [{"role": "r", "content": [{"image_url": {"url": "data:x"}}]}]}, 1),
]
"""All text that the template may write, wherever it stands, and of one prompt alone."""

LISTED = {"prompt": [[5] * 100, [5] * 400, [5] * 50], "n": 2}
LEARNED = TokenEstimate(overhead_tokens=100, tokens_per_byte=0.5)


@pytest.mark.parametrize(
    ("kind", "body", "size", "expected"),
    [
        *(
            (
                kind,
                {"prompt": "x", "messages": [HI], **more},
                DEFAULT_ESTIMATE,
                {"output_tokens": n},
            )
            for kind, more, n in LENGTHS
        ),
        *((kind, body, DEFAULT_ESTIMATE, {"text_bytes": n}) for kind, body, n in SIZES),
        # Neither size nor path of a chat depend on a prompt that the engine does not read.
        *(
            (
                *("chat", {"messages": LONG, "prompt": prompt}, DEFAULT_ESTIMATE),
                {"prompt_tokens": 1001, "sequences": 1, "local": False},
            )
            for prompt in ("x", ["a", "b"], [[1], [2]])
        ),
        # Ids are counted; text is sized as learned, but never beyond the context.
        ("completions", {"prompt": "x" * 400}, LEARNED, {"prompt_tokens": 300, "local": True}),
        ("completions", {"prompt": [5] * 300}, LEARNED, {"prompt_tokens": 300, "local": True}),
        ("completions", {"prompt": [5] * 301}, LEARNED, {"prompt_tokens": 301, "local": False}),
        ("completions", {"prompt": [5] * 400, "echo": True}, LEARNED, {"local": True}),
        ("chat", {"messages": LONG}, LEARNED, {"prompt_tokens": 2048}),
        (
            *("completions", LISTED, LEARNED),
            {"prompt_tokens": 400, "other_tokens": (100, 50), "sequences": 6, "local": True},
        ),
    ],
)
def test_the_cost_of_a_request(
    config: EndpointConfig,
    kind: str,
    body: dict[str, Any],
    size: TokenEstimate,
    expected: dict[str, Any],
) -> None:
    """Of what the endpoint passes on; prompts of up to 300 tokens are decode's own."""
    routed = replace(config, routing=replace(config.routing, local_threshold_tokens=300))
    checked = check(kind, body, models=config.models, max_model_len=config.max_model_len)
    cost = request_cost(request_size(kind, checked), routed, size)
    assert {name: getattr(cost, name) for name in expected} == expected


def test_an_aggregated_plan_has_local_prompts_only(config: EndpointConfig) -> None:
    mixed = replace(config, pools=(replace(config.answering, role="mixed"),))
    assert request_cost(
        request_size("completions", {"prompt": [5] * 400}), mixed, DEFAULT_ESTIMATE
    ).local

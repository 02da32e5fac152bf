"""The bundled server and what the selftest makes of it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.run.client_health import health, merged
from loadtest.selftest import selftest
from loadtest.selftest.mock_stream import MockConfig, MockStream, count_input_tokens
from loadtest.selftest.selftest import (
    ClientCapacity,
    ClientError,
    Level,
    Truth,
    client_error,
    level_job,
    parse_streams,
)
from minicluster.errors import Exit, InputError
from minicluster.specs.slo import SloSpec
from tests.loadtest.command import loadtest
from tests.loadtest.jobs import CLIENT

if TYPE_CHECKING:
    from conftest import RunMaker, SampleMaker, ServerStarter

ERROR = ClientError(
    streams=1,
    itl_s=0.02,
    num_requests=1,
    events_per_s=50.0,
    ttft_error_p50_s=0.0,
    ttft_error_p99_s=0.0,
    itl_error_p99_s=0.0,
    tpot_error_p99_s=0.0,
    heartbeat_lag_p90_s=0.0,
    heartbeat_lag_p99_s=0.0,
    cpu_fraction=0.01,
    fit=True,
    saturated=False,
)


def test_selftest_prints_the_client_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The selftest loads the bundled server and prints the client's own error at each load."""
    monkeypatch.setattr(selftest, "WARMUP_S", 0.2)
    monkeypatch.setattr(selftest, "MIN_REQUESTS", 5)
    streams = ("--streams", "10,5@0.01", "--seconds", "1")
    done = loadtest("selftest", *streams, "--no-capacity", "--json")
    errors = json.loads(done.stdout)["errors"]

    assert done.returncode in {Exit.DONE, Exit.INCONCLUSIVE}, done.stderr
    assert [(e["streams"], e["itl_s"]) for e in errors] == [(10, 0.02), (5, 0.01)]
    assert all(e["num_requests"] > 0 for e in errors)
    assert all(e["ttft_error_p50_s"] >= 0 for e in errors)


def test_the_error_is_what_the_client_saw_less_what_the_server_did(
    make_run: RunMaker, make_sample: SampleMaker
) -> None:
    """3 ms of TTFT too many, 1 ms of each gap: by the difference of either side's own stamps."""
    run = make_run([make_sample(k, k / 10, ttft_s=0.053, itl_s=0.021) for k in range(20)])
    sent = tuple(100.05 + 0.02 * k for k in range(10))
    truth = {k: Truth(received_s=100.0, chunk_s=sent) for k in range(20)}
    error = client_error(run, truth, Level(streams=1))

    assert error.num_requests == 20
    assert (error.ttft_error_p50_s, error.ttft_error_p99_s) == pytest.approx((0.003, 0.003))
    assert (error.itl_error_p99_s, error.tpot_error_p99_s) == pytest.approx((0.001, 0.001))


@pytest.mark.parametrize("text", ["", "0", "1,x", "5@0", "5@x", "5@nan"])
def test_bad_streams_are_refused(text: str) -> None:
    """Streams are whole numbers from 1, their tokens some time apart."""
    with pytest.raises(InputError, match="--streams"):
        parse_streams(text)


def test_levels_keep_so_many_streams_open() -> None:
    """By Little's law the rate times a request's time is the number of streams."""
    job = level_job(Level(streams=30, itl_s=0.04), 5.0, "http://x")

    assert job.workload.requests_per_s * (0.2 + 49 * 0.04) == pytest.approx(30)


def test_capacity_is_the_last_load_before_saturation() -> None:
    """The highest load that was followed, and the same for a whole core."""
    tried = (
        replace(ERROR, events_per_s=1000.0, cpu_fraction=0.1),
        replace(ERROR, events_per_s=2000.0, cpu_fraction=0.25),
        replace(ERROR, events_per_s=2500.0, cpu_fraction=0.9, fit=False, saturated=True),
    )

    assert ClientCapacity(tried=tried).events_per_s == 2000
    assert ClientCapacity(tried=tried).events_per_s_per_core == 8000
    assert ClientCapacity(tried=tried[2:]).events_per_s == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cpu_fraction": 0.9}, "90% of its core"),
        ({"heartbeat_lag_s": (0.001,) * 80 + (0.011,) * 20}, "p90 lateness"),
    ],
)
def test_a_saturated_client_says_so(
    make_sample: SampleMaker, changes: dict[str, Any], says: str
) -> None:
    """A core used up or an event loop behind its timers: saturated, whatever the SLO allows."""
    samples = (make_sample(),)
    patient = SloSpec(ttft_s=100.0, tpot_s=100.0)

    assert not health(CLIENT, samples, patient).saturated
    own = health(replace(CLIENT, **changes), samples, patient)
    assert own.saturated
    assert any(says in problem for problem in own.problems)


def test_a_client_that_stood_still_is_not_fit(make_sample: SampleMaker) -> None:
    """Stopped for a while: few wake-ups were late, but what was due went out in one go."""
    samples, patient = (make_sample(),), SloSpec(ttft_s=100.0, tpot_s=100.0)
    frozen = health(replace(CLIENT, stalled_s=4.0), samples, patient)

    assert any(
        "was stalled for 4.0 of 10 s (limit 1%): suspended, or overloaded" in problem
        for problem in frozen.problems
    )
    assert not health(replace(CLIENT, stalled_s=0.09), samples, patient).problems
    assert merged((CLIENT, replace(CLIENT, stalled_s=4.0))).stalled_s == 4.0


def test_a_tpot_has_the_lateness_of_two_stamps(make_sample: SampleMaker) -> None:
    """3 ms late at most, twice, over 9 tokens: 0.67 ms, more than 5 % of 10 ms, not of 15 ms."""
    late = replace(CLIENT, heartbeat_lag_s=(0.003,) * 100)
    promised = {tpot_s: SloSpec(ttft_s=100.0, tpot_s=tpot_s) for tpot_s in (0.010, 0.015)}
    samples = (make_sample(output_tokens=10),)

    assert "0.7 ms of a TPOT" in health(late, samples, promised[0.010]).problems[0]
    assert not health(late, samples, promised[0.015]).problems


def test_late_arrivals_make_a_run_unfit(make_sample: SampleMaker) -> None:
    """A client that sends late by more than a twentieth of the limit proves nothing."""
    samples = tuple(make_sample(k, due_s=float(k), lag_s=0.2) for k in range(5))

    assert health(CLIENT, samples, SloSpec(ttft_s=1.0)).problems
    assert not health(CLIENT, samples, SloSpec(ttft_s=10.0)).problems


def test_of_several_processes_the_worst_counts() -> None:
    """Merged, the busiest core, every heartbeat and the first trouble are kept."""
    busy = replace(CLIENT, cpu_fraction=0.7, heartbeat_lag_s=(0.02,) * 100, stop="died")
    both = merged((CLIENT, busy))

    assert (both.cpu_fraction, both.stop, both.processes) == (0.7, "died", 2)
    assert both.connections == 6
    assert len(both.heartbeat_lag_s) == 200
    assert list(both.heartbeat_lag_s) == sorted(both.heartbeat_lag_s)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [("kernel", "reader", "reader"), ("kernel", "", "kernel"), ("reader", "", "reader")],
)
def test_of_several_processes_each_has_its_stamps(first: str, second: str, both: str) -> None:
    """The kernel's stamps are the run's only if no process has the reader's."""
    clients = replace(CLIENT, stamps=first), replace(CLIENT, stamps=second)

    assert merged(clients).stamps == merged(clients[::-1]).stamps == both


class Sink:
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.data = b""

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.data += data

    def is_closing(self) -> bool:
        """Never."""
        return False


def events(config: MockConfig, *, chat: bool = False, output_tokens: int = 5) -> list[Any]:
    """Return the events of one answer."""

    async def answer() -> bytes:
        sink: Any = Sink()
        stream = MockStream(
            config=config,
            writer=sink,
            gone=lambda: False,
            chat=chat,
            input_tokens=7,
            output_tokens=output_tokens,
            ids=True,
            start_s=time.monotonic(),
            stalls_s=(0.0, 0.0),
        )
        while stream.step():
            pass
        return bytes(sink.data)

    data = asyncio.run(answer())
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("merged_tokens", [1, 2, 7])
def test_the_mock_server_sends_what_was_asked(*, chat: bool, merged_tokens: int) -> None:
    """All tokens, in chunks of so many, each with the running total, and a closing usage."""
    chunks = events(MockConfig(tokens_per_chunk=merged_tokens), chat=chat)
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    new = [b - a for a, b in pairwise([0, *totals])]

    assert totals[-2:] == [5, 5]
    assert chunks[-1]["choices"] == []
    assert all(count == merged_tokens for count in new[:-2])
    said = [
        c["choices"][0]["delta"]["content"] if chat else c["choices"][0]["text"]
        for c in chunks[:-1]
    ]
    assert [text.count("a") for text in said] == new[:-1]


def test_the_mock_server_keeps_its_times() -> None:
    """Each token is due its ITL after the last, and none while the server stalls."""
    config = MockConfig(ttft_s=0.5, itl_s=0.1)

    async def due() -> list[float]:
        sink: Any = Sink()
        stream = MockStream(
            config=config,
            writer=sink,
            gone=lambda: False,
            chat=False,
            input_tokens=7,
            output_tokens=4,
            ids=False,
            start_s=10.0,
            stalls_s=(10.55, 10.75),
        )
        times = [stream.due_s]
        while stream.step():
            times.append(stream.due_s)
        return times

    assert asyncio.run(due()) == pytest.approx([10.5, 10.75, 10.75, 10.8])


@pytest.mark.parametrize(
    ("request_body", "count"),
    [
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": "one two"}, 2),
        ({"messages": [{"role": "user", "content": "one two three"}]}, 3),
    ],
)
def test_prompts_are_counted(request_body: dict[str, Any], count: int) -> None:
    """Ids count as they are, texts by their words."""
    assert count_input_tokens(request_body) == count


def test_the_mock_server_is_an_openai_endpoint(start_server: ServerStarter) -> None:
    """It lists its model and streams chats, as OpenAI's own client reads them."""
    host = start_server(ttft_s=0.01, itl_s=0.001)
    with urllib.request.urlopen(f"{host}/v1/models") as answer:  # noqa: S310  (ours)
        assert json.load(answer)["data"][0]["id"] == "fake"
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    with urllib.request.urlopen(  # noqa: S310
        f"{host}/v1/chat/completions", json.dumps(body).encode()
    ) as answer:
        lines = answer.read().split(b"\n\n")
    assert lines[-2] == b"data: [DONE]"
    assert json.loads(lines[0][6:])["choices"][0]["delta"]["role"] == "assistant"

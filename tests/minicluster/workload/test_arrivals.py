"""How requests are drawn, and traces of the published formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minicluster.errors import InputError
from minicluster.specs.workload import Lengths, RequestClass, WorkloadSpec
from minicluster.workload.arrivals import equally_likely
from minicluster.workload.sources import RequestSource, drawn
from minicluster.workload.traces import read_trace

WORKLOAD = WorkloadSpec(
    requests_per_s=4.0,
    input_tokens=Lengths(distribution="lognormal", median=100, sigma=1.0, high=5000),
    output_tokens=Lengths(distribution="uniform", low=5, high=50),
)


@pytest.mark.parametrize(
    ("source", "variation"),
    [
        (RequestSource(), 1.0),
        (RequestSource(process="constant"), 0.0),
        (RequestSource(process="gamma", gap_cv=3.0), 3.0),
        (RequestSource(process="gamma", gap_cv=0.5), 0.5),
    ],
)
def test_gaps_vary_as_asked(source: RequestSource, variation: float) -> None:
    found = drawn(WORKLOAD, source, count=100_000, seed=0)
    gaps = np.diff(found.due_s, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.06 + 1e-9)
    plain = drawn(WORKLOAD, RequestSource(), count=100_000, seed=0)
    np.testing.assert_array_equal(found.input_tokens, plain.input_tokens)


def of_class(name: str, rate: float, **keys: object) -> RequestClass:
    lengths = {"input_tokens": WORKLOAD.input_tokens, "output_tokens": WORKLOAD.output_tokens}
    return RequestClass(name=name, requests_per_s=rate, **(lengths | keys))


def test_one_class_draws_what_a_load_without_classes_does() -> None:
    mix = WorkloadSpec(requests_per_s=4.0, classes=(of_class("only", 4.0),))
    found, plain = (drawn(each, RequestSource(), count=500, seed=3) for each in (mix, WORKLOAD))
    for name, column in plain.columns().items():
        np.testing.assert_array_equal(getattr(found, name), column)
    assert not found.class_of.any()


def test_classes_come_by_their_rates_with_their_lengths() -> None:
    long = of_class("long", 1.0, input_tokens=Lengths.fixed(9000), prefix_tokens=100)
    mix = WorkloadSpec(requests_per_s=4.0, classes=(of_class("short", 3.0), long))
    found = drawn(mix, RequestSource(), count=40_000, seed=0)
    own = found.class_of == 1
    assert own.mean() == pytest.approx(0.25, abs=0.01)
    assert set(found.input_tokens[own]) == {9000}
    assert set(found.prefix_tokens[own]) == {100}
    assert found.input_tokens[~own].max() <= 5000
    # Poisson arrivals of each class by itself, at its own rate.
    gaps = np.diff(found.due_s[own])
    assert gaps.mean() == pytest.approx(1.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)
    faster = drawn(mix.at_rate(8.0), RequestSource(), count=40_000, seed=0)
    np.testing.assert_array_equal(faster.class_of, found.class_of)
    np.testing.assert_allclose(2 * faster.due_s, found.due_s)


@pytest.mark.parametrize("source", [RequestSource(users=3), RequestSource(turns=2)])
def test_users_and_turns_have_no_classes(source: RequestSource) -> None:
    mix = WorkloadSpec(requests_per_s=1.0, classes=(of_class("only", 1.0),))
    with pytest.raises(InputError, match="none with classes"):
        drawn(mix, source, count=10, seed=0)


@pytest.mark.parametrize("share", [0.02, 0.111, 0.37, 0.5])
def test_few_requests_stand_for_a_mix(share: float) -> None:
    """Each class has its share within 1 %; without classes there are as many as asked for."""
    classes = (of_class("a", share), of_class("b", 1 - share, input_tokens=Lengths.fixed(7)))
    prompts, answers, class_of = equally_likely(
        WorkloadSpec(requests_per_s=1.0, classes=classes), 128
    )
    assert (class_of == 0).mean() == pytest.approx(share, rel=0.011)
    assert (np.diff(prompts) >= 0).all()
    assert set(prompts[class_of == 1]) == {7}
    assert len(prompts) == len(answers) <= 128 * 40
    assert len(equally_likely(WORKLOAD, 128).input_tokens) == 128


def test_conversations_grow() -> None:
    """A turn's prompt is the conversation before it and a new input."""
    found = drawn(WORKLOAD, RequestSource(turns=3), count=8, seed=0)
    alone = drawn(WORKLOAD, RequestSource(), count=8, seed=0)
    assert found.session.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert found.previous.tolist() == [-1, 0, 1, -1, 3, 4, -1, 6]
    for first in (0, 3):
        said = 0
        for each in range(first, first + 3):
            assert found.input_tokens[each] == said + alone.input_tokens[each]
            said += int(alone.input_tokens[each] + alone.output_tokens[each])
    assert np.diff(found.due_s[[0, 3, 6]]).min() > 0


def test_users_think_exponentially_also_before_their_first_request() -> None:
    """Were think times alike, requests that end with one step would come together ever after."""
    found = drawn(WORKLOAD, RequestSource(users=4000, think_s=3.0), count=20_000, seed=0)
    assert found.previous is not None
    assert found.think_s is not None
    np.testing.assert_array_equal(found.previous, np.maximum(np.arange(20_000) - 4000, -1))
    first = found.due_s[:4000]
    assert (np.diff(first) >= 0).all()
    for thought in (first, found.think_s[4000:]):
        assert thought.mean() == pytest.approx(3.0, rel=0.05)
        assert thought.std() / thought.mean() == pytest.approx(1.0, abs=0.05)
    at_once = drawn(WORKLOAD, RequestSource(users=3), count=9, seed=0)
    assert not at_once.due_s.any()


@pytest.mark.parametrize(
    "keys",
    [
        {"process": "fractal"},
        {"process": "gamma"},
        {"gap_cv": 2.0},
        {"users": 0},
        {"users": 3, "turns": 2},
        {"users": 3, "process": "constant"},
        {"think_s": -1.0},
        {"process": "gamma", "gap_cv": 0.0},
    ],
)
def test_contradictions_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(InputError):
        RequestSource(**keys)  # type: ignore[arg-type]


AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,374,44
2024-05-10 00:00:04.324509+00:00,396,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,374,44,418,Conversation log
9.314579,GPT-4,396,109,505,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0, 1]}
{"timestamp": 4314.579, "input_length": 396, "output_length": 109, "hash_ids": [0, 2]}
"""
SCHEDULE = """{"index": 0, "due_s": 1.0, "input_tokens": 374, "output_tokens": 44}
{"index": 1, "due_s": 5.314579, "input_tokens": 396, "output_tokens": 109}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024, BURSTGPT, MOONCAKE, SCHEDULE])
def test_formats_say_the_same(text: str, tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, text)).arrivals
    np.testing.assert_allclose(read.due_s, [0.0, 4.314579], atol=2e-6)
    assert read.input_tokens.tolist() == [374, 396]
    assert read.output_tokens.tolist() == [44, 109]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "trace:1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "without requests"),
        ("a,b,c\n1,2,3\n", "trace:1"),
        (AZURE_2023 + "2023-11-16 18:15:40.0,5,5\n", "trace:4"),
        (AZURE_2023 + "2023-11-16 18:16:00.0,5\n", "trace:4"),
        (AZURE_2023 + "2023-11-16 18:16:00.0,5,0\n", "trace:4: generated tokens is 0"),
        (AZURE_2023 + "2023-11-16 18:16:00.0,-5,1\n", "trace:4: prompt tokens"),
        (BURSTGPT + "nan,GPT-4,5,5,10,API log\n", "trace:4"),
        (MOONCAKE + '{"timestamp": 5000}\n', "trace:3"),
        (MOONCAKE + '{"timestamp": 5000, "input_length": 1.5, "output_length": 1}\n', "trace:3"),
        (MOONCAKE.replace("[0, 2]", "7"), "trace:2"),
        (MOONCAKE.replace('396, "', '600, "').replace("[0, 2]", '["0"]'), "trace:2"),
        (SCHEDULE + '{"due_s": 0.5, "input_tokens": 1, "output_tokens": 1}\n', "trace:3"),
        (SCHEDULE.replace('"due_s"', '"content": [1], "due_s"', 1), "trace:1"),
        (SCHEDULE.replace('"index": 1', '"previous": 0'), "trace:2: previous is 0"),
        (SCHEDULE.replace('"index": 1', '"prefix_tokens": 397'), "trace:2"),
        (SCHEDULE.replace('"index": 1', '"session": "a"'), "trace:2"),
        (SCHEDULE.replace('"index": 1', f'"session": {10**30}'), "trace:2"),
    ],
)
def test_bad_lines_are_refused_by_number(text: str, place: str, tmp_path: Path) -> None:
    """What is malformed, out of order or empty is named by file and line."""
    with pytest.raises(InputError, match=place):
        read_trace(written(tmp_path, text))


def test_ids_of_whole_blocks_are_read(tmp_path: Path) -> None:
    """Of 512 tokens each; the last one, which may be shorter, is left out; others have none."""
    line = '{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": %s}\n'
    text = line % (1100, [4, 5, 6]) + line % (1024, [4, 5]) + line % (9, [7])
    assert read_trace(written(tmp_path, text)).arrivals.content == ((4, 5), (4, 5), ())
    assert read_trace(written(tmp_path, BURSTGPT)).arrivals.content is None


def test_unanswered_requests_can_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT + "12,GPT-4,5,0,5,API log\n")
    read = read_trace(path, skip_unanswered=True)
    assert (len(read.arrivals), read.skipped) == (2, 1)
    with pytest.raises(InputError, match="--skip-unanswered leaves such requests out"):
        read_trace(path)
    with pytest.raises(InputError) as refused:
        read_trace(written(tmp_path, BURSTGPT + "12,GPT-4,0,5,5,API log\n"))
    assert refused.value.way_out is None


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for name, message in (("none", "does not exist"), ("binary", "binary")):
        with pytest.raises(InputError, match=message):
            read_trace(tmp_path / name)

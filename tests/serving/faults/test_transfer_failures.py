"""Failure 5: KV caches that do not arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serving.client import ask, difference, send

from .load import body_of, under_way

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving.deployed import Split

    from .reference import Reference

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def transfers(split: Split) -> Iterator[None]:
    """End with normal transfers, and without held KV cache."""
    split.wait_until_whole()
    yield
    split("spoil", "nothing")
    split.wait_until_released()


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_a_transfer_that_does_not_end(split: Split, *, stream: bool) -> None:
    """
    Failure 5: the KV cache does not arrive.

    Expected: 504 at the KV-wait deadline, streamed or not, while the engine answers others from
    its own cache; once it arrives, all that was held is free again.
    """
    split("spoil", "stall")
    bodies = [body_of(400 + seed, stream=stream) for seed in range(3)]
    with under_way(split.base_url, bodies) as asked:
        local = send(f"{split.base_url}/v1/completions", {**body_of(404), "n": 2, "temperature": 1})
        replies = [each.result() for each in asked]
    assert (local.done, local.path) == (True, "local; reason=n")
    for reply in replies:
        assert (reply.status, reply.body["error"]["code"]) == (504, "kv-wait-timeout")
        assert split.deadline_s <= reply.seconds < 2 * split.deadline_s
        assert int(reply.headers["retry-after"]) >= 1


def test_a_transfer_that_fails_is_computed_again(split: Split, reference: Reference) -> None:
    """
    Failure 5b: the transfer fails.

    Expected: decode computes the prompt itself, and the answer is the same.
    """
    split("spoil", "lose")
    pairs = zip(reference.prompts, reference.answers, strict=True)
    for prompt, right in [(p, r) for p, r in pairs if len(p) in {33, 200, 768}]:
        answer = ask(split.base_url, prompt, 24, "lost")
        assert difference(right, answer, tolerance=1e-3) is None

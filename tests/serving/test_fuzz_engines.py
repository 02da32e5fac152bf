"""Broken bodies by the thousand before real engines, whose answers an operator keeps short."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from serving.request.length import MAX_OUTPUT_TOKENS

from .client import post
from .deployed import Shared, endpoint_checks, schemathesis, up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan

pytestmark = [pytest.mark.engine, pytest.mark.campaign]


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory, exact_plan: Plan, shared: Shared
) -> Iterator[str]:
    """Have it deployed with short answers: without a length they would fill the whole context."""
    shared.end()
    with up(tmp_path_factory.mktemp("fuzz"), exact_plan, **{MAX_OUTPUT_TOKENS: "16"}) as found:
        yield found


def _answers(url: str) -> bool:
    status, body = post(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    return status == 200 and body["usage"]["completion_tokens"] == 3


def test_ten_thousand_broken_bodies_do_no_harm(url: str) -> None:
    """None is a 5xx, each 4xx names a field, and valid requests between them stay right."""
    found = endpoint_checks("fuzz", url, 10_000, 6)
    sys.stdout.write(f"\nfuzz: {found['statuses']}, {found['complaints']} complaints\n")
    assert found["first"] == []
    assert _answers(url)


def test_schemathesis_finds_nothing(url: str) -> None:
    """What is generated from our own schema gets the answers that the schema promises."""
    code, said = schemathesis(url, examples=50)
    assert code == 0, said
    assert _answers(url)

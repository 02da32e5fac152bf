"""Requests with their times: of a trace, or as a load test sends them (`schedule.jsonl`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from minicluster.config import read_lines
from minicluster.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """
    One request of a load; `in_window` if it counts.

    Attributes:
        due_s: scheduled arrival, seconds after the start; 0 if it waits for `previous`.
        previous: index of the request that has to be answered first; `None`: none.
        think_s: from that answer to this arrival.
        session: conversation of which it is a turn; its prompt contains the earlier turns.
        content: ids of its prompt's first blocks of 512 tokens, from a trace; equal ids mean equal
            tokens.
        prefix_tokens: first tokens of its prompt that all prompts of the run have in common.
        class_of: class of requests, as numbered in the workload; 0 where there are none.
        adapter: LoRA adapter, the most popular one 0; `None`: none.
    """

    index: int
    due_s: float
    input_tokens: int
    output_tokens: int
    in_window: bool = True
    previous: int | None = None
    think_s: float = 0.0
    session: int | None = None
    content: tuple[int, ...] = ()
    prefix_tokens: int = 0
    class_of: int = 0
    adapter: int | None = None


def write_schedule(requests: Iterable[ScheduledRequest], path: Path) -> None:
    """Write *requests*, a line each: also a trace, for `minicluster.workload.traces`."""
    write_atomically(path, "".join(json.dumps(asdict(r)) + "\n" for r in requests))


def read_schedule(path: Path) -> tuple[ScheduledRequest, ...]:
    """Read what `write_schedule` wrote; `minicluster.workload.traces` reads files of others."""
    return read_lines(ScheduledRequest, path, "a schedule of `loadtest run`")

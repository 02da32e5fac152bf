"""What the bundled server does, well or badly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """
    What the server does, well or badly.

    Attributes:
        ttft_s: request received to first token sent.
        itl_s: between tokens.
        tokens_per_chunk: tokens merged into one chunk.
        early_chunk: 1: send an empty chunk at once, as some servers do.
        running_usage: 1: each chunk carries the running total, as vLLM does on request.
        usage: 0: no usage at all.
        stall_at_s: seconds after the first request, from when nothing is sent ...
        stall_s: ... for so long.
        cut_after_tokens: cut the connection after so many; 0: never.
        mute_after_tokens: send no more after so many, but do not hang up; 0: never.
        endless: 1: tokens never end.
        slots: requests served at a time, others wait in line; 0: any number.
        fail_every: answer every n-th request with `status`; 0: none.
        status: what a failing request is answered.
        garbage: what to stream instead of chunks: `text` is no JSON, `deep` is nested deeper than
            anyone reads, `leap` is chunks of which one says a trillion tokens, `line` does not end.
        flood: 1: lines behind each chunk, faster than anyone reads them.
        unclosed: 1: say that the answer has ended, and leave it open.
        timing: `Server-Timing` header; empty: the true one.
        key: that everybody has to show; empty: none.
        die_after_s: exit so long after the first request; 0: never.
        template_tokens: that a chat takes beyond its words.
        model: served name.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.02
    tokens_per_chunk: int = 1
    early_chunk: int = 0
    running_usage: int = 1
    usage: int = 1
    stall_at_s: float = 0.0
    stall_s: float = 0.0
    cut_after_tokens: int = 0
    mute_after_tokens: int = 0
    endless: int = 0
    slots: int = 0
    fail_every: int = 0
    status: int = 500
    garbage: str = ""
    flood: int = 0
    unclosed: int = 0
    timing: str = ""
    key: str = ""
    die_after_s: float = 0.0
    template_tokens: int = 0
    model: str = "fake"

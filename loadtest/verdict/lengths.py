"""Lengths of prompts and answers: as the server counted them, against what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.workload.samples import Sample

MAX_WRONG_FRACTION = 0.01
"""Largest fraction of answers with another length than requested: a p99 still holds."""

Pairs = list[tuple[int, int]]


def wrong_lengths(measured: Sequence[Sample]) -> list[str]:
    """Return why lengths make a run invalid, by side; one that is not told is not wrong."""
    problems = []
    for side, lengths in _sides(measured).items():
        wrong = [(got, asked) for got, asked in lengths if got != asked]
        if len(wrong) > MAX_WRONG_FRACTION * len(lengths):
            got, asked = wrong[0]
            problems.append(
                f"{len(wrong)} of {len(lengths)} answers have another {side} length than "
                f"requested (first: {got} tokens, not {asked}); does the endpoint honour "
                "`ignore_eos`? (--plain takes lengths as they come)"
            )
    return problems


def lengths_text(measured: Sequence[Sample], *, planned: bool) -> str:
    """Say by how much lengths differ from those of the plan, or of the options."""
    whose = "the plan's" if planned else "those asked for"
    parts = []
    for side, lengths in _sides(measured).items():
        got, asked = (sum(each) / len(lengths) for each in zip(*lengths, strict=True))
        same = sum(one == other for one, other in lengths)
        if same == len(lengths):
            parts.append(f"{side} as asked for")
            continue
        parts.append(
            f"{side} {got:.1f} tokens on average, {got / asked - 1:+.1%} against {whose} "
            f"({asked:.1f}; {same} of {len(lengths)} are equal)"
        )
    told = "; ".join(parts) or "no answer told them"
    return f"--plain: lengths are as the server gave them: {told}"


def _sides(measured: Sequence[Sample]) -> dict[str, Pairs]:
    """Return (counted, asked) of each answer that tells its length, by side."""
    answered = [s for s in measured if s.ok]
    pairs = {
        "input": [(s.input_tokens, s.asked_input_tokens) for s in answered],
        "output": [(s.output_tokens, s.asked_output_tokens) for s in answered],
    }
    known = {
        side: [(got, asked) for got, asked in lengths if got is not None]
        for side, lengths in pairs.items()
    }
    return {side: lengths for side, lengths in known.items() if lengths}

"""
Prompt length at the endpoint: exact by the model's tokenizer, or estimated from bytes.

    python benchmarks/prompt_length.py TOKENIZER.json [TOKENIZER.json ...]

For each tokenizer, and for texts cut from this repository's documents and sources: the processor
time of `tokenizers` per 1,000 tokens, that of the estimate for the same text, the longest wall time
that the event loop is blocked while another thread tokenizes (on an idle machine only), and the
error of the estimate after 50 answers. Half a minute.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from serving.request.length import TokenCounts, prompt_tokens, text_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
SOURCES = {"prose": "docs/**/*.md", "code": "sizing/**/*.py"}
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
"""Bytes of the texts."""

REPEATS = 9
ANSWERS = 50
"""Answers that the estimate has learned from; the error is that of the next ones."""


def main(files: list[str]) -> None:
    """Print a table per tokenizer."""
    texts = {name: _joined(pattern) for name, pattern in SOURCES.items()}
    for file in files:
        tokenizer = Tokenizer.from_file(file)
        print(f"{file}: {tokenizer.get_vocab_size()} tokens")
        print("text   bytes     tokens  ms/1,000 tokens  estimate ms  longest loop block ms")
        for name, text in texts.items():
            for length in LENGTHS:
                print(f"{name:6} {_row(tokenizer, text, length)}")
        errors = _estimate_errors(tokenizer, list(texts.values()))
        print(
            f"estimate after {ANSWERS} answers: median error {statistics.median(errors):.1%}, "
            f"90 % of texts within {sorted(errors)[int(0.9 * len(errors))]:.1%}\n"
        )


def _joined(pattern: str) -> str:
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob(pattern)))
    return text * (1 + max(LENGTHS) // len(text))


def _row(tokenizer: Tokenizer, text: str, length: int) -> str:
    """Return one row; each repetition has another part of the text, so that no cache helps."""
    rng = random.Random(1)  # noqa: S311  (parts of a text)
    parts = [_part(text, length, rng) for _ in range(REPEATS)]
    tokens = len(tokenizer.encode(parts[0]).ids)
    per_text_s = [_seconds(lambda part=part: tokenizer.encode(part)) for part in parts]
    estimate_s = [_seconds(lambda part=part: prompt_tokens(part)) for part in parts]
    block_s = max(_block_s(tokenizer, part) for part in parts[:3])
    per_thousand_ms = statistics.median(per_text_s) / tokens * 1e6
    return (
        f"{length:9,} {tokens:9,} {per_thousand_ms:16.2f} "
        f"{statistics.median(estimate_s) * 1e3:12.4f} {block_s * 1e3:22.1f}"
    )


def _part(text: str, length: int, rng: random.Random) -> str:
    start = rng.randrange(len(text) - length + 1)
    return text[start : start + length]


def _seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call, which other processes lengthen least."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _block_s(tokenizer: Tokenizer, text: str) -> float:
    """Return the longest time that this thread did not run while another one tokenizes."""
    thread = threading.Thread(target=lambda: tokenizer.encode(text))
    longest_s, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now
    return longest_s


def _estimate_errors(tokenizer: Tokenizer, texts: list[str]) -> list[float]:
    """Return the relative errors of the estimate for mixed texts of 200 to 20,000 bytes."""
    rng = random.Random(2)  # noqa: S311  (parts of a text)
    counts, errors = TokenCounts(), []
    for number in range(ANSWERS + 400):
        part = _part(rng.choice(texts), int(200 * 100 ** rng.random()), rng)
        tokens = len(tokenizer.encode(part).ids)
        if number >= ANSWERS:
            errors.append(abs(prompt_tokens(part, counts.estimate) / tokens - 1))
        counts.add(text_bytes(part), tokens)
    return errors


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit("usage: prompt_length.py TOKENIZER.json ..."))

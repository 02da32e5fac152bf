"""Prefill of one prompt in chunks that follow one another through pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.latency.load import prefill_load
from sizing.latency.step import DRAFT, stage_terms

if TYPE_CHECKING:
    from minicluster.specs.slicing import Slicing
    from sizing.latency.step import Machine, Term

FINEST = 512
"""Tokens of the smallest chunk that is tried: finer ones read the weights too often to pay."""

GROUPS = ("matrix multiplications", "attention", "elementwise", "collectives", "engine")
BUBBLE = "pipeline bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrefill:
    """
    One prompt on its way through all stages.

    Attributes:
        seconds: from the first chunk's start to the last one's end.
        parts_s: by group of terms and the pipeline bubble; they add up to `seconds`.
    """

    seconds: float
    chunks: int
    parts_s: dict[str, float]


def chunked_prefill(machine: Machine, tokens: int, *, slicing: Slicing) -> ChunkedPrefill:
    """
    Time the prefill of one prompt in an empty system, in the number of chunks that is fastest.

        TTFT = sum_i s_i + (pp - 1) max_i s_i, s_i = t_stage of chunk i after the chunks before
        it; the last term is the pipeline bubble      (docs/model.md, eq. S8)

    Args:
        machine: model, GPU, cluster, engine; no chunk exceeds what it takes of a prompt in a step.

    Source:
        Makespan of a proportionate flow shop: every stage takes as long for a chunk as the
        others. Chunked pipeline parallelism: Mooncake (arXiv 2407.00079), section 5.1.

    Ignores:
        Stages that wait for the link while they could compute; chunks of unequal length, which
        would even out what later chunks attend to.
    """
    fewest = -(-tokens // machine.engine.prompt_tokens_per_step)
    most = max(fewest, tokens // FINEST) if slicing.pp > 1 else fewest
    counts = sorted({*np.geomspace(fewest, most, 12).round().astype(int).tolist()})
    tried = (_in_chunks(machine, tokens, count, slicing) for count in counts)
    return min(tried, key=lambda found: found.seconds)


def _in_chunks(machine: Machine, tokens: int, count: int, slicing: Slicing) -> ChunkedPrefill:
    size = tokens / count
    load = prefill_load(np.full(count, size), np.arange(count) * size)
    stage = np.zeros(count)
    parts = dict.fromkeys((*GROUPS, BUBBLE), 0.0)
    for term, seconds in stage_terms(machine, load, slicing=slicing):
        stage += seconds
        parts[group_of(term)] += float(np.sum(seconds))
    parts[BUBBLE] = (slicing.pp - 1) * float(stage.max())
    return ChunkedPrefill(seconds=sum(parts.values()), chunks=count, parts_s=parts)


def group_of(term: Term) -> str:
    """Name the group of a term, of `GROUPS`."""
    if term.equation[0] in "NX":
        return "collectives"
    if term.name.startswith("engine"):
        return "engine"
    name = term.name.removeprefix(DRAFT)
    if "attention" in name or name.startswith(("index", "linear")):
        return "attention"
    return "elementwise" if term.equation == "W6" else "matrix multiplications"

"""Decode of one sequence after a long prompt: what a token is spent on, layout by layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from sizing.latency.collectives import CROSSES
from sizing.latency.load import decode_load
from sizing.latency.pipeline import GROUPS, group_of
from sizing.latency.step import step_s, step_terms

if TYPE_CHECKING:
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.slicing import Slicing
    from sizing.latency.step import Machine


def token_parts_s(on: Machine, tokens: int, *, slicing: Slicing) -> dict[str, float]:
    """
    Split the seconds of one token after *tokens* others by group of terms, through all stages.

    Weights and KV cache are read by tp GPUs at a time, however many stages there are; every
    layer ends in all-reduces over these tp GPUs, dearer where they share no HB domain
    (docs/model.md, eq. S5, N2). What an engine adds to each collective counts as engine.
    """
    parts = dict.fromkeys(GROUPS, 0.0)
    for term in step_terms(on, decode_load(1, tokens), slicing=slicing):
        parts[group_of(term)] += float(term.seconds)
    return parts


def token_by_library_s(on: Machine, tokens: int, *, slicing: Slicing) -> dict[str, float]:
    """
    Time the same token were another library than NCCL to carry all-reduces between HB domains.

    Returns:
        Seconds by library, of those measured on tp GPUs of as many domains; empty where the tp
        GPUs share a domain.

    Source:
        configs/collectives (docs/model.md, eq. H4).

    """
    load = decode_load(1, tokens)
    return {
        name: float(step_s(replace(on, gpu=crossed_by(on.gpu, name)), load, slicing=slicing))
        for name in _measured_across(on, slicing.tp)
    }


def crossed_by(gpu: GpuSpec, library: str) -> GpuSpec:
    """Return the GPU with a library's measurements in place of NCCL's."""
    tables = tuple(
        replace(table, library=CROSSES)
        for table in gpu.collectives.measured
        if table.library == library
    )
    return replace(gpu, collectives=replace(gpu.collectives, measured=tables))


def _measured_across(on: Machine, group: int) -> list[str]:
    """List the libraries but NCCL whose all-reduce over such a group was measured."""
    domains = math.ceil(group / on.cluster.gpus_per_hb_domain)
    return sorted(
        {
            table.library
            for table in on.gpu.collectives.measured
            if table.pattern == "all-reduce"
            and table.library != CROSSES
            and (table.gpus, table.domains) == (group, domains)
            and domains > 1
        }
    )

"""Collectives by formula: what a ring takes, on one domain and beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from minicluster.specs.topology import Tier, Topology
from sizing.latency.tiered import ring_s

HOP_S, BYTES_PER_S = 2e-6, 400e9


@pytest.mark.parametrize(
    ("pattern", "rounds"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)]
)
@pytest.mark.parametrize("gpus", [2, 8])
def test_a_ring_hands_a_share_from_gpu_to_gpu(pattern: str, rounds: int, gpus: int) -> None:
    """N - 1 hops of S / n bytes, twice for an all-reduce (docs/model.md, eq. H6)."""
    domain = Tier(
        name="domain", gpus=8, latency_s=HOP_S, bytes_per_s=BYTES_PER_S, efficiency_fraction=1.0,
        oversubscription=1.0,
    )  # fmt: skip
    topology = Topology(name="one domain", gpus_per_node=8, tiers=(domain,))
    size = np.array([0.0, 1e6, 1e9])
    hop_s = HOP_S + size / gpus / BYTES_PER_S
    expected = np.where(size > 0, rounds * (gpus - 1) * hop_s, 0.0)
    found = ring_s(size, pattern, topology, (gpus,))
    np.testing.assert_allclose(found, expected)

"""Seconds of a collective over the tiers of a network, by formula: no table is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.gpu import BUS_SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from minicluster.specs.gpu import AllToAllLibrary, CollectiveProtocol
    from minicluster.specs.topology import Topology
    from sizing.latency.communication import Exchange

OVERLAP_LEFT = 0.2
"""Share of the shorter part that a hierarchical collective does not hide behind the longer one."""
TRAFFIC: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda _: 1.0,
}
"""Bytes that each GPU sends, of `Exchange.size_bytes`, in a group of n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """
    The network between the HB domains of a group.

    Attributes:
        hop_s: of a hop between two of them, over the tiers that the group spans.
        bytes_per_s: of one GPU's ring through them: the slowest tier on its way.
        seconds_per_byte: of one GPU's all to all: the tier that takes longest.
    """

    hop_s: float
    bytes_per_s: float
    seconds_per_byte: float


def network(topology: Topology, spans: Sequence[int]) -> Network:
    """
    Return the network between the HB domains of a group.

        B_net = min_j B_j e_j / max(1, o_j k_1/m_(j-1)),  l_net = Σ ln k_j l_j / Σ ln k_j
        (docs/model.md, eq. H1)

    Args:
        spans: `Topology.spans` of the group; more than one HB domain.

    Returns:
        Hop and bandwidths. A unit of m_(j-1) members is left by k_1 rings, one a rail;
        all GPUs of the unit are taken to be in such groups at the same time. All to all leaves a
        unit with all members at once, (n - m_(j-1))/n of their bytes.

    Source:
        Rings of contiguous ranks enter and leave each unit once: that is why oversubscription
        hardly slows them, and why it slows all to all by its whole factor.

    Ignores:
        Rings that wrap around beside other traffic; ranks out of order.
    """
    members, hops, weight = spans[0], 0.0, 0.0
    slowest, longest = math.inf, 0.0
    total = math.prod(spans)
    for tier, count in zip(topology.tiers[1:], spans[1:], strict=True):
        if count > 1:
            slowest = min(slowest, tier.achieved_bytes_per_s(spans[0] / members))
            leaving = (total - members) / total
            longest = max(longest, leaving / tier.achieved_bytes_per_s())
            hops += math.log(count) * tier.latency_s
            weight += math.log(count)
        members *= count
    return Network(hop_s=hops / weight, bytes_per_s=slowest, seconds_per_byte=longest)


def tiered_s(
    size_bytes: ArrayLike,
    pattern: str,
    topology: Topology,
    spans: Sequence[int],
    protocols: Sequence[CollectiveProtocol] = (),
) -> NDArray[np.float64]:
    """
    Time a collective by formula.

        t = l + max(t_i, t_o) + 0.2 min(t_i, t_o),  t_i = f(g) S / (B_1 e_1),
        t_o = f(k) S / (g B_net), all to all Σ over its tiers (docs/model.md, eq. H2);
        l = l_1 log2 g + h ⌈log2 k⌉ l_net; of a library the least of its protocols (eq. H3)

    Args:
        size_bytes: S as `Exchange.size_bytes`, any shape.
        pattern: any but point-to-point.
        protocols: of a library whose fixed times are known; empty: the tiers' own.

    Source:
        Hierarchical all-reduce: 2 nodes of H100 at 24 MB to 3.2 GB, 4 nodes of H200 and B200 at
        4 GiB, -12 to +9 %.

    Ignores:
        Bandwidth that ramps up below 64 MiB, where tables are better; in-network reduction.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    inner, domain = spans[0], topology.tiers[0]
    within = 0 * size
    if inner > 1:
        share = size * inner / math.prod(spans) if pattern == "all-to-all" else size
        within = TRAFFIC[pattern](inner) * share / domain.achieved_bytes_per_s()
    outside, latency = 0 * size, domain.latency_s * math.log2(inner)
    domains = math.prod(spans) // inner
    if domains > 1:
        between = network(topology, spans)
        outside = size * between.seconds_per_byte
        if pattern != "all-to-all":
            outside = size * (TRAFFIC[pattern](domains) / inner) / between.bytes_per_s
        ways = 2 if pattern == "all-reduce" else 1  # up and down a tree, or one way
        latency += ways * math.ceil(math.log2(domains)) * between.hop_s
    both = np.maximum(within, outside) + OVERLAP_LEFT * np.minimum(within, outside)
    library = [
        protocol_s(protocol, pattern, (inner, domains), size, both)
        for protocol in protocols
        if pattern == "all-reduce"
        or (protocol.algorithm == "ring" and pattern in {"all-gather", "reduce-scatter"})
    ]
    seconds = np.minimum.reduce(library) if library else latency + both
    return np.asarray(np.where(size > 0, seconds, 0.0))


def library_s(
    size_bytes: ArrayLike,
    exchange: Exchange,
    library: AllToAllLibrary,
    topology: Topology,
    spans: Sequence[int],
) -> NDArray[np.float64]:
    """
    Time a dispatch to experts, or the combine after it, by a library.

        t = l + max(S c_i / min(q B_1 e_1, B_q), S c_o x),  x of eq. H1 for all to all;
        each expert a copy: c_i = k (g - 1)/n, c_o = k;  q = 1, B_q without bound
        each GPU, and each domain, one: c_i = r(n) (g - 1)/g, c_o = r(n/g),
        r(u) = u (1 - (1 - 1/u)^k)      (docs/model.md, eq. H7)

    Args:
        size_bytes: S, of all tokens of a GPU, once; any shape.
        exchange: k, and in which steps a GPU gets one copy.
        topology: of the group of n GPUs, g in a domain.
        spans: `Topology.spans` of the group.

    Source:
        DeepEP's kernels: low-latency ones send each expert a message; normal ones send a domain
        one, to the GPU with the sender's number, which forwards it. tests/published/deepep.toml.

    Ignores:
        Experts of a token that are chosen in few groups (DeepSeek's in 4 of 8), or unevenly;
        scales of fp8; that DeepEP 1 forwards in domains of 8 GPUs at most.
    """
    size, total, inner = np.asarray(size_bytes, dtype=np.float64), math.prod(spans), spans[0]

    def reached(units: int) -> float:
        return units * (1 - (1 - 1 / units) ** exchange.copies)

    links = topology.tiers[0].achieved_bytes_per_s()
    copied = min(library.inside_fraction * links, library.inside_bytes_per_s)
    once_s, each_s = reached(total) * (inner - 1) / inner / copied, exchange.copies / total
    each_s *= (inner - 1) / links
    if total > inner:
        between = network(topology, spans).seconds_per_byte
        once_s = max(once_s, reached(total // inner) * between)
        each_s = max(each_s, exchange.copies * between)
    seconds = np.where(
        exchange.once, library.prompt_latency_s + size * once_s, library.latency_s + size * each_s
    )
    return np.asarray(np.where(size > 0, seconds, 0.0))


def ring_s(
    size_bytes: ArrayLike, pattern: str, topology: Topology, spans: Sequence[int]
) -> NDArray[np.float64]:
    """
    Time a collective as one flat ring: chunks of S/n, one hop after the other.

        t = h (n - 1) (l_net + S / (n B_net)), h = 2 for an all-reduce, else 1
        (docs/model.md, eq. H6)

    Args:
        size_bytes: S, any shape.
        pattern: all-reduce, all-gather or reduce-scatter.

    Returns:
        Seconds. Messages shrink as the ring grows, and the hops add up: 20 ms for 1,024 GPUs at
        10 us a hop.

    Ignores:
        Several rings at a time, which is what a tree or a hierarchy is taken for.
    """
    size, total = np.asarray(size_bytes, dtype=np.float64), math.prod(spans)
    domain = topology.tiers[0]
    hop_s, per_s = domain.latency_s, domain.achieved_bytes_per_s()
    if total > spans[0]:
        between = network(topology, spans)
        hop_s, per_s = max(hop_s, between.hop_s), min(per_s, between.bytes_per_s)
    steps = (2 if pattern == "all-reduce" else 1) * (total - 1)
    return np.asarray(np.where(size > 0, steps * (hop_s + size / total / per_s), 0.0))


def protocol_s(
    protocol: CollectiveProtocol,
    pattern: str,
    spread: tuple[int, int],
    size_bytes: NDArray[np.float64],
    links_s: NDArray[np.float64],
) -> NDArray[np.float64]:
    """
    Time one algorithm of a library in one of its protocols.

        ring: base + h ((n - k) max(inside, post) + (k - 1) between) + max(o t, f(n) S / bus),
        tree: base + h ((g - 1) max(inside, post) + floor(log2 k) between) + the same
        (docs/model.md, eq. H3)

    Args:
        protocol: its constants; nothing is posted in one HB domain.
        pattern: h = 2 for an all-reduce, else 1.
        spread: g GPUs in each of k HB domains, n = g k.
        size_bytes: S, any shape.
        links_s: t, what the links take for S.

    Returns:
        Seconds; infinite where the library takes another protocol.

    Source:
        NCCL, src/graph/tuning.cc.
    """
    inner, domains = spread
    total, passes = inner * domains, 2 if pattern == "all-reduce" else 1
    inside = protocol.inside_s if domains == 1 else max(protocol.inside_s, protocol.post_s)
    hops, crossings = total - domains, domains - 1
    if protocol.algorithm == "tree":
        hops, crossings = inner - 1, math.floor(math.log2(domains))
    seconds = protocol.overhead * links_s
    if protocol.bus_bytes_per_s:
        bus = protocol.bus_bytes_per_s[min(domains, BUS_SIZES) - 1]
        seconds = np.maximum(seconds, TRAFFIC[pattern](total) * size_bytes / bus)
    seconds = seconds + protocol.base_s + passes * (hops * inside + crossings * protocol.between_s)
    if domains > 1 and protocol.up_to_bytes is not None:
        seconds = np.where(size_bytes < protocol.up_to_bytes, seconds, np.inf)
    return np.asarray(seconds)

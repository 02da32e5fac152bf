"""Configurations of an endpoint without a plan, for tests of one rule."""

from __future__ import annotations

from minicluster.plan import Routing
from serving.protocol.messages import EndpointConfig, PoolConfig

ONGOING = dict.fromkeys(("prefill", "decode", "mixed"), 64)
"""Requests that a replica of each role has at once, in tests of something else."""


def unplanned(
    *,
    prefill_deadline_s: float = 2.0,
    kv_wait_deadline_s: float = 2.0,
    fallback: str = "fail",
    max_model_len: int = 2048,
    max_num_seqs: int = 16,
) -> EndpointConfig:
    """Return the configuration of one prefill and one decode replica."""
    size = {"gpu": "cpu", "tp": 1, "max_num_batched_tokens": 2048, "kv_bytes": 1e9}
    size |= {"max_num_seqs": max_num_seqs, "max_ongoing_requests": ONGOING["decode"]}
    pools = tuple(
        PoolConfig(role=role, replicas={"d0": 1}, **size)  # type: ignore[arg-type]
        for role in ("prefill", "decode")
    )
    return EndpointConfig(
        model_id="demo",
        max_model_len=max_model_len,
        block_size=32,
        plan_hash="",
        prefill_deadline_s=prefill_deadline_s,
        kv_wait_deadline_s=kv_wait_deadline_s,
        routing=Routing(fallback=fallback),
        pools=pools,
        pairing={"d0": ("d0",)},
        tokens_per_step=1.0,
    )

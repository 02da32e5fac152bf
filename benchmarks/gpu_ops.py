"""
Time GEMMs, attention and copies on this GPU, each as a CUDA graph over data that no cache holds.

    python benchmarks/gpu_ops.py --out FOLDER [gemm copy attention]

Needs a CUDA GPU and PyTorch; attention needs vLLM's FlashAttention 3. Writes FOLDER/ops.csv.
`gpu_compare.py` sets the times beside the sizer's.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CACHE_BYTES = 256 << 20
"""Several times the L2 cache: calls go over as many copies of the data."""
REPEATS = 7
LAYERS = {
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
}
"""Outputs and inputs of the four GEMMs of a layer: QKV, output, gate and up, down."""
TOKENS = (1, 8, 32, 64, 128, 512, 1024, 2048, 8192)
HEADS = ((32, 8), (64, 8))
CONTEXTS = (1024, 4096, 16384)
BATCHES = (1, 8, 32, 128)
PROMPTS = ((1, 1024), (4, 1024), (1, 4096), (2, 4096), (1, 16384))
HEAD_SIZE, BLOCK = 128, 16
LEAST_FP8_ROWS = 16
"""cuBLASLt pads fewer."""

Line = dict[str, object]


def main() -> int:
    """Time the ops named and write one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", default=["gemm", "copy", "attention"])
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    kinds = {"gemm": gemms, "copy": copies, "attention": attentions}
    if unknown := sorted(set(chosen.ops) - set(kinds)):
        parser.error(f"unknown ops {', '.join(unknown)}; expected of: {', '.join(kinds)}")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU here")
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    lines = [line for name in chosen.ops for line in kinds[name]()]
    keys = list(dict.fromkeys(key for line in lines for key in line))
    with (chosen.out / f"ops_{'_'.join(chosen.ops)}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys, restval="")
        writer.writeheader()
        writer.writerows(lines)
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda, len(lines), "ops")
    return 0


def seconds(calls: list[Callable[[], object]]) -> float:
    """Return the median time of a call, of graphs that make each of the calls in turn."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def gemms() -> Iterator[Line]:
    """Time the GEMMs of a layer in bf16 and fp8, with the weights of many layers in turn."""
    one = torch.ones((), device="cuda")

    def bf16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w.t())

    def fp8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(  # noqa: SLF001
            x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    kinds = (("bf16", torch.bfloat16, bf16, 1), ("fp8", torch.float8_e4m3fn, fp8, LEAST_FP8_ROWS))
    for model, shapes in LAYERS.items():
        for (n, k), (name, dtype, product, least) in itertools.product(shapes, kinds):
            layers = max(4, CACHE_BYTES // (n * k * 2))
            weights = [torch.randn(n, k, device="cuda").to(dtype) for _ in range(layers)]
            for m in (m for m in TOKENS if m >= least):
                x = torch.randn(m, k, device="cuda").to(dtype)
                yield {"op": "gemm", "dtype": name, "model": model, "m": m, "n": n, "k": k,
                       "seconds": seconds([partial(product, x, w) for w in weights])}  # fmt: skip
            del weights
            torch.cuda.empty_cache()


def copies() -> Iterator[Line]:
    """Time copies between pinned host memory and the GPU."""
    part = torch.randint(0, 255, (1 << 30,), device="cuda", dtype=torch.uint8)
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    for name, to, of in (("host_to_device", part, host), ("device_to_host", host, part)):
        call = partial(to.copy_, of, non_blocking=True)
        yield {"op": name, "bytes": 1 << 30, "seconds": seconds([call])}


def attentions() -> Iterator[Line]:
    """Time vLLM's attention over a paged KV cache: prompts alone, and one new token each."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: PLC0415

    for heads, kv_heads in HEADS:
        cases = [("prefill", batch, length, length) for batch, length in PROMPTS]
        cases += [("decode", batch, 1, context) for context in CONTEXTS for batch in BATCHES]
        for kind, batch, new, context in cases:
            blocks = batch * context // BLOCK
            of_all = 2 * blocks * BLOCK * kv_heads * HEAD_SIZE * 2
            if of_all > 40 << 30:
                continue
            layers = max(2, min(32, CACHE_BYTES // of_all))
            shape = (blocks, BLOCK, kv_heads, HEAD_SIZE)
            caches = [
                [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(layers)
            ]
            q = torch.randn(batch * new, heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
            starts = torch.arange(0, batch * new + 1, new, device="cuda", dtype=torch.int32)
            used = torch.full((batch,), context, device="cuda", dtype=torch.int32)
            table = torch.randperm(blocks, device="cuda").to(torch.int32).view(batch, -1)
            attend = partial(
                flash_attn_varlen_func, q=q, out=torch.empty_like(q), cu_seqlens_q=starts,
                max_seqlen_q=new, seqused_k=used, max_seqlen_k=context, causal=True,
                softmax_scale=HEAD_SIZE**-0.5, block_table=table, fa_version=3,
            )  # fmt: skip
            calls = [partial(attend, k=k, v=v) for k, v in caches]
            yield {"op": f"{kind}_attention", "dtype": "bf16", "heads": heads, "kv_heads": kv_heads,
                   "batch": batch, "new": new, "context": context,
                   "seconds": seconds(calls)}  # fmt: skip
            del caches
            torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())

"""
Fills vLLM's own KV cache with equal sequences, without a model: cases in, counts out, as JSON.

`test_pages.py` runs it in a fork of the process that has imported vLLM.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.uint8}


def state_of(case: dict[str, Any]) -> tuple[Any, tuple[torch.dtype, ...]]:
    """Return shapes and dtypes of a linear layer's state."""
    linear, tp, drafts = case["linear"], case["tp"], case["drafts"]
    keys, heads = linear["num_key_heads"], linear["num_value_heads"]
    key, value = linear["key_head_dim"], linear["value_head_dim"]
    made, width = MambaStateShapeCalculator, linear["conv_kernel"]
    dtypes = (torch.bfloat16, DTYPES[linear["state_dtype"]])
    if linear["kind"] == "delta":
        shapes = made.gated_delta_net_state_shape(tp, keys, heads, key, value, width, drafts)
    elif linear["kind"] == "mamba2":
        shapes = made.mamba2_state_shape(tp, heads * value, keys, heads, value, key, width, drafts)
    else:
        return made.linear_attention_state_shape(heads, tp, value), dtypes[1:]
    return shapes, dtypes


def settings_of(case: dict[str, Any]) -> SimpleNamespace:
    """Return what vLLM reads of its config, blocks aligned to states as it does."""
    caching = case["linear"] is not None
    cache = SimpleNamespace(
        block_size=case["block_size"], cache_dtype="auto", mamba_block_size=None,
        user_specified_mamba_block_size=False, mamba_page_size_padded=None,
        mamba_cache_mode="align" if caching else "none", enable_prefix_caching=caching,
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC, num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None, prefix_match_unit=None,
    )  # fmt: skip
    model = SimpleNamespace(
        dtype=torch.bfloat16, use_mla=case["latent"] > 0, architecture="",
        max_model_len=case["longest"],
        get_num_kv_heads=lambda _: case["kv_heads"], get_head_size=lambda: case["head_dim"],
    )  # fmt: skip
    settings = SimpleNamespace(
        cache_config=cache, model_config=model, kv_transfer_config=None, speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        max_in_flight_tokens=case["in_flight"], compilation_config=None,
    )  # fmt: skip
    if case["linear"] and case["full"] + case["window"]:
        shapes, dtypes = state_of(case)
        hybrid = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda _: shapes,
            get_mamba_state_dtype_from_config=lambda _: dtypes,
        )
        backend = SimpleNamespace(
            customize_spec=lambda spec: spec,
            get_supported_kernel_block_sizes=lambda: [MultipleOf(16)],
        )
        with (
            patch("vllm.model_executor.models.ModelRegistry.resolve_model_cls",
                  lambda *_, **__: (hybrid, "")),
            patch("vllm.config.vllm.set_current_vllm_config"),
        ):  # fmt: skip
            Platform._align_hybrid_block_size(settings, backend)
    return settings


def layers_of(case: dict[str, Any], settings: SimpleNamespace) -> dict[str, KVCacheSpec]:
    """Return the KV cache of each layer, kinds in turn."""
    cache = settings.cache_config
    size, dtype = cache.block_size, DTYPES[case["kv_dtype"]]
    heads = {"num_kv_heads": case["kv_heads"], "head_size": case["head_dim"], "dtype": dtype}
    found: dict[str, KVCacheSpec] = {}
    names = (f"layer.{number}" for number in count())
    for _ in range(case["full"]):
        if case["latent"]:
            found[next(names)] = MLAAttentionSpec(
                block_size=size, num_kv_heads=1, head_size=case["latent"], dtype=dtype
            )
        else:
            found[next(names)] = FullAttentionSpec(block_size=size, **heads)
        if case["index"]:
            found[next(names)] = MLAAttentionSpec(
                block_size=size, num_kv_heads=1, head_size=case["index"], dtype=torch.uint8
            )
    for _ in range(case["window"]):
        if case["chunked"]:
            found[next(names)] = ChunkedLocalAttentionSpec(
                block_size=size, **heads, attention_chunk_size=case["window_tokens"]
            )
        else:
            found[next(names)] = SlidingWindowSpec(
                block_size=size, **heads, sliding_window=case["window_tokens"]
            )
    for _ in range(case["states"]):
        shapes, dtypes = state_of(case)
        found[next(names)] = MambaSpec(
            block_size=size, shapes=shapes, dtypes=dtypes, num_speculative_blocks=case["drafts"],
            page_size_padded=cache.mamba_page_size_padded, mamba_cache_mode=cache.mamba_cache_mode,
        )  # fmt: skip
    for kv_heads, head_dim in case["draft"]:
        found[next(names)] = FullAttentionSpec(
            block_size=size, num_kv_heads=kv_heads, head_size=head_dim, dtype=dtype
        )
    return found


def filled(case: dict[str, Any]) -> dict[str, Any]:
    """Take in sequences, chunk by chunk, until the next one finds no room."""
    settings = settings_of(case)
    groups = get_kv_cache_groups(settings, layers_of(case, settings))
    whole = get_kv_cache_config_from_groups(settings, groups, case["bytes"])
    config = generate_scheduler_kv_cache_config([whole])
    block, hashed = resolve_kv_cache_block_sizes(config, settings)
    caching = settings.cache_config.enable_prefix_caching
    manager = KVCacheManager(
        config, max_model_len=case["longest"], scheduler_block_size=block, hash_block_size=hashed,
        max_in_flight_tokens=case["in_flight"], enable_caching=caching,
    )  # fmt: skip
    hasher = get_request_block_hasher(hashed, sha256)
    taken = 0
    while taken < case["most"]:
        request = Request(
            str(taken), [taken, *range(case["tokens"] - 1)], SamplingParams(max_tokens=1), None,
            block_hasher=hasher if caching else None,
        )  # fmt: skip
        if not taken_in(manager, request, case["step"], settings.cache_config.block_size):
            break
        taken += 1
    return {
        "sequences": taken,
        "blocks": config.num_blocks,
        "block_tokens": settings.cache_config.block_size,
        "groups": len(config.kv_cache_groups),
    }


def taken_in(manager: KVCacheManager, request: Request, step: int, block: int) -> bool:
    """Compute a whole prompt; say whether there was room."""
    aligned = max(1, step // block) * block if manager.enable_caching else step
    while request.num_computed_tokens < request.num_tokens:
        new = min(aligned, request.num_tokens - request.num_computed_tokens)
        found = manager.allocate_slots(
            request, new, full_sequence_must_fit=request.num_computed_tokens == 0
        )
        if found is None:
            return False
        request.num_computed_tokens += new
        manager.new_step_starts()
    manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
    return True


def main() -> None:
    """Read cases from the first file, write answers to the second."""
    init_none_hash(sha256)
    register_all_kvcache_specs(SimpleNamespace(model_config=None))
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = [filled(case) for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()

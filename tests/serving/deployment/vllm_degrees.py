"""
Builds vLLM's own sliced layers at every degree, without weights: cases in, refusals out, as JSON.

`test_degrees.py` runs it in a fork of the process that has imported vLLM.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.utils import divide
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import refine_fp8_moe_block_shape
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as fp8_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as int4_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_wNa16 as int4_linear,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4LinearMethod
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Method
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms.interface import DeviceCapability
from vllm.scalar_type import scalar_types

if TYPE_CHECKING:
    from collections.abc import Iterator

REFUSALS = (AssertionError, ValueError)
MOST = 64


def bare(kind: type, **attributes: Any) -> Any:  # noqa: ANN401
    """Return an object whose constructor, which looks for a GPU, did not run."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


class Method:
    """Has vLLM's method of one quantisation look at the shapes of a layer."""

    def __init__(self, case: dict[str, Any]) -> None:
        """Take a case's `format`, `dtype` and `group`."""
        self.format, self.dtype, self.group = case["format"], case["dtype"], case["group"]

    def create_weights(  # noqa: C901  (one branch a quantisation)
        self,
        layer: torch.nn.Module,
        **shapes: Any,  # noqa: ANN401
    ) -> None:
        """Raise what vLLM raises."""
        sizes = {
            name: shapes[name]
            for name in ("input_size_per_partition", "output_partition_sizes", "input_size",
                         "output_size")
        }  # fmt: skip
        if self.dtype == "fp8":
            if self.group:
                validate_fp8_block_shape(layer, **sizes, block_size=[self.group] * 2)
        elif self.format == "awq":
            if not marlin_utils.check_marlin_supports_layer(
                layer, self.group, allow_tile_padding=True
            ):
                config = SimpleNamespace(group_size=self.group, pack_factor=8)
                AutoAWQLinearMethod(config).create_weights(
                    torch.nn.Module(), **sizes, params_dtype=torch.bfloat16,
                    weight_loader=None,
                )  # fmt: skip
        elif self.format == "gptq":
            taken, why = MarlinLinearKernel.can_implement(self._shape(sizes))
            if not taken:
                raise ValueError(why)
        elif self.format == "compressed-tensors" and self.group:
            bits = 4 if self.dtype == "int4" else 8
            kind = scalar_types.uint4b8 if bits == 4 else scalar_types.uint8b128
            bare(
                int4_linear.CompressedTensorsWNA16,
                quant_type=kind, group_size=self.group, symmetric=True, has_g_idx=False,
                num_bits=bits, pack_factor=32 // bits, layer_name="", strategy="group",
                _kernel_backends_being_used={"Mock"},
            ).create_weights(
                torch.nn.Module(), **sizes, params_dtype=torch.bfloat16, weight_loader=None,
            )  # fmt: skip
        elif self.format == "modelopt" and self.dtype == "fp4":
            config = SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)
            bare(ModelOptNvFp4LinearMethod, quant_config=config, kernel=MagicMock()).create_weights(
                torch.nn.Module(), **sizes, params_dtype=torch.bfloat16, weight_loader=None,
            )  # fmt: skip

    def _shape(self, sizes: dict[str, Any]) -> MPLinearLayerConfig:
        outputs = sum(sizes["output_partition_sizes"])
        return MPLinearLayerConfig(
            full_weight_shape=(sizes["input_size"], sizes["output_size"]),
            partition_weight_shape=(sizes["input_size_per_partition"], outputs),
            weight_type=scalar_types.uint4b8,
            act_type=torch.bfloat16,
            group_size=self.group or -1,
            zero_points=False,
            has_g_idx=False,
        )


class Quantised:
    """A quantisation whose layers are looked at by `Method`."""

    packed_modules_mapping: dict[str, list[str]] = {}  # noqa: RUF012

    def __init__(self, case: dict[str, Any]) -> None:
        """Take a case."""
        self.case = case
        # CompressedTensorsConfig has no such attribute.
        blocks = case["dtype"] == "fp8" and case["group"] and case["format"] == "fp8"
        self.weight_block_size = [case["group"]] * 2 if blocks else None

    def get_quant_method(self, *_: object, **__: object) -> Method:
        """Return the method of every layer."""
        return Method(self.case)


def layers(case: dict[str, Any], tp: int) -> Iterator[object]:
    """Build what every rank holds a slice of, experts aside."""
    quantised = Quantised(case) if case["format"] else None
    hidden, attention = case["hidden"], quantised if case["attention_quantised"] else None
    yield VocabParallelEmbedding(case["vocabulary"], hidden)
    if mla := case["mla"]:
        heads = divide(case["heads"], tp) * tp
        nope, rope, values = mla["qk_nope_head_dim"], mla["qk_rope_head_dim"], mla["v_head_dim"]
        queries = mla["q_lora_rank"] or hidden
        yield ColumnParallelLinear(queries, heads * (nope + rope), quant_config=attention)
        yield ColumnParallelLinear(
            mla["kv_lora_rank"], heads * (nope + values), quant_config=attention
        )
        yield RowParallelLinear(heads * values, hidden, quant_config=attention)
    elif case["attends"]:
        yield divide(case["heads"], tp)  # ModelConfig.verify_with_parallel_config
        yield QKVParallelLinear(
            hidden, case["head_dim"], case["heads"], case["kv_heads"], quant_config=attention
        )
        yield RowParallelLinear(case["heads"] * case["head_dim"], hidden, quant_config=attention)
    if linear := case["linear"]:
        keys, heads = linear["num_key_heads"], linear["num_value_heads"]
        key, value = linear["key_head_dim"], linear["value_head_dim"]
        if linear["kind"] == "delta":
            MambaStateShapeCalculator.gated_delta_net_state_shape(tp, keys, heads, key, value, 4)
            yield divide(keys, tp)  # its forward gives each rank whole key heads
            yield MergedColumnParallelLinear(
                hidden, [keys * key] * 2 + [heads * value] * 2, quant_config=attention
            )
        elif linear["kind"] == "mamba2":
            MambaStateShapeCalculator.mamba2_state_shape(
                tp, heads * value, keys, heads, value, key, 4
            )
            assert keys % tp == 0 or keys == 1  # MambaMixer2.__init__
        yield divide(heads, tp)
        yield RowParallelLinear(heads * value, hidden, quant_config=attention)
    if case["ffn"]:
        yield from feedforward(case, case["ffn"], quantised if case["dense_quantised"] else None)


def feedforward(case: dict[str, Any], width: int, quantised: Quantised | None) -> Iterator[object]:
    """Build a feed-forward."""
    outputs = [width, width] if case["gated"] else [width]
    yield MergedColumnParallelLinear(case["hidden"], outputs, quant_config=quantised)
    yield RowParallelLinear(width, case["hidden"], quant_config=quantised)


def experts(case: dict[str, Any], tp: int) -> None:
    """Have vLLM's method look at slices of routed experts."""
    hidden, group, layer = case["hidden"], case["group"], torch.nn.Module()
    part = divide(case["expert"], tp)  # FusedMoEConfig.__post_init__ asserts it
    moe = SimpleNamespace(
        intermediate_size_per_partition=part, intermediate_size_per_partition_unpadded=part,
        hidden_dim=hidden, tp_size=tp, w13_num_shards=2, is_act_and_mul=True, has_bias=False,
    )  # fmt: skip
    shapes = {
        "num_experts": 2, "hidden_size": hidden, "intermediate_size_per_partition": part,
        "params_dtype": torch.bfloat16, "intermediate_size_full": case["expert"],
        "weight_loader": None,
    }  # fmt: skip
    block = [group, group]
    if case["format"] == "fp8" and group:
        refined = refine_fp8_moe_block_shape(moe, block)
        bare(
            Fp8MoEMethod,
            quant_config=SimpleNamespace(is_checkpoint_fp8_serialized=True,
                                         activation_scheme="dynamic"),
            block_quant=True, weight_block_size=block, moe_block_shape=refined or block, moe=moe,
            weight_scale_refine=refined and (group // refined[0],) * 2,
            weight_scale_name="weight_scale_inv",
        ).create_weights(layer, **shapes)  # fmt: skip
    elif case["format"] == "compressed-tensors" and case["dtype"] == "fp8" and group:
        bare(
            fp8_experts.CompressedTensorsW8A8Fp8MoEMethod,
            block_quant=True, weight_block_size=block, moe=moe, static_input_scales=False,
            weight_quant=SimpleNamespace(strategy="block"), input_quant=None,
        ).create_weights(layer, **shapes)  # fmt: skip
    elif case["format"] == "compressed-tensors" and case["dtype"] == "int4" and group:
        bare(
            int4_experts.CompressedTensorsWNA16MoEMethod,
            group_size=group, strategy="group", actorder=None, symmetric=True, packed_factor=8,
            num_bits=4, moe=moe, is_transposed=True, wna16_moe_backend=None,
        ).create_weights(layer, **shapes)  # fmt: skip
    elif case["format"] in {"awq", "gptq"} and not marlin_utils.check_moe_marlin_supports_config(
        moe, group, allow_tile_padding=True
    ):
        config = MagicMock(bit8_pack_factor=2, group_size=group, has_zp=False)
        bare(MoeWNA16Method, quant_config=config, moe=moe).create_weights(layer, **shapes)


def refused(case: dict[str, Any], tp: int) -> dict[str, bool]:
    """Say what of a model vLLM refuses to build at a degree."""

    def fails(build: object) -> bool:
        try:
            for _ in build() or ():  # type: ignore[operator]
                pass
        except REFUSALS:
            return True
        return False

    quantised = Quantised(case) if case["format"] and case["shared_quantised"] else None
    where = "vllm.model_executor.layers."
    modules = [
        "vllm.distributed",
        *(where + name for name in ("linear", "vocab_parallel_embedding", "quantization.fp8")),
    ]
    found = {}
    with ExitStack() as stack:
        for module in modules:
            name = f"{module}.get_tensor_model_parallel_world_size"
            stack.enter_context(patch(name, lambda: tp))
        found["tp"] = fails(lambda: layers(case, tp))
        if case["expert"]:
            found["experts"] = fails(lambda: experts(case, tp))
        if case["shared"]:
            found["shared"] = fails(lambda: feedforward(case, case["shared"], quantised))
    return found


def main() -> None:
    """Read cases from the first file, write for each what is refused at degrees 1 to 64."""
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    module = "vllm.model_executor."
    hopper = {"is_cuda": True, "is_rocm": False, "is_cpu": False, "is_xpu": False}
    cuda = SimpleNamespace(
        **{name: lambda value=value: value for name, value in hopper.items()},
        get_device_capability=lambda: DeviceCapability(9, 0),
        is_device_capability=lambda number: number == 90,
    )
    patches = {
        f"{module}layers.linear.get_tensor_model_parallel_rank": lambda: 0,
        f"{module}layers.vocab_parallel_embedding.get_tensor_model_parallel_rank": lambda: 0,
        f"{module}parameter.get_tensor_model_parallel_rank": lambda: 0,
        f"{module}parameter.get_tensor_model_parallel_world_size": lambda: 1,
        f"{module}layers.quantization.compressed_tensors.compressed_tensors_moe."
        "compressed_tensors_moe_w8a8_fp8.get_tensor_model_parallel_world_size": lambda: 2,
    }
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(VllmConfig()))
        stack.enter_context(torch.device("meta"))
        for name, value in patches.items():
            stack.enter_context(patch(name, value))
        for name in (
            "kernels.linear.mixed_precision.marlin",
            "layers.quantization.utils.marlin_utils",
        ):
            stack.enter_context(patch(f"{module}{name}.current_platform", cuda))
        stack.enter_context(patch.object(MarlinLinearKernel, "__init__", lambda *_a, **_k: None))
        stack.enter_context(
            patch.object(int4_linear, "choose_mp_linear_kernel", lambda _: MarlinLinearKernel)
        )
        answers = [[refused(case, tp) for tp in range(1, MOST + 1)] for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()

"""LoRA adapters: the engine's slots for them, their layers, bytes and popularity."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Positive, Spec, choice
from minicluster.specs.model import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.specs.model import ModelSpec

ATTENTION_MODULES = ("qkv_proj", "o_proj")
MODULES = (*ATTENTION_MODULES, "gate_up_proj", "down_proj")
"""Linear layers that adapters may change, as vLLM's modules are named: q, k and v are one."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.29.0 takes as `max_lora_rank` (config/lora.py)."""

DEFAULT_RANK = 16  # vLLM's


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec(Spec):
    """
    LoRA adapters of a deployment; the first four are vLLM's settings.

    Attributes:
        max_loras: distinct adapters in a batch, and slots for adapters on the GPUs.
        max_lora_rank: rank of every slot; adapters are taken to have it.
        max_cpu_loras: adapters in host memory: all of them.
        popularity_exponent: s of their popularity, as planned for; 0: all alike.
        host_bytes_per_s: rate of copies from host memory, by the name of the GPU.
    """

    _TABLE: ClassVar[str] = "engine.lora"

    max_loras: Count
    max_lora_rank: Count
    max_cpu_loras: Count
    target_modules: tuple[Annotated[str, choice(*MODULES)], ...] = MODULES
    adapters: Count
    popularity_exponent: NotNegative = 0.0
    host_bytes_per_s: dict[str, Positive] = field(default_factory=dict)

    def _check(self) -> None:
        for name in ("max_loras", "adapters"):
            if getattr(self, name) > self.max_cpu_loras:
                place, expected = self._place("max_cpu_loras"), f"{getattr(self, name)} or more"
                raise InputError(place, self.max_cpu_loras, f"{expected}, {name}")


class Module(NamedTuple):
    """An adapter's matrices in one layer of a module on one GPU: A is r x inner, B columns x r."""

    name: str
    parts: int
    inner: float
    columns: float

    @property
    def values_per_rank(self) -> float:
        """Values of all A and B of an adapter, over its rank."""
        return self.parts * self.inner + self.columns


def lora_modules(lora: LoraSpec, model: ModelSpec, *, tp: int) -> Iterator[Module]:
    """
    Yield the adapters' matrices of one layer on one of *tp* GPUs (docs/model.md, eq. P7).

    Source: vLLM 0.29.0, lora/layers/column_parallel_linear.py and row_parallel_linear.py without
    `fully_sharded_loras`: of layers sliced by columns A is whole and B sliced, of layers sliced by
    rows A is sliced and B whole.
    """
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim / tp
    keys = max(1.0, model.num_kv_heads / tp) * model.head_dim
    ffn = model.ffn_size / tp
    sizes = {
        "qkv_proj": Module("qkv", 3, hidden, heads + 2 * keys),
        "o_proj": Module("o", 1, heads, hidden),
        "gate_up_proj": Module("gate up", 2, hidden, 2 * ffn),
        "down_proj": Module("down", 1, ffn, hidden),
    }
    return (sizes[name] for name in lora.target_modules)


def adapter_bytes(lora: LoraSpec, model: ModelSpec, *, tp: int, layers: int) -> float:
    """
    Return the bytes of an adapter, or of a slot, in *layers* layers on one GPU (eq. P7).

        M_ad = l r w sum over modules of (parts n + m)      (docs/model.md, eq. P7)

    Ignores: Adapters of a lower rank, or of fewer modules, than the slots are for.
    """
    values = sum(module.values_per_rank for module in lora_modules(lora, model, tp=tp))
    return layers * lora.max_lora_rank * values * DTYPE_BYTES[model.dtype]


@cache
def popularity(adapters: int, exponent: float) -> tuple[float, ...]:
    """Return each adapter's share of the requests, p_i ~ i^-s: Zipf's law; 0: all alike."""
    weights = [(at + 1) ** -exponent for at in range(adapters)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def check_lora(lora: LoraSpec, model: ModelSpec, *, place: str) -> None:
    """Refuse adapters that vLLM or our formulas do not know for a model."""
    if lora.max_lora_rank > model.hidden_size:
        raise InputError(
            f"{place}.max_lora_rank",
            lora.max_lora_rank,
            f"at most {model.hidden_size}, the width of {model.id}",
        )
    odd = {
        "latent attention": model.mla is not None,
        "linear attention": model.linear is not None,
        "gated attention": model.gated_attention,
        "heads of several kinds": model.full_heads is not None,
        "a feed-forward without a gate": not model.gated_mlp,
    }
    for what, there in odd.items():
        if there:
            raise InputError(
                f"{place}.max_loras",
                lora.max_loras,
                f"none: adapters of models with {what}, as {model.id}, are not modelled",
                "leave out max_loras and workload.lora_adapters",
            )
    if model.moe is not None and not set(lora.target_modules) <= set(ATTENTION_MODULES):
        raise InputError(
            f"{place}.lora_target_modules",
            ", ".join(lora.target_modules),
            f"only {' and '.join(ATTENTION_MODULES)}: adapters of experts, as {model.id} has, are"
            " not modelled",
            f"--set engine.lora_target_modules={list(ATTENTION_MODULES)!r}",
        )

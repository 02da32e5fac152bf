"""The catalog of links between GPUs and host memory, `configs/host_links.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from minicluster.config import parse, read_toml
from minicluster.errors import InputError
from minicluster.plan.deployment import KvOffload
from minicluster.specs.checks import Fraction, Positive, Spec
from minicluster.specs.lora import DEFAULT_RANK, MODULES, RANKS, LoraSpec
from sizing.catalog.folder import configs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.scenario import EngineChoice, ScenarioSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink(Spec):
    """`[[links]]`: peak of a GPU's link to host memory, one way, and the share copies reach."""

    _TABLE: ClassVar[str] = "links[]"

    gpus: tuple[str, ...]
    peak_bytes_per_s: Positive
    efficiency: Fraction
    document: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """The file."""

    links: tuple[HostLink, ...]


@cache
def host_links() -> dict[str, HostLink]:
    """Return the link of every GPU that has one, by the GPU's name."""
    path = configs() / "host_links.toml"
    links = parse(HostLinks, read_toml(path), place=path.name).links
    return {gpu: link for link in links for gpu in link.gpus}


def _host_rates(gpus: Iterable[GpuSpec], place: str, value: object) -> dict[str, float]:
    rates = {}
    for gpu in gpus:
        link = host_links().get(gpu.name)
        if link is None:
            known = ", ".join(sorted(host_links()))
            expected = "a GPU whose link to host memory is known: configs/host_links.toml has none"
            raise InputError(place, value, f"{expected} of {gpu.name}", f"leave it out, or {known}")
        rates[gpu.name] = link.peak_bytes_per_s * link.efficiency
    return rates


def kv_offload(
    choice: EngineChoice, gpus: Iterable[GpuSpec], *, engine: str, place: str = "engine"
) -> KvOffload | None:
    """
    Return what a scenario offloads, with the rate of each GPU's link; `None`: nothing.

    Raises:
        InputError: an engine or a GPU without it.
    """
    size = choice.kv_offload_host_bytes
    if not size:
        return None
    where = f"{place}.kv_offload_host_bytes"
    if engine != "vllm":
        raise InputError(where, size, f"no such key: offloading is modelled for vllm, not {engine}")
    return KvOffload(
        host_bytes=size,
        host_bytes_per_s=_host_rates(gpus, where, size),
        disk_bytes=choice.kv_offload_disk_bytes or 0.0,
        disk_bytes_per_s=choice.kv_offload_disk_bytes_per_s,
        disk_path=choice.kv_offload_disk_path,
    )


def lora_spec(
    scenario: ScenarioSpec, gpus: Iterable[GpuSpec], *, engine: str, place: str = "engine"
) -> LoraSpec | None:
    """
    Return the adapters of a scenario and their slots; `None`: none.

    Raises:
        InputError: an engine or a GPU without them, or a rank that vLLM refuses.
    """
    choice, workload = scenario.engine, scenario.workload
    if choice.max_loras is None:
        return None
    where, rank = f"{place}.max_loras", choice.max_lora_rank or DEFAULT_RANK
    if engine != "vllm":
        expected = f"no such key: adapters are modelled for vllm, not {engine}"
        raise InputError(where, choice.max_loras, expected)
    if rank not in RANKS:
        known = ", ".join(map(str, RANKS))
        raise InputError(f"{place}.max_lora_rank", rank, f"one of {known}, as {engine} takes them")
    return LoraSpec(
        max_loras=choice.max_loras,
        max_lora_rank=rank,
        max_cpu_loras=choice.max_cpu_loras or max(choice.max_loras, workload.lora_adapters),
        target_modules=choice.lora_target_modules or MODULES,
        adapters=workload.lora_adapters,
        popularity_exponent=workload.lora_popularity_exponent,
        host_bytes_per_s=_host_rates(gpus, where, choice.max_loras),
    )

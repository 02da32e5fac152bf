"""Figures that answers to the claims of the seed documents share: calls of public functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.topology import inventory_of
from sizing import catalog
from sizing.latency.collectives import all_reduce_s
from sizing.network.bom import Bill, NetworkOrder, bill
from sizing.network.bom_as_built import BuiltBill, built_bill
from sizing.network.collective import Question, answer
from sizing.network.gpu_groups import PoolRequest
from sizing.network.pools import PoolRules, place_pools
from sizing.network.rail_only import gains, iteration, relative_performance, traffic, with_batch
from sizing.network.ranks import Degrees, RankPlan, place_ranks
from sizing.network.topology_units import unit_tree
from sizing.planner.studies.rule import find_rule, gpus_by_compute
from sizing.training.closed_forms import scale_factor, training_s
from sizing.training.estimate import estimate
from sizing.training.flops import step_flops, training_flops
from sizing.training.request import TrainingRequest

if TYPE_CHECKING:
    from minicluster.specs.topology import Tier
    from sizing.network.rail_only import Traffic

DAY, YEAR, MONTH = 86_400.0, 365.25 * 86_400.0, 365.25 / 12 * 86_400.0
Value = float | bool | tuple[float, ...]


def peak(gpu: str) -> float:
    """Return the dense bf16 peak of the catalog."""
    return catalog.find_gpu(gpu).peak_flops_per_s["bf16"]


def prefill(tokens: int) -> float:
    """FLOPs of one forward pass of Llama-2-70B."""
    asked = TrainingRequest(model="llama-2-70b", seq=tokens, batch=1, gpu="h100", dp=1)
    return step_flops(asked.job(asked.layout())).forward


def by_rule(tokens: int) -> float:
    """GPUs of the talk's rule of thumb for one prompt in a second."""
    found = gpus_by_compute(find_rule("talk"), prefill(tokens), 1.0, peak("h100")).gpus
    return math.inf if found is None else found


def tier(cluster: str, name: str) -> Tier:
    """Return one tier of a preset."""
    topology = catalog.find_network(cluster)[1]
    return topology.tiers[topology.index(name)]


@cache
def built() -> BuiltBill:
    """Return the bill of the 24K cluster."""
    return built_bill(catalog.clusters()["roce-24k"], catalog.switches())


@cache
def ranks(cluster: str, tp: int, pp: int, dp: int) -> RankPlan:
    """Place a job on a preset."""
    inventory = inventory_of(catalog.find_network(cluster)[1])
    return place_ranks(Degrees(tp=tp, pp=pp, dp=dp), unit_tree(inventory), inventory.tiers)


def tree(kind: str, gpus: int = 32_768, radix: int = 64, hb_size: int = 256) -> Bill:
    """Return a bill as the paper counts."""
    return bill(NetworkOrder(gpus=gpus, hb_size=hb_size, radix=radix, kind=kind))


PAPER = catalog.find_study("rail-only")
MODELS = {model.name: model for model in PAPER.models}


def gain(model: str, small: int) -> float:
    """Percent that doubling the HB size saves at 16,384 GPUs."""
    return 100 * gains(MODELS[model], PAPER, gpus=16_384, hb_sizes=(small, 2 * small))[0]


def shares(name: str, model_parallel: int = 0) -> Traffic:
    """Return the traffic of a model at 32,768 GPUs in HB domains of 256."""
    model = MODELS[name]
    step = iteration(model, PAPER, gpus=32_768, hb_size=256, model_parallel=model_parallel)
    return traffic(model, PAPER, step)


def relative(name: str, times: float = 1.0) -> float:
    """Ideal over rails at 32,768 GPUs in HB domains of 256."""
    model = with_batch(MODELS[name], times * MODELS[name].tokens_per_batch)
    return relative_performance(model, PAPER, gpus=32_768, hb_size=256)


def scaled() -> bool:
    """Scale factor of Llama 3 on 16,384 GPUs: at most 1, and T_n / (n T)."""
    asked = TrainingRequest(model="llama-3.1-405b", seq=8192, batch=2048, gpu="h100",
                            tp=8, pp=16, dp=128)  # fmt: skip
    found = estimate(asked.job(asked.layout()), asked.layout(), asked.machine())
    together, gpus, alone = 90.0, 10, 10.0
    by_hand = together / (gpus * alone)
    return found.scale_factor <= 1 and bool(scale_factor(together, gpus, alone) == by_hand)


def domains_serve() -> bool:
    """TP beyond the HB domain is refused; within, every replica sits in one domain."""
    inventory = inventory_of(catalog.find_network("roce-24k")[1], 64)
    root, prices = unit_tree(inventory), PoolRules(seconds_per_byte=(1.0, 2.0, 2.0, 3.0))
    try:
        place_pools([PoolRequest(role="mixed", replicas=1, tp=16)], root, inventory.tiers, prices)
    except InputError:
        found = place_pools(
            [PoolRequest(role="mixed", replicas=4, tp=8)], root, inventory.tiers, prices
        )
        return all(len({node for node, _ in group.gpus}) == 1 for group in found.groups)
    return False


def forwarded() -> float:
    """Hops across rails without links between them: the rail, and one HB domain."""
    topology = catalog.find_network("roce-24k")[1]
    seconds = [
        answer(
            Question(pattern="point-to-point", group=2, stride=17, size_bytes=1e9, rail_only=only),
            topology,
        ).seconds
        for only in (False, True)
    ]
    extra = (seconds[1] - seconds[0]) * tier("roce-24k", "hb").achieved_bytes_per_s() / 1e9
    return 1 + round(extra)


def tiers_in_order() -> bool:
    """TP crosses nothing, stages stay inside pods, replicas cross as few pods as they can."""
    found = ranks("roce-24k", 8, 16, 128)
    pod = next(cut for cut in found.cuts if cut.tier == "pod")
    return found.optimal and pod.stage_edges == 0 and pod.ring_edges == pod.bound


def latency_rises() -> bool:
    """A hop takes longer the further out two GPUs meet."""
    latencies = [each.latency_s for each in catalog.find_network("roce-24k")[1].tiers]
    return latencies == sorted(latencies) and len(set(latencies)) == len(latencies)


def rate_is_linear() -> bool:
    """Twice the GPUs or twice the rate: half the time."""
    once = training_s(1e24, 512, 1e14)
    return bool(once == 2 * training_s(1e24, 1024, 1e14) == 2 * training_s(1e24, 512, 2e14))


def messages_shrink() -> bool:
    """A GPU's chunk of a ring shrinks with it, so that latency shows: small all-reduces slow."""
    cluster, _ = catalog.find_network("talk-32k")
    gpu = catalog.find_gpu(cluster.gpu)
    small = [float(all_reduce_s(1e4, group, gpu, cluster)) for group in (16, 256, 4096)]
    return small == sorted(small) and small[2] > small[0]


Ask = Callable[[], Value]


def llama2_hours() -> float:
    """A100 hours of Llama-2-70B at the MFU of its model card."""
    flops = training_flops(70e9, 2e12)
    return float(training_s(flops, 1, 0.4347 * peak("a100")) / 3600)


def bands(cluster: str) -> tuple[float, float]:
    """GB/s of one GPU, up and out."""
    return tier(cluster, "hb").bytes_per_s / 1e9, tier(cluster, "rack").bytes_per_s / 1e9


TRAIN = "`sizing train llama-3-405b`"
BUILT = "`sizing fabric bom --preset roce-24k`"
STUDY = "`sizing fabric rail-only`"
LONG = "`sizing long-context`"
RING = "`sizing fabric collective --cluster talk-32k --group 1024 --stride 16 --bytes 1e6`"
CROSS_RAIL = (
    "`sizing fabric collective --cluster gh200-256 --pattern point-to-point --stride 257"
    " --bytes 1e9`"
)


def rule(parameters: str, tokens: str, gpus: int, rate: str, *, full: bool = False) -> str:
    """Return the command of a rule of thumb."""
    text = f"sizing train --parameters {parameters} --tokens {tokens} --gpus {gpus}"
    text += f" --flops-per-gpu-per-s {rate}"
    return f"`{text}{' --recompute full' * full}`"


def topology(cluster: str) -> str:
    """Return the command that shows a network."""
    return f"`sizing fabric topology {cluster}`"


def place(cluster: str, tp: int, pp: int, dp: int) -> str:
    """Return the command that places a job."""
    return f"`sizing place --cluster {cluster} --tp {tp} --pp {pp} --dp {dp}`"


def bom(radix: int, gpus: int = 32_768, hb_size: int = 256) -> str:
    """Return the command of a bill of materials that is compared with the Clos."""
    return f"`sizing fabric bom --gpus {gpus} --hb-size {hb_size} --radix {radix} --kind rail-only`"


Entry = tuple[str, str, str, Ask]
"""Seed, start of the claim, our command, our value."""

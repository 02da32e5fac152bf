"""A configuration: what a search chooses, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from sizing.planner.layout import Layout, LayoutShape

if TYPE_CHECKING:
    from minicluster.plan import Inputs, Plan, Pool
    from minicluster.specs.workload import WorkloadSpec

PRICED = {"usd": "price", "watts": "power"}
"""The key that an objective other than `gpus` needs of every GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """
    What a search chooses: layout, replicas and limits.

    Attributes:
        replicas: replicas of each pool, by the layout's roles: prefill and decode, or mixed.
        max_batch: sequences of one batch of each pool, by role; of a prefill pool prompts.
        local_threshold_tokens: longest prompt that its decode replica computes; 0: none.
    """

    layout: Layout
    replicas: Mapping[str, int]
    max_batch: Mapping[str, int]
    local_threshold_tokens: int = 0

    @classmethod
    def of_plan(cls, plan: Plan) -> Configuration:
        """Return the configuration of a plan, spare replicas left out."""
        pools = {pool.role: pool for pool in plan.pools}
        prefill = pools.get("prefill")
        last = pools.get("mixed") or plan.pool("decode")
        return cls(
            layout=Layout(prefill=_shape(prefill) if prefill else None, decode=_shape(last)),
            replicas={role: each.replicas - each.spare_replicas for role, each in pools.items()},
            max_batch={
                role: max(1, each.max_num_seqs // each.slicing.pp) for role, each in pools.items()
            },
            local_threshold_tokens=0 if prefill is None else plan.routing.local_threshold_tokens,
        )

    def __hash__(self) -> int:
        """Hash by value: `replicas` and `max_batch` have the order of the layout's roles."""
        numbers = (*self.replicas.values(), *self.max_batch.values(), self.local_threshold_tokens)
        return hash((self.layout, numbers))

    @property
    def last(self) -> str:
        """Role of the pool that decodes: `decode` or `mixed`."""
        return "decode" if self.layout.prefill else "mixed"

    @property
    def batch_limit(self) -> int:
        """Sequences of one batch of the pool that decodes."""
        return self.max_batch[self.last]

    def lanes(self, role: str) -> int:
        """Return the queues of a pool: each batch of its replicas."""
        return self.replicas[role] * self.layout.shapes[role].lanes

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return sum(self.replicas[role] * each.gpus for role, each in self.layout.shapes.items())

    @property
    def gpus_by_kind(self) -> dict[str, int]:
        """GPUs of each kind."""
        found: dict[str, int] = {}
        for role, shape in self.layout.shapes.items():
            found[shape.gpu] = found.get(shape.gpu, 0) + self.replicas[role] * shape.gpus
        return found

    def __str__(self) -> str:
        """Write as `sizing predict` takes it."""
        shapes = self.layout.shapes
        several = len({shape.gpu for shape in shapes.values()}) > 1
        return " ".join(
            f"--{role} {count}x{shapes[role]}" + (f"@{shapes[role].gpu}" if several else "")
            for role, count in self.replicas.items()
        )

    def sized(self, replicas: Mapping[str, int]) -> Configuration:
        """Return the same with other numbers of replicas of some pools."""
        return replace(self, replicas={**self.replicas, **replicas})

    @property
    def smallest(self) -> Configuration:
        """The same with one replica of each pool."""
        return self.sized(dict.fromkeys(self.replicas, 1))

    def limited(self, batch_limit: int) -> Configuration:
        """Return the same with another limit on the decode batch."""
        return replace(self, max_batch={**self.max_batch, self.last: batch_limit})


def _shape(pool: Pool) -> LayoutShape:
    return LayoutShape(slicing=pool.slicing, gpu=pool.gpu)


def cost_of_gpu(inputs: Inputs, gpu: str) -> float:
    """
    Return the cost of one GPU in the objective's unit: 1, US dollars per hour, or watts.

    Raises:
        InputError: neither scenario nor catalog has the price or the power.
    """
    objective = inputs.scenario.search.objective
    if objective == "gpus":
        return 1.0
    one = {gpu: 1}
    value = inputs.price_usd_per_hour(one) if objective == "usd" else inputs.power_w(one)
    if value is None:
        expected = f"a {PRICED[objective]} of every GPU ({gpu})"
        raise InputError("search.objective", objective, expected, how_to_price(objective, gpu))
    return value


def how_to_price(objective: str, gpu: str) -> str:
    """Return the keys of a scenario that give what a GPU costs in an objective's unit."""
    if objective == "watts":
        return "cluster.power_w_per_gpu"
    return f'[search] prices_usd_per_gpu_hour = {{ "{gpu}" = 2.0 }}, or cost.prices = "catalog"'


def cost_of(inputs: Inputs, shape: LayoutShape) -> float:
    """Return the cost of one replica."""
    return shape.gpus * cost_of_gpu(inputs, shape.gpu)


def cost_of_plan(plan: Plan) -> float:
    """Return the cost of a plan, its spare replicas included."""
    return sum(pool.gpus * cost_of_gpu(plan.inputs, pool.gpu) for pool in plan.pools)


def cost(inputs: Inputs, chosen: Configuration) -> float:
    """Return the cost of a configuration."""
    shapes = chosen.layout.shapes
    return sum(count * cost_of(inputs, shapes[role]) for role, count in chosen.replicas.items())


def with_search(inputs: Inputs, **keys: Any) -> Inputs:  # noqa: ANN401  (as `replace` has them)
    """Return the same with other values of keys of `[search]`."""
    search = replace(inputs.scenario.search, **keys)
    return replace(inputs, scenario=replace(inputs.scenario, search=search))


def with_load(inputs: Inputs, load: WorkloadSpec) -> Inputs:
    """Return the same under another load."""
    return replace(inputs, scenario=replace(inputs.scenario, workload=load))

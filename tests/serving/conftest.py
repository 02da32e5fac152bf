"""The demo model, plans of it for two cores, and the deployment that engine tests share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from minicluster.plan import Deployment, Plan
from minicluster.specs.lora import LoraSpec
from minicluster.specs.slo import SloSpec
from serving.deployment.compile import endpoint_config
from serving.deployment.target import Target
from serving.measurement.demo_model import MOE_SHAPE, DemoShape, make_demo_model
from serving.protocol.messages import EndpointConfig
from tests.plans import with_lora
from tests.serving.configs import ONGOING

from . import plans
from .adapters import RANK, make_adapter
from .deployed import Shared, Split, driven
from .faults.reference import FEW_LENGTHS, Reference, ask_bare_server
from .forks import Forks

SMALL = DemoShape(num_layers=1, hidden_size=64, ffn_size=64)

DEADLINE_S = 15.0
"""
Of prefill and of the KV hand-off on the shared deployment: what is made to miss them is waited
for, and the longest prompt takes 2 s on a core of its own.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what shares a deployment together, before what deploys something else."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Return 0 for what needs no engine, 1 for what uses the shared deployment, 2 for the rest."""
    if item.get_closest_marker("engine") is None:
        return 0
    return 1 if SHARED in getattr(item, "fixturenames", ()) else 2


SHARED = "split"
"""Fixture of the tests that use the shared deployment."""


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Return what runs code beside Ray Serve and vLLM, imported once for all tests."""
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """Return PyTorch, whose import takes seconds: not by every worker that collects tests."""
    return import_module("torch")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the smallest model of the demo's kind, for tests that run no engine."""
    return make_demo_model(tmp_path_factory.mktemp("models") / "small", SMALL)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model with experts, likewise."""
    small = replace(MOE_SHAPE, num_layers=1, hidden_size=64, ffn_size=64)
    return make_demo_model(tmp_path_factory.mktemp("models") / "moe", small)


@pytest.fixture(scope="session")
def target() -> Target:
    """Return a machine of two cores with everything installed."""
    return Target(
        kind="cpu",
        system="Linux x86_64",
        cores=frozenset({0, 1}),
        num_gpus=0,
        memory_bytes=16 << 30,
        ray="2.60.0",
        vllm="0.29.0",
    )


@pytest.fixture(scope="session")
def deployment(small_model: Path) -> Deployment:
    """Return one prefill and one decode replica of the smallest model."""
    return plans.make_deployment(small_model)


@pytest.fixture(scope="session")
def plan(deployment: Deployment) -> Plan:
    """Return a plan that could be deployed: TTFT 30 s, TPOT 2 s."""
    return plans.make_plan(deployment)


@pytest.fixture(scope="session")
def exact_plan(demo_model: Path) -> Plan:
    """Return a plan of the demo in float32, where an answer does not depend on its neighbours."""
    return plans.make_plan(plans.make_deployment(demo_model, dtype="fp32"))


@pytest.fixture(scope="session")
def config(plan: Plan) -> EndpointConfig:
    """Return a plan of one replica each: 10 ms a step and 0.1 ms a prompt token."""
    tight = plan.under(slo=SloSpec(ttft_s=0.5, tpot_s=0.05))
    return endpoint_config(
        plan.deployment, domains={"laptop": "d0"}, ongoing=ONGOING, plan=tight, plan_hash="cafe"
    )


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, Path]:
    """Return two adapters of the demo model, by their names."""
    folder = tmp_path_factory.mktemp("adapters")
    names = ("red", "blue")
    return {
        name: make_adapter(folder / name, demo_model, seed=seed) for seed, name in enumerate(names)
    }


@pytest.fixture(scope="session")
def reference_asked(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path
) -> Iterator[Future[Reference]]:
    """Have a server of vLLM's own started and asked beside what else starts."""
    log = tmp_path_factory.mktemp("reference") / "server.txt"
    with ThreadPoolExecutor(max_workers=1) as beside:
        yield beside.submit(ask_bare_server, demo_model, FEW_LENGTHS, log)


@pytest.fixture(scope="session")
def reference(reference_asked: Future[Reference]) -> Reference:
    """Return what vLLM's own server answers in float32, one request at a time."""
    return reference_asked.result()


@pytest.fixture(scope="session")
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """
    Return the shared deployment: one prefill and one decode replica in float32, with a plan.

    Both have one slot for two adapters, so that each request for another one copies it.
    """
    lora = LoraSpec(max_loras=1, max_lora_rank=RANK, max_cpu_loras=2, adapters=2)

    @contextmanager
    def start() -> Iterator[Split]:
        names = {name for item in request.session.items for name in item.fixturenames}  # type: ignore[attr-defined]
        asked = request.getfixturevalue("reference_asked") if "reference" in names else None
        plan = with_lora(request.getfixturevalue("exact_plan"), lora)
        adapters: dict[str, Path] = request.getfixturevalue("adapters")
        named = [f"{name}={folder}" for name, folder in adapters.items()]
        options = [word for each in named for word in ("--lora-modules", each)]
        with driven(tmp_path_factory.mktemp("shared"), plan, DEADLINE_S, *options) as found:
            if asked is not None:
                wait([asked])  # tests have the cores to themselves
            yield found

    deployment = Shared(start)
    yield deployment
    deployment.end()


@pytest.fixture(scope="module")
def split(shared: Shared) -> Split:
    return shared.get()


@pytest.fixture(scope="module")
def base_url(split: Split) -> str:
    return split.base_url


@pytest.fixture(scope="module")
def place(split: Split) -> Path:
    return split.place

"""A GPU, an engine profile, a model or a routing policy is added in one folder or file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minicluster import routing
from minicluster.plan import Plan, read_plan
from minicluster.specs.scenario import EngineChoice
from minicluster.workload.sources import RequestSource, drawn
from sizing import catalog
from sizing.catalog import cluster, engine, folder, gpu, model
from sizing.evidence.prediction import predict_row
from sizing.evidence.row import row_from
from sizing.simulation.planned import simulate_plan
from tests.sizing.conftest import QUICK, Sizing

CACHES = (
    cluster.clusters, cluster.switches, gpu.gpus, gpu.collectives, model.models,
    model._model_names, engine.engines,
)  # fmt: skip


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the catalogs, which `sizing` reads until the test ends."""
    copy = tmp_path / "configs"
    shutil.copytree(catalog.configs(), copy)
    monkeypatch.setattr(folder, "configs", lambda: copy)
    for cached in CACHES:
        cached.cache_clear()
    yield copy
    for cached in CACHES:
        cached.cache_clear()


def planned(sizing: Sizing, tmp_path: Path, *overrides: str) -> Plan:
    """Return the plan that `sizing plan` makes with some keys of its scenario changed."""
    changes = [part for each in overrides for part in ("--set", each)]
    plan = tmp_path / "plan.json"
    done = sizing("plan", *QUICK, *changes, "-o", str(plan))
    assert done.code == 0, done.err
    return read_plan(plan)


def added(old: Path, stem: str, /, **values: str) -> None:
    """Write a copy of a catalog entry beside it, under a new name and with some keys changed."""
    lines = old.read_text().splitlines()
    for key, value in values.items():
        [at] = [n for n, line in enumerate(lines) if line.startswith(f"{key} =")]
        lines[at] = f"{key} = {value}"
    (old.parent / f"{stem}.toml").write_text("\n".join(lines))


def test_a_gpu_an_engine_version_and_a_model_are_one_file_each(
    configs: Path, sizing: Sizing, tmp_path: Path
) -> None:
    """
    A plan carries the new GPU's numbers and Ray's name of it, and loads the new model.

    The newest profile that can be deployed is the default; a scenario may name the older.
    """
    added(
        configs / "gpus" / "h100-sxm.toml", "x100",
        name='"x100"', aliases="[]", ray_accelerator='"X100"',
    )  # fmt: skip
    added(configs / "engines" / "vllm-0.29-nixl.toml", "vllm-1.2-nixl", version='"1.2.3"')
    added(configs / "models" / "llama-3.1-8b.toml", "llama-9", hub_id='"me/llama-9"')
    entry = configs / "models" / "llama-9.toml"
    head, _, rest = entry.read_text().partition("aliases = [")
    entry.write_text(head + "aliases = [" + rest[rest.index("]") :])
    versions = [catalog.find_engine(EngineChoice(version=each)).version for each in (None, "0.29")]
    assert versions == ["1.2.3", "0.29.0"]
    overrides = ("cluster.gpu=x100", "engine.version=1.2.3", "model.id=llama-9")
    plan = planned(sizing, tmp_path, *overrides)
    assert (plan.inputs.gpu.name, plan.engine.version) == ("x100", "1.2.3")
    assert {(pool.gpu, pool.ray_accelerator) for pool in plan.pools} == {("x100", "X100")}
    assert plan.model.source == "me/llama-9"


def test_a_routing_policy_is_one_function(
    sizing: Sizing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scenario may name any policy of the registry, and the simulator routes by it."""
    for policy in routing.POLICIES:
        scenario = catalog.read_scenario(Path(QUICK[0]), [f"search.routing={policy}"])
        assert scenario.search.routing == policy
    monkeypatch.setitem(routing.POLICIES, "last-of-least", routing.find_policy("random"))

    @routing.routing_policy("last-of-least")
    def last_of_least(loads: Sequence[float], rng: routing.Rng, turn: int) -> int:  # noqa: ARG001
        return len(loads) - 1 - list(loads)[::-1].index(min(loads))

    plan = planned(sizing, tmp_path, "search.routing=last-of-least")
    assert plan.routing.policy == "last-of-least"
    replicas = plan.pool("prefill").replicas
    assert replicas > 1
    arrivals = drawn(plan.workload, RequestSource(), count=100, seed=0)
    used = simulate_plan(plan, arrivals, seed=0).prefill_of
    assert used[0] == replicas - 1
    assert set(np.unique(used)) <= set(range(replicas))


@pytest.mark.parametrize("chunked", ["true", "false"])
def test_another_engine_is_one_file(configs: Path, chunked: str) -> None:
    """Its measured rows are predicted by the scheduling rules that its own file gives."""
    cells = {
        "id": "one", "model": "meta-llama/Llama-3.1-70B", "gpu": "h100-sxm", "engine": "mine",
        "engine_version": "2.0", "weight_dtype": "bf16", "serving": "aggregated", "gpus": "8",
        "tp": "8", "load": "closed", "concurrency": "16", "isl": "9000", "osl": "16",
        "length_jitter": "0.5",
    }  # fmt: skip
    row = row_from(cells, "rows.csv:2")
    assert "it has to be one of vllm" in predict_row(row).reason
    base = configs / "engines" / "vllm-0.15.toml"
    added(base, "mine-2.0", name='"mine"', version='"2.0"', chunked_prefill=chunked)
    catalog.engines.cache_clear()
    mine, vllm = predict_row(row), predict_row(replace(row, engine="vllm", engine_version="0.15.1"))
    assert (mine.status, vllm.status) == ("predicted", "predicted")
    assert (mine.ttft_s == pytest.approx(vllm.ttft_s, rel=1e-9)) == (chunked == "true")

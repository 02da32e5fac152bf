"""Every number of the catalogs has a dated source, and every name leads to one entry."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minicluster.config import parse, read_toml
from minicluster.errors import InputError
from minicluster.specs.gpu import NumberSource
from minicluster.specs.model import architecture_hash
from minicluster.specs.scenario import ClusterChoice, EngineChoice
from sizing import catalog
from sizing.catalog import find_cluster, find_engine, find_gpu, find_model, folder

KINDS = ("gpus", "clusters", "engines", "switches", "collectives", "studies")
FILES = [path for kind in KINDS for path in catalog.files(kind).values()]
NO_QUANTITIES = {
    *("name", "version", "connector", "vendor", "kind", "gpu", "fitted", "aliases", "deployable"),
    "generation",
    *("tier", "model", "library", "pattern", "cuda_graph", "from_gpu", "warning"),
}


def quantities(raw: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a file under which numbers stand."""
    for key, value in raw.items():
        if key in NO_QUANTITIES or key == "sources":
            continue
        if isinstance(value, dict):
            yield from quantities(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for part in value:
                name = part.get("name", part.get("tier", part.get("library")))
                yield from quantities(part, f"{prefix}{key}.{name}.")
        else:
            yield prefix + key


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_has_a_dated_source(path: Path) -> None:
    """Each number is covered by a source with a date, and each source covers some number."""
    raw = read_toml(path)
    keys = list(quantities(raw))
    sources = [parse(NumberSource, source, place=path.name) for source in raw.get("sources", [])]
    covers = [key.strip() for source in sources for key in source.covers.split(",")]
    assert [key for key in keys if not any(key.startswith(cover) for cover in covers)] == []
    assert [cover for cover in covers if not any(key.startswith(cover) for key in keys)] == []
    for source in sources:
        assert source.document
        assert dt.date.fromisoformat(source.date).isoformat() == source.date


def test_every_name_leads_to_its_own_entry() -> None:
    """In any case of letters, and to no other: GPUs, and models, which load what they are named."""
    gpus = [(name, alias) for name, of in catalog.gpus().items() for alias in (name, *of.aliases)]
    for name, alias in gpus:
        assert find_gpu(alias).name == find_gpu(alias.upper()).name == name
    for name, entry in catalog.models().items():
        assert find_model(name.upper()).source == entry.hub_id
        for hub_id in (entry.hub_id, *entry.aliases):
            assert find_model(hub_id.lower()).source == hub_id
            assert find_model(hub_id).config_hash == architecture_hash(entry.config)


@pytest.mark.parametrize(
    ("hub_id", "key", "dtype"),
    [
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "llama-3.1-70b", "int4"),
        ("unsloth/Mistral-Nemo-Instruct-2407-bnb-4bit", "mistral-nemo", "int4"),
        ("nvidia/DeepSeek-R1-0528-NVFP4", "deepseek-v3", "fp4"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "qwen3-32b", "fp8"),
        ("lmsys/gpt-oss-20b-bf16", "gpt-oss-20b", "bf16"),
    ],
)
def test_repackaged_models_resolve(hub_id: str, key: str, dtype: str) -> None:
    found = find_model(hub_id)
    assert found.config_hash == find_model(key).config_hash
    assert (found.weight_dtype, found.source, found.id) == (dtype, hub_id, hub_id)


@pytest.mark.parametrize("name", ["mistralai/Mistral-7B-v0.3", "x/DeepSeek-R1-Distill-Qwen-1.5B"])
def test_other_shapes_do_not_resolve(name: str) -> None:
    with pytest.raises(InputError):
        find_model(name)


@pytest.mark.parametrize("name", [name for name in catalog.gpus() if name != "cpu"])
def test_peaks_are_dense_and_links_one_way(name: str) -> None:
    """Narrower types are twice as fast, not four times; links stay below 1 TB/s one way."""
    spec = find_gpu(name)
    peaks = spec.peak_flops_per_s
    assert peaks["bf16"] == peaks["fp16"]
    for narrow in {"fp8", "int8"} & peaks.keys():
        assert peaks[narrow] / peaks["bf16"] == pytest.approx(2, rel=0.02)
    assert spec.require("scale_out_bytes_per_s") < spec.require("scale_up_bytes_per_s") < 1e12
    assert spec.require("hbm_bytes_per_s") > spec.require("scale_up_bytes_per_s")


@pytest.mark.parametrize("name", catalog.clusters())
def test_presets_name_gpus_and_networks(name: str) -> None:
    """Its GPU is of the catalog, and the outermost tier holds every GPU."""
    preset, topology = catalog.find_network(name)
    assert find_cluster(ClusterChoice(preset=name)) == preset
    assert topology.gpus >= preset.max_gpus


def test_scenario_keys_go_over_the_preset() -> None:
    preset = catalog.clusters()["h100-8"]
    changed = find_cluster(ClusterChoice(preset="h100-8", gpu="H200", max_gpus=4, gpus_per_node=4))
    assert (changed.gpu, changed.max_gpus, changed.gpus_per_node) == ("h200-sxm", 4, 4)
    assert changed.gpus_per_hb_domain == 4
    assert changed.scale_out_latency_s == preset.scale_out_latency_s
    priced = find_cluster(ClusterChoice(preset="h100-8", price_usd_per_gpu_hour=2.5))
    assert priced == preset


def test_cluster_without_preset() -> None:
    """A GPU, its node and a budget make a cluster; one of them missing is named."""
    own = find_cluster(ClusterChoice(gpu="l40s", gpus_per_node=4, max_gpus=16))
    assert (own.gpu, own.gpus_per_node, own.gpus_per_hb_domain, own.max_gpus) == ("l40s", 4, 4, 16)
    with pytest.raises(InputError, match=r"cluster\.max_gpus is missing.*l40s-8"):
        find_cluster(ClusterChoice(gpu="l40s", gpus_per_node=4))
    with pytest.raises(InputError, match=r"cluster\.gpus_per_node is missing"):
        find_cluster(ClusterChoice(gpu="l40s", max_gpus=4))


@pytest.mark.parametrize(
    ("find", "name", "hint"),
    [
        (find_model, "Qwen/Qwen2.5-72B", "-o Qwen2.5-72B/config.json https://"),
        (find_model, "llama-3.1-70", "did you mean llama-3.1-70b?"),
        (find_model, "meta-llama/Llama-3.1-70B-Instrct", "meta-llama/Llama-3.1-70B-Instruct?"),
        (find_model, "zzz", "https://huggingface.co/OWNER/zzz/raw/main/config.json"),
        (find_model, "./nowhere", "make demo"),
        (find_model, "a\0b", "config.json"),
        (find_gpu, "h100-sxn", "did you mean h100-sxm?"),
        (find_gpu, "TPU v7", "known: a100-pcie"),
        (lambda name: find_cluster(ClusterChoice(preset=name)), "h100-9", "did you mean h100-8?"),
        (lambda number: find_engine(EngineChoice(version=number)), "0.8.5", "0.29.0, 0.15.1"),
        (lambda name: find_gpu("cpu").require(name), "hbm_bytes", "configs/gpus"),
    ],
)
def test_unknown_names_suggest_the_nearest(find: Any, name: str, hint: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError) as refused:
        find(name)
    assert hint in str(refused.value)


def test_catalogs_of_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "__file__", str(tmp_path / "sizing" / "catalog" / "folder.py"))
    assert catalog.configs() == tmp_path / "configs"
    (tmp_path / "sizing" / "_configs").mkdir(parents=True)
    assert catalog.configs() == tmp_path / "sizing" / "_configs"

"""A scenario is read strictly: what is wrong with it is one line that names place and way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.specs.scenario import LIMITS
from sizing import catalog
from sizing.catalog.scenario import scenario_from
from sizing.catalog.schema import scenario_keys

MINIMAL = """
[model]
id = "llama-3.1-8b"
[cluster]
preset = "h100-8"
[workload]
requests_per_s = 4
input_tokens = 1000
output_tokens = { distribution = "uniform", low = 10, high = 20 }
"""


@pytest.mark.parametrize("name", catalog.files("scenarios"))
def test_shipped_scenarios_resolve(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and by path; the laptop's asks for the demo model, which has to be made first."""
    scenario = catalog.read_scenario(catalog.files("scenarios")[name])
    assert catalog.read_scenario(Path(name)) == scenario
    monkeypatch.chdir(tmp_path)
    if name == "laptop":
        with pytest.raises(InputError, match=r"model\.id.*make demo"):
            catalog.inputs_of(scenario, "laptop.toml")
    else:
        assert catalog.inputs_of(scenario, name).gpu.kind == "gpu"


def scenario_of(
    requests_per_s: float = 1.0, input_tokens: object = 100, output_tokens: object = 100
) -> dict[str, Any]:
    """Return the tables of a small scenario file with this load."""
    load = {"requests_per_s": requests_per_s, "input_tokens": input_tokens}
    return {
        "model": {"id": "llama-3.1-8b"},
        "cluster": {"preset": "h100-8"},
        "workload": {**load, "output_tokens": output_tokens},
    }


def test_overrides_of_a_file(tmp_path: Path) -> None:
    """They make tables, take bare text, and replace precision and context of the model."""
    path = written(tmp_path, MINIMAL)
    scenario = catalog.read_scenario(path, ["slo.ttft_s=0.5", "search.tp=[4, 8]"])
    assert (scenario.slo.ttft_s, scenario.search.tp) == (0.5, (4, 8))
    for override, expected in (
        ("slo.ttft_s=1.0", ("bf16", "bf16", "bf16", 131072)),
        ("model.kv_dtype=fp8", ("bf16", "bf16", "fp8", 131072)),
        ("model.weight_dtype=fp8", ("bf16", "fp8", "bf16", 131072)),
        ("model.weight_dtype=fp16", ("fp16", "fp16", "fp16", 131072)),
        ("model.max_context_tokens=4096", ("bf16", "bf16", "bf16", 4096)),
    ):
        model = catalog.inputs_of(catalog.read_scenario(path, [override]), "x").model
        found = (model.dtype, model.weight_dtype, model.kv_dtype, model.max_context_tokens)
        assert found == expected


BAD = [
    # (line of the file replaced, by what, what the line must say)
    ('id = "llama-3.1-8b"', 'id = "llama-3.1-8x"', ["model.id", "did you mean llama-3.1-8b?"]),
    ('id = "llama-3.1-8b"', "", ["model.id", "is missing"]),
    ('preset = "h100-8"', 'preset = "h100-9"', ["cluster.preset", "did you mean h100-8?"]),
    ('preset = "h100-8"', 'gpu = "h100sxm"', ["cluster.gpu", "did you mean"]),
    ('preset = "h100-8"', "", ["cluster", "preset"]),
    ('preset = "h100-8"', 'preset = "h100-8"\nmax_gpus = 9_000_000', ["max_gpus", "131,072"]),
    ("requests_per_s = 4", "requests_per_s = -4", ["workload.requests_per_s", "-4", "positive"]),
    ("requests_per_s = 4", "requests_per_s = 1e12", ["workload.requests_per_s", "1,000,000"]),
    ("requests_per_s = 4", "requests_per_s = nan", ["finite"]),
    ("requests_per_s = 4", "requests_per_s = 4\nrps = 4", ["workload.rps", "sizing schema"]),
    (
        "requests_per_s = 4",
        'requests_per_s = 4\ntrace = "a.jsonl"',
        ["input_tokens", "beside trace"],
    ),
    ("requests_per_s = 4", "requests_per_s = 4\nprefix_tokens = 1000", ["workload.prefix_tokens"]),
    ("input_tokens = 1000", "input_tokens = 0", ["workload.input_tokens", "mean", "positive"]),
    ("input_tokens = 1000", "input_tokens = 1000.5", ["workload.input_tokens", "whole number"]),
    ("input_tokens = 1000", "input_tokens = 131072", ["131092", "131072", "llama-3.1-8b"]),
    ("input_tokens = 1000", "input_tokens = { low = 3 }", ["workload.input_tokens", "mean"]),
    ("low = 10, high = 20", "low = 30, high = 20", ["workload.output_tokens: high", "at least 30"]),
    ('"uniform"', '"zipf"', ["workload.output_tokens", "zipf", "fixed, uniform, lognormal"]),
    ("[workload]", "[workloads]", ["workload", "missing"]),
    ("[model]", "[model", ["TOML"]),
    ("[model]", '[slo]\npercentile = "p42"\n[model]', ["slo.percentile", "p99"]),
    ("[model]", '[engine]\nversion = "1.0"\n[model]', ["engine.version", "1.0", "0.29.0"]),
    ("[model]", "[search]\nmax_utilisation_fraction = 2.0\n[model]", ["search.max", "fraction"]),
    (
        "[model]",
        '[search]\npools = "mixed"\nlocal_threshold_tokens = 100\n[model]',
        ["search.local_threshold_tokens", "it has to be 0 with"],
    ),
    ("[model]", "[model]\nkv_dtype = 'fp9'", ["model.kv_dtype", "fp9", "fp8"]),
    ("[model]", "[model]\nmax_context_tokens = 200000", ["model.max_context_tokens", "131072"]),
    ("[model]", "[model]\nmax_context_tokens = 500", ["1020", "500"]),
    ("[model]", "[model]\nmax_context_tokens = 0", ["model.max_context_tokens", "from 1"]),
]


@pytest.mark.parametrize(("old", "new", "says"), BAD, ids=lambda value: str(value)[:40])
def test_bad_scenarios(old: str, new: str, says: list[str], tmp_path: Path) -> None:
    """Bad input is refused in one line: file, key, value, what is expected."""
    assert old in MINIMAL
    path = written(tmp_path, MINIMAL.replace(old, new))
    refused(lambda: catalog.inputs_of(catalog.read_scenario(path), str(path)), [str(path), *says])


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("s.toml", "workload.requests_per_s", ["--set", "key=value"]),
        ("s.toml", "=3", ["--set", "key=value"]),
        ("s.toml", "a..b=3", ["--set", "key=value"]),
        ("s.toml", "model.id.x=3", ["--set model.id.x", "inside a table"]),
        ("s.toml", "workload.requests_per_s=fast", ["workload.requests_per_s", "'fast'", "number"]),
        ("s.toml", "workload.rps=3", ["workload.rps", "no such key"]),
        ("s.toml", "slo.ttft_s=-1", ["--set slo.ttft_s=-1", "-1.0", "positive"]),
        ("nowhere.toml", "", ["nowhere.toml", "does not exist", "TOML"]),
        ("lama-3.1-8b-h100", "", ["did you mean llama-3.1-8b-h100?"]),
        (".", "", ["Is a directory", "TOML"]),
    ],
)
def test_bad_overrides_and_names(
    name: str, override: str, says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad `--set` is refused like a bad file, and named; so is a scenario that there is not."""
    written(tmp_path, MINIMAL)
    monkeypatch.chdir(tmp_path)
    overrides = [override] if override else []
    refused(lambda: catalog.read_scenario(Path(name), overrides), says)


@given(st.sampled_from(sorted(LIMITS)), st.floats(1.0001, 1e30))
def test_nothing_beyond_the_limits(key: str, factor: float) -> None:
    name = key.removesuffix(".max_tokens")
    high = LIMITS[key][1] * factor
    whole = ("tokens" in key or "gpus" in key) and "mean" not in key
    value = math.ceil(high) if whole else high
    with pytest.raises(InputError) as found:
        scenario_from(scenario_of(), [f"{name}={value!r}"], place="s")
    assert f" {name} is {value}" in str(found.value) or "a whole number" in str(found.value)


TOML_VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
TABLES = ["model", "cluster", "workload", "slo", "search", "engine", "x"]


@given(key=st.sampled_from([key.key for key in scenario_keys()] + TABLES), value=TOML_VALUES)
def test_nonsense_is_refused_not_crashed_on(key: str, value: object) -> None:
    """Whatever TOML stands under a key, the answer is a scenario or one refusal that says where."""
    raw = scenario_of(1.0, {"mean": 100}, {"mean": 100})
    *tables, last = key.split(".")
    table = raw
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = value
    try:
        catalog.inputs_of(scenario_from(raw, place="s"), "s")
    except InputError as error:
        place = str(error)
    else:
        place = "s"
    assert place.startswith("s")


def test_schema_knows_every_key_and_no_other() -> None:
    keys = {key.key: key for key in scenario_keys()}
    assert {"model.id", "cluster.preset", "workload.requests_per_s", "slo.ttft_s"} <= keys.keys()
    assert {key.removesuffix(".max_tokens") for key in LIMITS} <= keys.keys()
    assert all(key.meaning for key in keys.values())
    assert [key for key, of in keys.items() if of.required] == [
        "model.id",
        "workload.requests_per_s",
        "workload.classes.name",
        "workload.classes.requests_per_s",
    ]
    assert keys["slo.ttft_s"].unit == "seconds"
    assert (keys["slo.itl_s"].type, keys["search.tp"].type) == ("number", "list of integer")
    assert keys["slo.ttft_s"].default == 1.0
    assert keys["workload.requests_per_s"].maximum == 1e6


def written(folder: Path, text: str) -> Path:
    """Write a scenario."""
    path = folder / "s.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(read: Callable[[], object], says: list[str]) -> None:
    """*read* is refused in one line that says all this."""
    with pytest.raises(InputError) as error:
        read()
    line = str(error.value)
    assert "\n" not in line
    assert [text for text in says if text not in line] == []

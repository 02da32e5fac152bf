"""`sizing init`, `schema` and the catalogs: data on stdout, talk on stderr, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sizing import catalog
from sizing.catalog.gpu import list_price
from sizing.catalog.schema import scenario_keys
from tests.sizing.conftest import Sizing


@pytest.mark.parametrize(
    ("command", "key", "names"),
    [
        ("models", "name", list(catalog.models())),
        ("gpus", "name", list(catalog.gpus())),
        ("schema", "key", [key.key for key in scenario_keys()]),
        ("presets", "name", list(catalog.clusters())),
        ("prices", "gpu", [gpu for gpu in catalog.gpus() if list_price(gpu) is not None]),
    ],
)
def test_catalogs_are_listed_whole(
    sizing: Sizing, command: str, key: str, names: list[str]
) -> None:
    """As data and as a table: models with parameters and KV bytes, GPUs with peaks, keys."""
    done, table = sizing(command, "--json"), sizing(command).out
    assert (done.code, done.err) == (0, "")
    rows = {row[key]: row for row in json.loads(done.out)}
    assert list(rows) == names
    assert [name for name in names if name not in table] == []
    if command == "models":
        assert rows["llama-3.1-70b"]["num_parameters"] == 70_553_706_496
        # 2 x 80 layers x 8 heads x 128 x 2 bytes; 61 x (512 + 64) x 2 bytes
        assert rows["llama-3.1-70b"]["kv_bytes_per_token"] == 327_680
        assert rows["deepseek-v3"]["kv_bytes_per_token"] == 70_272
    if command == "gpus":
        assert rows["h100-sxm"]["peak_flops_per_s"]["bf16"] == 989e12
        assert [word for word in ("fitted", "default", "calibration") if word not in table] == []


def test_init_writes_a_scenario_that_can_be_read(sizing: Sizing, tmp_path: Path) -> None:
    """The scenario to start from is commented, and one that the other commands take."""
    printed = sizing("init", "llama-3.1-70b-h100")
    assert printed.code == 0
    assert "# requests per second" in printed.out
    out = tmp_path / "mine.toml"
    done = sizing("init", "llama-3.1-70b-h100", "-o", str(out))
    assert (done.code, done.out) == (0, "")
    assert "sizing plan" in done.err
    assert out.read_text(encoding="utf-8") == printed.out
    assert catalog.read_scenario(out).workload.requests_per_s == 20


def test_init_overwrites_nothing(sizing: Sizing, tmp_path: Path) -> None:
    """A file that is there stays as it is, and nothing is half written elsewhere."""
    out = tmp_path / "mine.toml"
    out.write_text("precious", encoding="utf-8")
    for target in (out, tmp_path / "no" / "such" / "folder.toml"):
        done = sizing("init", "-o", str(target))
        assert done.code == 2
        assert done.err.count("\n") == 1
    assert out.read_text(encoding="utf-8") == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]

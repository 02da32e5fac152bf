"""`sizing init`, `schema`, `models` and `gpus`: a first scenario, its keys, the catalogs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from minicluster.errors import InputError, unwritable
from minicluster.shell import say
from minicluster.specs.checks import one_of
from sizing.cli.common import AsJson, show

if TYPE_CHECKING:
    from minicluster.specs.gpu import GpuSpec

DEFAULT_SCENARIO = "llama-3.1-8b-h100"


def init(
    name: Annotated[str, Argument(help="Name of a shipped scenario")] = DEFAULT_SCENARIO,
    out: Annotated[
        Path | None, Option("-o", "--out", help="Scenario file to write [default: stdout]")
    ] = None,
) -> None:
    """Write a commented scenario to start from."""
    from sizing import catalog

    shipped = catalog.files("scenarios")
    one_of(tuple(shipped), NAME=name)
    text = shipped[name].read_text(encoding="utf-8")
    if out is None:
        sys.stdout.write(text)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError("-o", str(out), "a file that is not there yet") from None
    except OSError as error:
        raise InputError(f"-o {out}", unwritable(error), "a file that can be written") from None
    say(f"wrote {out}; next: sizing plan {out}")


def schema(*, as_json: AsJson = False) -> None:
    """Print every scenario key with type, unit, default and limits."""
    from sizing.catalog.schema import scenario_keys
    from sizing.report.tables import columns_table

    keys = scenario_keys()
    columns = {
        "key": [key.key for key in keys],
        "type": [key.type for key in keys],
        "unit": [key.unit for key in keys],
        "default": ["required" if key.required else _shown(key.default) for key in keys],
        "from": [_shown(key.minimum) for key in keys],
        "to": [_shown(key.maximum) for key in keys],
        "meaning": [key.meaning for key in keys],
    }
    made = columns_table(
        "scenario keys",
        columns,
        words=("type", "unit", "default", "from", "to", "meaning"),
        details=("from", "to"),
    )
    show([asdict(key) for key in keys], made, as_json=as_json)


def models(*, as_json: AsJson = False) -> None:
    """Print the model catalog."""
    from minicluster.engine_model.kv_cache import kv_bytes_per_token
    from minicluster.specs.parameters import num_active_parameters, parameters
    from sizing import catalog
    from sizing.report.tables import columns_table

    rows: list[dict[str, Any]] = []
    for name, entry in catalog.models().items():
        spec = catalog.find_model(name)
        rows.append(
            {
                **asdict(spec),
                "name": name,
                "aliases": [entry.hub_id, *entry.aliases],
                "num_parameters": parameters(spec).total,
                "num_active_parameters": num_active_parameters(spec),
                "kv_bytes_per_token": kv_bytes_per_token(spec, tp=1),
                "sources": [asdict(source) for source in entry.sources],
            }
        )
    columns = {
        "name": [row["name"] for row in rows],
        "hub id": [row["source"] for row in rows],
        "billion\nparameters": [f"{row['num_parameters'] / 1e9:,.1f}" for row in rows],
        "active": [f"{row['num_active_parameters'] / 1e9:,.1f}" for row in rows],
        "layers": [str(row["num_layers"]) for row in rows],
        "KV kB\nper token": [f"{row['kv_bytes_per_token'] / 1e3:,.1f}" for row in rows],
        "context": [f"{row['max_context_tokens']:,}" for row in rows],
        "weights": [row["weight_dtype"] for row in rows],
    }
    title, details = "models (names and hub ids are accepted)", ("layers", "weights", "hub id")
    show(rows, columns_table(title, columns, details=details), as_json=as_json)


def gpus(*, as_json: AsJson = False) -> None:
    """Print the GPU catalog."""
    from sizing import catalog
    from sizing.report.tables import columns_table

    entries = catalog.gpus().values()
    specs = [entry.spec for entry in entries]
    peaks = (
        (source.document for source in spec.sources if "peak_flops_per_s" in source.covers)
        for spec in specs
    )
    words = {
        "efficiency": [_efficiency(spec) for spec in specs],
        "source of the peaks": [next(documents, "") for documents in peaks],
    }
    columns = {
        "name": [spec.name for spec in specs],
        "bf16\nTFLOP/s": [_scaled(spec.peak_flops_per_s.get("bf16"), 1e12) for spec in specs],
        "fp8": [_scaled(spec.peak_flops_per_s.get("fp8"), 1e12) for spec in specs],
        "GB": [_scaled(spec.hbm_bytes, 1e9) for spec in specs],
        "GB/s": [_scaled(spec.hbm_bytes_per_s, 1e9) for spec in specs],
        "scale-up\nGB/s": [_scaled(spec.scale_up_bytes_per_s, 1e9) for spec in specs],
        "scale-out\nGB/s": [_scaled(spec.scale_out_bytes_per_s, 1e9) for spec in specs],
        "W": [_scaled(spec.power_w, 1) for spec in specs],
    }
    title = "GPUs (peaks dense, bandwidths one way)"
    details = ("source of the peaks", "scale-out\nGB/s", "scale-up\nGB/s", "W")
    made = columns_table(title, columns | words, words=words, details=details)
    data = [{**asdict(entry.spec), "aliases": list(entry.aliases)} for entry in entries]
    show(data, made, as_json=as_json)


def _efficiency(spec: GpuSpec) -> str:
    if spec.efficiency is None:
        return "calibration"
    return "fitted" if spec.efficiency.fitted else "default"


def _scaled(value: float | None, unit: float) -> str:
    """Write a number in *unit*; empty where it is unknown."""
    return "" if value is None else f"{value / unit:,.0f}"


def _shown(value: object) -> str:
    """Write a value of the schema; empty where there is none."""
    if value is None or value == ():
        return ""
    return f"{value:,}" if isinstance(value, int | float) else str(value)

"""`sizing init`, `schema` and the catalogs: a first scenario, its keys, what they may name."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from minicluster.errors import InputError, unwritable
from minicluster.shell import say
from minicluster.specs.checks import one_of
from sizing.cli.common import AsJson, print_json, show

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


def schema(
    *,
    plan: Annotated[
        bool, Option("--plan", help="The JSON Schema of plan.json in place of the keys")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print every scenario key with type, unit, default and limits; or plan.json's JSON Schema."""
    if plan:
        from minicluster.plan.json_schema import plan_schema

        print_json(plan_schema())
        return
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
        "KV kB\nper token": [_kv_per_token(row) for row in rows],
        "context": [f"{row['max_context_tokens']:,}" for row in rows],
        "weights": [row["weight_dtype"] for row in rows],
    }
    title, details = "models (names and hub ids are accepted)", ("layers", "weights", "hub id")
    show(rows, columns_table(title, columns, details=details), as_json=as_json)


def _kv_per_token(row: dict[str, Any]) -> str:
    """Write what a token adds to the KV cache; nothing where all layers keep a window alone."""
    if not row["kv_bytes_per_token"] and row["window_tokens"]:
        return "window"
    return f"{row['kv_bytes_per_token'] / 1e3:,.1f}"


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
        "memory\nGiB": [_scaled(spec.hbm_bytes, 2**30) for spec in specs],
        "GB/s": [_scaled(spec.hbm_bytes_per_s, 1e9) for spec in specs],
        "scale-up\nGB/s": [_scaled(spec.scale_up_bytes_per_s, 1e9) for spec in specs],
        "scale-out\nGB/s": [_scaled(spec.scale_out_bytes_per_s, 1e9) for spec in specs],
        "W": [_scaled(spec.power_w, 1) for spec in specs],
    }
    title = "GPUs (peaks dense, bandwidths one way)"
    details = ("source of the peaks", "scale-out\nGB/s", "scale-up\nGB/s", "W")
    notes = ["memory as CUDA or nvidia-smi reports it: 79 GiB are sold as 80 GB, 140 as 141"]
    made = columns_table(title, columns | words, words=words, details=details, notes=notes)
    data = [{**asdict(entry.spec), "aliases": list(entry.aliases)} for entry in entries]
    show(data, made, as_json=as_json)


def presets(*, as_json: AsJson = False) -> None:
    """Print the cluster presets: what cluster.preset may name."""
    from sizing import catalog
    from sizing.report.tables import columns_table

    specs = list(catalog.clusters().values())
    columns = {
        "name": [spec.name for spec in specs],
        "GPU": [spec.gpu for spec in specs],
        "GPUs\nper node": [f"{spec.gpus_per_node:,}" for spec in specs],
        "joined by\nscale-up": [f"{spec.gpus_per_hb_domain:,}" for spec in specs],
        "max_gpus": [f"{spec.max_gpus:,}" for spec in specs],
        "network tiers": [", ".join(tier.name for tier in spec.tiers) for spec in specs],
    }
    title = "cluster presets (cluster.preset; cluster.gpu alone needs gpus_per_node and max_gpus)"
    words = ("GPU", "network tiers")
    made = columns_table(title, columns, words=words, details=("network tiers",))
    show([asdict(spec) for spec in specs], made, as_json=as_json)


def engines(*, as_json: AsJson = False) -> None:
    """Print the engine profiles: what engine.name and engine.version may name."""
    from sizing import catalog
    from sizing.report.tables import columns_table

    specs = sorted(catalog.engines(), key=lambda spec: (spec.name, spec.version))
    columns = {
        "engine.name": [spec.name for spec in specs],
        "engine.version": [spec.version for spec in specs],
        "by serving up": ["deployed" if spec.deployable else "exported" for spec in specs],
        "drafts": [", ".join(spec.draft_methods) for spec in specs],
        "all-to-all": [", ".join(spec.all_to_all_libraries) for spec in specs],
    }
    title = "engine profiles (exported: planned, and started by what `sizing export` writes)"
    words = tuple(columns)
    made = columns_table(title, columns, words=words, details=("all-to-all", "drafts"))
    show([asdict(spec) for spec in specs], made, as_json=as_json)


def prices(*, as_json: AsJson = False) -> None:
    """Print the list prices of GPUs, which cost.prices = "catalog" takes."""
    from sizing import catalog
    from sizing.catalog.gpu import list_price
    from sizing.report.tables import columns_table

    found = [price for price in map(list_price, catalog.gpus()) if price is not None]
    columns = {
        "GPU": [price.gpu for price in found],
        "$ per GPU\nand hour": [f"{price.usd_per_gpu_hour:.2f}" for price in found],
        "from": [f"{price.lowest_usd_per_gpu_hour:.2f}" for price in found],
        "to": [f"{price.highest_usd_per_gpu_hour:.2f}" for price in found],
        "lists": [str(price.lists) for price in found],
        "dates": [f"{price.oldest} to {price.newest}" for price in found],
    }
    title = "list prices of GPUs, the median of the lists (--set cost.prices=catalog takes them)"
    notes = ["yours: --set cluster.price_usd_per_gpu_hour=PRICE"]
    made = columns_table(title, columns, words=("dates",), details=("dates", "lists"), notes=notes)
    show([asdict(price) for price in found], made, as_json=as_json)


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

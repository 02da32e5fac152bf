"""`sizing init`, `schema`, `models` and `gpus`: a first scenario, its keys, the catalogs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from typer import Argument, Option

from minicluster.engine_model.kv_cache import kv_bytes_per_token
from minicluster.errors import InputError
from minicluster.shell import talk
from minicluster.specs.parameters import num_active_parameters, num_parameters
from sizing import catalog
from sizing.catalog.schema import scenario_keys
from sizing.cli.common import AsJson, print_json, wide_console
from sizing.report.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.gpu import GpuSpec, NumberSource

DEFAULT_SCENARIO = "llama-3.1-8b-h100"


def init(
    name: Annotated[str, Argument(help="Name of a shipped scenario")] = DEFAULT_SCENARIO,
    out: Annotated[
        Path | None, Option("-o", "--out", help="Scenario file to write [default: stdout]")
    ] = None,
) -> None:
    """Write a commented scenario to start from."""
    shipped = catalog.files("scenarios")
    if name not in shipped:
        raise InputError("NAME", name, "one of " + ", ".join(shipped))
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
        raise InputError("-o", str(out), f"a file that can be written: {error.strerror}") from None
    talk.print(f"wrote {out}; next: sizing plan {out}", highlight=False, markup=False)


def schema(*, as_json: AsJson = False) -> None:
    """Print every scenario key with type, unit, default and limits."""
    keys = scenario_keys()
    if as_json:
        print_json([asdict(key) for key in keys])
        return
    heads = ("key", "type", "unit", "default", "from", "to", "meaning")
    rows = (
        (
            *(key.key, key.type, key.unit, "required" if key.required else _shown(key.default)),
            *(_shown(key.minimum), _shown(key.maximum), key.meaning),
        )
        for key in keys
    )
    wide_console().print(table("scenario keys", heads, rows, left=heads))


def models(*, as_json: AsJson = False) -> None:
    """Print the model catalog."""
    rows = []
    for name, entry in catalog.models().items():
        spec = catalog.find_model(name)
        rows.append(
            {
                **asdict(spec),
                "name": name,
                "aliases": [entry.hub_id, *entry.aliases],
                "num_parameters": num_parameters(spec),
                "num_active_parameters": num_active_parameters(spec),
                "kv_bytes_per_token": kv_bytes_per_token(spec, tp=1),
                "sources": [asdict(source) for source in entry.sources],
            }
        )
    if as_json:
        print_json(rows)
        return
    heads = ("billion\nparameters", "active", "layers", "KV kB\nper token", "context", "weights")
    names = [Column(head, no_wrap=True) for head in ("name", "hub id")]
    cells = (
        (
            str(row["name"]),
            str(row["source"]),
            f"{row['num_parameters'] / 1e9:,.1f}",
            f"{row['num_active_parameters'] / 1e9:,.1f}",
            str(row["num_layers"]),
            f"{row['kv_bytes_per_token'] / 1e3:,.1f}",
            f"{row['max_context_tokens']:,}",
            str(row["weight_dtype"]),
        )
        for row in rows
    )
    title = "models (names and hub ids are accepted)"
    wide_console().print(table(title, (*names, *heads), cells))


def gpus(*, as_json: AsJson = False) -> None:
    """Print the GPU catalog."""
    entries = catalog.gpus()
    if as_json:
        print_json([{**asdict(e.spec), "aliases": list(e.aliases)} for e in entries.values()])
        return
    numbers = ("bf16\nTFLOP/s", "fp8", "GB", "GB/s", "scale-up\nGB/s", "scale-out\nGB/s", "W")
    words = ("efficiency", "source of the peaks")
    rows = (
        (
            spec.name,
            *(_scaled(spec.peak_flops_per_s.get(dtype), 1e12) for dtype in ("bf16", "fp8")),
            _scaled(spec.hbm_bytes, 1e9),
            _scaled(spec.hbm_bytes_per_s, 1e9),
            _scaled(spec.scale_up_bytes_per_s, 1e9),
            _scaled(spec.scale_out_bytes_per_s, 1e9),
            _scaled(spec.power_w, 1),
            _efficiency(spec),
            _document(spec.sources, "peak_flops_per_s"),
        )
        for spec in (entry.spec for entry in entries.values())
    )
    heads = (Column("name", no_wrap=True), *numbers, *words)
    title = "GPUs (peaks dense, bandwidths one way)"
    wide_console().print(table(title, heads, rows, left=words))


def _efficiency(spec: GpuSpec) -> str:
    if spec.efficiency is None:
        return "calibration"
    return "fitted" if spec.efficiency.fitted else "default"


def _document(sources: Iterable[NumberSource], covered: str) -> str:
    return next((source.document for source in sources if covered in source.covers), "")


def _scaled(value: float | None, unit: float) -> str:
    """Write a number in *unit*; empty where it is unknown."""
    return "" if value is None else f"{value / unit:,.0f}"


def _shown(value: object) -> str:
    """Write a value of the schema; empty where there is none."""
    if value is None or value == ():
        return ""
    return f"{value:,}" if isinstance(value, int | float) else str(value)

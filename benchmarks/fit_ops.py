"""
Fit the efficiencies of configs/gpus to measured op times; print and keep how well they fit.

    python benchmarks/fit_ops.py [--gpu h100-sxm] [--write]

Needs the wheel aiconfigurator-core 0.12.0 and pyarrow (requirements/bench.txt); without them it
says so and does nothing. The tables stay in the wheel: only constants and errors are written.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from op_tables import constants, document, tables

from sizing import catalog

if TYPE_CHECKING:
    from op_tables.constants import Fitted

ROOT = Path(__file__).parents[1]
ERRORS = ROOT / "tests" / "published" / "op_fits.toml"


def main() -> int:
    """Fit every GPU that has tables, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="append", help="catalog name; default: all with tables")
    parser.add_argument("--write", action="store_true", help="write configs/gpus and the errors")
    chosen = parser.parse_args()
    if tables.folder() is None:
        print("not fitted: pip install --no-deps -r requirements/bench.txt gives the op tables")
        return 0
    for name in chosen.gpu or [gpu for gpu in tables.SYSTEMS if gpu in catalog.gpus()]:
        start = time.perf_counter()
        found = constants.fitted(catalog.find_gpu(name))
        for fit in found:
            _print(name, fit)
        print(f"{name}: {time.perf_counter() - start:.1f} s")
        if chosen.write:
            collectives = constants.collectives(name)
            for own in constants.relatives(name):
                path = ROOT / "configs" / "gpus" / f"{own}.toml"
                if path.exists():
                    same = _links(own) == _links(name)
                    document.write_constants(path, name, found, collectives if same else {})
            document.write_errors(ERRORS, name, found)
    return 0


def _links(gpu: str) -> float | None:
    """Scale-up bandwidth: tables of collectives hold for the links they were measured on."""
    return catalog.find_gpu(gpu).scale_up_bytes_per_s


def _print(gpu: str, fit: Fitted) -> None:
    """One line: what was fitted, on how many rows, how well."""
    error = np.abs(fit.errors)
    numbers = " ".join(f"{key} {value:.3g}" for key, value in fit.numbers.items())
    print(
        f"{gpu:13} {fit.key:36} {len(error):5} rows  mean {error.mean():6.1%}"
        f"  median {np.median(error):6.1%}  bias {np.median(fit.errors):+6.1%}  {numbers}"
    )


if __name__ == "__main__":
    sys.exit(main())

"""The processor, cores and engine of this machine: the key of calibrations made here."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from minicluster.errors import InputError
from minicluster.specs.calibration import CalibrationKey


def this_machine(engine: str, *, model_config_hash: str, dtype: str) -> CalibrationKey:
    """Return the key of calibrations made here. Raises InputError: the engine is not installed."""
    return CalibrationKey(
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        engine=engine,
        engine_version=installed_version(engine),
        model_config_hash=model_config_hash,
        dtype=dtype,
    )


def processor() -> str:
    """Return the processor's name as the kernel gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_version(engine: str) -> str:
    """Return the version of the engine that is installed here (its CPU build first), or refuse."""
    for distribution in (f"{engine}-cpu", engine):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise InputError("engine", engine, "an engine installed here", "run `make setup`")

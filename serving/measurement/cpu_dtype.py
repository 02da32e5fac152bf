"""The native dtype of this CPU, chosen by a timing; its flags explain the choice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from minicluster.errors import InputError

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""The flags in /proc/cpuinfo on which a CPU's matrix products depend."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
ABOUT_AS_FAST = 0.9
"""Share of fp32's speed from which on bf16 is chosen, because it needs half the memory."""

EMULATED = 2.0
"""Speed ratio of the two dtypes beyond which the slower one gets a warning."""

TOKENS, HIDDEN, FFN = 64, 512, 2048
"""Shape of the timed product: a short prompt in the demo model's widest layer."""

TURNS, TURN_S = 5, 0.02
"""Turns per dtype and their length: alternating, so that other processes slow down both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSpeed:
    """Speed of matrix products on one core in each dtype; *flags* are those of `FLAGS`."""

    flags: tuple[str, ...]
    fp32_flops_per_s: float
    bf16_flops_per_s: float


def cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    """Return those of `FLAGS` in the text of /proc/cpuinfo, for its first core."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return tuple(flag for flag in FLAGS if flag in value.split())
    return ()


def native_dtype(speed: CpuSpeed) -> str:
    """Return `bf16` where it is about as fast as fp32, else `fp32`."""
    as_fast = speed.bf16_flops_per_s >= ABOUT_AS_FAST * speed.fp32_flops_per_s
    return "bf16" if as_fast else "fp32"


def choice_text(speed: CpuSpeed) -> str:
    """Return the native dtype and the reason, as text."""
    flags = ", ".join(speed.flags) or "no AVX2"
    without = "" if BF16_FLAGS & set(speed.flags) else ", no bf16 instructions"
    fp32, bf16 = (
        _rounded(flops / 1e9) for flops in (speed.fp32_flops_per_s, speed.bf16_flops_per_s)
    )
    return (
        f"{native_dtype(speed)}: this CPU ({flags}{without}) computes "
        f"fp32 at {fp32} GFLOP/s, bf16 at {bf16}"
    )


def dtype_warning(dtype: str, speed: CpuSpeed) -> str | None:
    """Return a warning for a plan in *dtype* on this CPU; `None`: it is fast, or was not timed."""
    faster = speed.fp32_flops_per_s / speed.bf16_flops_per_s
    slower, other = {"bf16": (faster, "fp32"), "fp32": (1 / faster, "bf16")}.get(dtype, (1.0, ""))
    if slower <= EMULATED:
        return None
    return (
        f"warning: {dtype} runs {_rounded(slower)} times slower than {other} on this CPU; "
        f"plan with --set model.weight_dtype={other}"
    )


def measure() -> CpuSpeed:
    """
    Time both dtypes on this CPU in a separate process: about 3 s, mostly torch's import.

    Raises:
        InputError: torch is not installed, or fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "serving.measurement.cpu_dtype"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError("this CPU's dtype", error, "a working torch", "give --dtype")
    measured = json.loads(done.stdout)
    return CpuSpeed(**{**measured, "flags": tuple(measured["flags"])})


def _time_here() -> CpuSpeed:
    import torch  # noqa: PLC0415  (seconds to import)

    torch.set_num_threads(1)
    operands = {
        dtype: (torch.ones(TOKENS, HIDDEN, dtype=dtype), torch.ones(FFN, HIDDEN, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    for tokens, weights in operands.values():
        torch.nn.functional.linear(tokens, weights)  # the first one also compiles the kernel
    best_s = dict.fromkeys(operands, float("inf"))
    for dtype in [*operands] * TURNS:
        tokens, weights = operands[dtype]
        until = time.perf_counter() + TURN_S
        while (start := time.perf_counter()) < until:
            torch.nn.functional.linear(tokens, weights)
            best_s[dtype] = min(best_s[dtype], time.perf_counter() - start)
    flops = 2.0 * TOKENS * HIDDEN * FFN
    return CpuSpeed(
        flags=cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        fp32_flops_per_s=flops / best_s[torch.float32],
        bf16_flops_per_s=flops / best_s[torch.bfloat16],
    )


def _rounded(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"  # noqa: PLR2004


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_time_here())))

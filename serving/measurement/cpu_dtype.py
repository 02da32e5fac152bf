"""Which dtype this CPU computes natively: its flags say why, a timing decides."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from minicluster.errors import InputError

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What of /proc/cpuinfo decides how fast a CPU multiplies matrices."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
ABOUT_AS_FAST = 0.9
"""bf16 needs half the memory, so it is also chosen where it is this much of fp32's pace."""

EMULATED = 2.0
"""A dtype is warned of where the other is more than so many times faster."""

TOKENS, HIDDEN, FFN = 64, 512, 2048
"""The product that is timed: a short prompt in the demo model's widest layer."""

TURNS, TURN_S = 5, 0.02
"""Both dtypes in turns, 0.1 s each in all: another process then slows down both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPace:
    """How fast one core multiplies matrices in each dtype; *flags* are those of `FLAGS`."""

    flags: tuple[str, ...]
    fp32_flops_per_s: float
    bf16_flops_per_s: float


def cpu_flags(cpuinfo: str) -> tuple[str, ...]:
    """Return those of `FLAGS` that the text of /proc/cpuinfo names for its first core."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return tuple(flag for flag in FLAGS if flag in value.split())
    return ()


def native_dtype(pace: CpuPace) -> str:
    """Return `bf16` where it is about as fast as fp32, else `fp32`."""
    as_fast = pace.bf16_flops_per_s >= ABOUT_AS_FAST * pace.fp32_flops_per_s
    return "bf16" if as_fast else "fp32"


def choice_text(pace: CpuPace) -> str:
    """Say which dtype is native, and why."""
    flags = ", ".join(pace.flags) or "no AVX2"
    without = "" if BF16_FLAGS & set(pace.flags) else ", no bf16 instructions"
    return (
        f"{native_dtype(pace)}: this CPU ({flags}{without}) computes "
        f"fp32 at {_giga(pace.fp32_flops_per_s)} GFLOP/s, bf16 at {_giga(pace.bf16_flops_per_s)}"
    )


def dtype_warning(dtype: str, pace: CpuPace) -> str | None:
    """Say what a plan in *dtype* loses on this CPU; `None`: little, or it was not timed."""
    paces = {"fp32": pace.fp32_flops_per_s, "bf16": pace.bf16_flops_per_s}
    if dtype not in paces:
        return None
    other = "bf16" if dtype == "fp32" else "fp32"
    slower = paces[other] / paces[dtype]
    if slower <= EMULATED:
        return None
    return (
        f"warning: {dtype} runs {_rounded(slower)} times slower than {other} on this CPU; "
        f"plan with --set model.weight_dtype={other}"
    )


def measure() -> CpuPace:
    """
    Time both dtypes on this CPU, in a process of its own: about 3 s, most of them torch's import.

    Raises:
        InputError: torch is not installed, or cannot compute here.
    """
    done = subprocess.run(
        [sys.executable, "-m", "serving.measurement.cpu_dtype"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError("this CPU's dtype", why, "a torch that can be timed", "give --dtype")
    found = json.loads(done.stdout)
    return CpuPace(**{**found, "flags": tuple(found["flags"])})


def _time_here() -> CpuPace:
    """Time both dtypes in this process, in turns, and keep the best product of each."""
    import torch  # noqa: PLC0415  (seconds to import)

    torch.set_num_threads(1)
    given = {
        dtype: (torch.ones(TOKENS, HIDDEN, dtype=dtype), torch.ones(FFN, HIDDEN, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    for tokens, weights in given.values():
        torch.nn.functional.linear(tokens, weights)  # the first one also compiles the kernel
    best_s = dict.fromkeys(given, float("inf"))
    for dtype in [*given] * TURNS:
        tokens, weights = given[dtype]
        until = time.perf_counter() + TURN_S
        while (begun := time.perf_counter()) < until:
            torch.nn.functional.linear(tokens, weights)
            best_s[dtype] = min(best_s[dtype], time.perf_counter() - begun)
    flops = 2.0 * TOKENS * HIDDEN * FFN
    return CpuPace(
        flags=cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        fp32_flops_per_s=flops / best_s[torch.float32],
        bf16_flops_per_s=flops / best_s[torch.bfloat16],
    )


def _giga(flops_per_s: float) -> str:
    """Return GFLOP/s for people."""
    return _rounded(flops_per_s / 1e9)


def _rounded(value: float) -> str:
    """Return two digits of what is below ten, else whole ones."""
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"  # noqa: PLR2004


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_time_here())))

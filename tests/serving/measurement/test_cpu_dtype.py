"""Which dtype the CPU computes natively, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minicluster.errors import InputError, TargetFailed
from minicluster.plan import to_json
from serving.cli.app import app
from serving.measurement import cpu_dtype
from serving.measurement.cpu_dtype import (
    CpuSpeed,
    choice_text,
    cpu_flags,
    dtype_warning,
    native_dtype,
)
from serving.operations import deploy
from sizing import catalog
from tests.serving.plans import make_deployment, make_plan


def _speed(fp32: float, bf16: float, *flags: str) -> CpuSpeed:
    return CpuSpeed(flags=flags, fp32_flops_per_s=fp32 * 1e9, bf16_flops_per_s=bf16 * 1e9)


LAPTOP = _speed(57, 1.6, "avx2")
SERVER = _speed(83, 332, "avx2", "avx512f", "avx512_bf16")
TWICE = _speed(2, 1)


@pytest.mark.parametrize(
    ("speed", "dtype", "says"),
    [
        (LAPTOP, "fp32", "(avx2, no bf16 instructions) computes fp32 at 57 GFLOP/s, bf16 at 1.6"),
        (SERVER, "bf16", "(avx2, avx512f, avx512_bf16) computes fp32 at 83 GFLOP/s, bf16 at 332"),
        (_speed(100, 89), "fp32", "(no AVX2, no bf16 instructions) computes fp32 at 100 GFLOP/s"),
        (_speed(100, 91, "avx2"), "bf16", "(avx2, no bf16 instructions) computes fp32 at 100"),
    ],
)
def test_timing_decides_the_dtype(speed: CpuSpeed, dtype: str, says: str) -> None:
    """bf16 is native where it is about as fast as fp32, whatever the flags are; both are said."""
    assert native_dtype(speed) == dtype
    assert choice_text(speed).startswith(f"{dtype}: this CPU {says}")


def test_flags_are_whole_words_of_the_first_core() -> None:
    """A flag that begins like another is not taken for it; no flags, no answer."""
    cpuinfo = "processor\t: 0\nvmx flags\t: amx_bf16\nflags\t\t: fpu avx2 avx512_bf16x avx512f\n"
    assert cpu_flags(cpuinfo) == ("avx2", "avx512f")
    assert cpu_flags("processor : 0\n") == ()


def test_warning_names_the_factor_and_the_way_out() -> None:
    """A dtype more than twice as slow as the other is warned of; others are not."""
    assert dtype_warning("bf16", LAPTOP) == (
        "warning: bf16 runs 36 times slower than fp32 on this CPU; "
        "plan with --set model.weight_dtype=fp32"
    )
    assert "fp32 runs 4.0 times slower than bf16" in str(dtype_warning("fp32", SERVER))
    for dtype, pace in (("fp32", LAPTOP), ("bf16", SERVER), ("fp16", LAPTOP), ("bf16", TWICE)):
        assert dtype_warning(dtype, pace) is None


def test_a_real_timing_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Without AVX-512, fp32 is native by a real timing.

    torch's matrix products are oneDNN's: ONEDNN_MAX_CPU_ISA=AVX2 takes its bf16 kernels away, and
    bf16 falls from four times fp32's pace to a quarter of it (EPYC with avx512_bf16).
    ATEN_CPU_CAPABILITY=avx2 alone leaves these products as they are.
    """
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    pace = cpu_dtype.measure()
    assert pace.flags == cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    assert native_dtype(pace) == "fp32"


def test_a_torch_that_cannot_be_timed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timing is bad input in one line, with the way out."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(InputError, match="give --dtype"):
        cpu_dtype.measure()


@pytest.mark.parametrize(
    ("options", "speed", "dtype"),
    [
        ([], SERVER, "bf16"),
        (["--dtype", "auto"], LAPTOP, "fp32"),
        (["--dtype", "bf16"], LAPTOP, "bf16"),
    ],
)
def test_demo_model_is_written_in_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], speed: CpuSpeed, dtype: str
) -> None:
    """
    `demo-model` writes what was asked for, or what this CPU computes natively, and says why.

    `sizing` plans it with weights and KV cache of that dtype. In fp32 it has fewer layers.
    """
    monkeypatch.setattr(cpu_dtype, "measure", lambda: speed)
    place = str(tmp_path / "demo")
    done = CliRunner().invoke(app, ["demo-model", place, *options])
    assert (done.exit_code, done.stdout.strip()) == (0, place), done.output
    assert (choice_text(speed) in done.stderr) == (options[1:] in ([], ["auto"]))
    named = json.loads((tmp_path / "demo/config.json").read_text())["torch_dtype"]
    assert named == {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    read = catalog.find_model(place, place="test")
    assert (read.weight_dtype, read.kv_dtype) == (dtype, dtype)
    assert read.num_layers == {"fp32": 2, "bf16": 3}[dtype]


@pytest.mark.parametrize(
    ("dtype", "speed", "warned"),
    [("bf16", LAPTOP, True), ("fp32", LAPTOP, False), ("bf16", SERVER, False)],
)
def test_up_warns_of_a_dtype_that_is_emulated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_model: Path,
    dtype: str,
    speed: CpuSpeed,
    *,
    warned: bool,
) -> None:
    """`serving up` warns before it starts anything, on stderr, and only where it matters."""

    def stop(*_given: object, **_named: object) -> None:
        raise TargetFailed("stopped by the test")

    monkeypatch.setattr(cpu_dtype, "measure", lambda: speed)
    monkeypatch.setattr(deploy, "compile_app", stop)
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(to_json(make_plan(make_deployment(small_model, dtype=dtype))))
    done = CliRunner().invoke(app, ["up", "plan.json", "--port", "0"])
    assert isinstance(done.exception, TargetFailed)
    assert (f"{dtype} runs 36 times slower than fp32" in done.stderr) == warned
    assert ("warning" in done.stderr) == warned

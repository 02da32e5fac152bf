from __future__ import annotations

from typing import TYPE_CHECKING

from serving.cluster.logs import root_cause

if TYPE_CHECKING:
    from pathlib import Path


def test_the_root_is_named_not_its_echo(tmp_path: Path) -> None:
    """The error of the worker is the cause, not the errors of the processes that waited for it."""
    (tmp_path / "worker-a.err").write_text(
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    (tmp_path / "worker-b.out").write_text(
        "(Worker pid=3) ERROR 11-20 [x.py:1] ValueError: Available memory is less than requested\n"
        "(EngineCore pid=2) ERROR RuntimeError: WorkerProc initialization failed due to\n"
    )
    assert root_cause(tmp_path, "x") == "ValueError: Available memory is less than requested"


def test_without_logs_the_message_is_the_reason(tmp_path: Path) -> None:
    """If no log names an error, what Ray Serve says is told, its own error first."""
    assert root_cause(tmp_path, "deploying\n  TypeError: no\n") == "TypeError: no"
    assert root_cause(tmp_path, "the  deployment\nfailed") == "the deployment failed"

"""`make setup`: it installs as pip is configured, and by pip where uv cannot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup.py"


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Return the script as a module whose environment is this Python's."""
    spec = importlib.util.spec_from_file_location("make_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return module


def test_uv_gets_what_pip_is_configured_with(setup: Any) -> None:  # noqa: ANN401
    """Indexes in pip's sense (the best match of all), constraints, wheels, certificates."""
    options = setup.uv_options(
        {
            "index-url": "https://mirror.example/simple",
            "extra-index-url": "https://a.example/simple https://b.example/simple",
            "find-links": "wheels\n more-wheels",
            "constraint": "constraints.txt",
            "trusted-host": "mirror.example",
            "cert": "authority.pem",
            "timeout": "60",
            "no-index": "false",
            "disable-pip-version-check": "1",
        }
    )
    assert options == [
        *("--index-strategy", "unsafe-best-match"),
        *("--default-index", "https://mirror.example/simple"),
        *("--index", "https://a.example/simple", "--index", "https://b.example/simple"),
        *("--find-links", "wheels", "--find-links", "more-wheels"),
        *("--constraint", "constraints.txt"),
        *("--allow-insecure-host", "mirror.example"),
    ]
    assert os.environ["SSL_CERT_FILE"] == "authority.pem"
    assert os.environ["UV_HTTP_TIMEOUT"] == "60"
    assert "--no-index" in setup.uv_options({"no-index": "true"})


@pytest.mark.parametrize("key", ["only-binary", "require-hashes", "keyring-provider", "pre"])
def test_a_setting_that_uv_lacks_leaves_the_work_to_pip(setup: Any, key: str) -> None:  # noqa: ANN401
    """What cannot be carried over with certainty is not guessed."""
    assert setup.uv_options({key: "something"}) is None


def test_pips_settings_are_those_of_install(
    setup: Any,  # noqa: ANN401
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of all commands, then those of install, then the environment's; no other command's."""
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://one.example/simple\nextra-index-url =\n  https://a.example\n"
        "  https://b.example\ntimeout = 5\n[install]\ntimeout = 6\n[download]\nfind-links = wrong\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://two.example/simple")
    monkeypatch.setattr(
        setup.subprocess, "run", lambda *given, **how: run(*given, **how, env=dict(os.environ))
    )
    found = setup.pip_settings()
    assert found["index-url"] == "https://two.example/simple"
    assert found["extra-index-url"].split() == ["https://a.example", "https://b.example"]
    assert found["timeout"] == "6"
    assert "find-links" not in found


run = subprocess.run


@pytest.mark.parametrize(
    ("failing", "used"),
    [
        ([], ["uv"]),
        (["uv"], ["uv", "uv torch", "pip"]),
        (["install uv"], ["pip"]),
        (["uv", "pip"], ["uv", "uv torch", "pip", "pip torch"]),
    ],
)
def test_pip_installs_where_uv_cannot(
    setup: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    failing: list[str],
    used: list[str],
) -> None:
    """Each tries the configured indexes, then also torch's own; all that fail are told of."""
    tried: list[str] = []

    def attempt(command: list[str]) -> str | None:
        if setup.UV in command:
            return "no such package" if "install uv" in failing else None
        name = "uv" if command[0].endswith("uv") else "pip"
        tried.append(name + (" torch" if setup.TORCH_CPU_INDEX in command else ""))
        assert "--no-deps" in command
        return f"{name} says no" if name in failing else None

    monkeypatch.setattr(setup, "pip_settings", dict)
    monkeypatch.setattr(setup, "attempt", attempt)
    if failing == ["uv", "pip"]:
        with pytest.raises(setup.SetupFailed, match="pip says no"):
            setup.install(["requirements/fuzz.txt"])
    else:
        setup.install(["requirements/fuzz.txt"])
    assert tried == used

"""`sizing ui` before there is a page: what it needs, and what it listens on."""

from __future__ import annotations

import socket

import pytest

from sizing.ui import serve
from tests.sizing.conftest import Sizing


def test_without_streamlit_it_says_how_to_install(
    sizing: Sizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help is there all the same."""
    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    assert sizing("ui", "--help").code == 0
    found = sizing("ui")
    assert found.code == 2
    assert "streamlit is not installed" in found.err
    assert "[ui]" in found.err


def test_an_address_that_cannot_be_listened_on_is_refused(sizing: Sizing) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options in (("--port", port), ("--port", "99999"), ("--host", "192.0.2.1")):
            found = sizing("ui", *options)
            assert found.code == 2
            assert "an address to listen on" in found.err


def test_colours_and_rules_are_those_of_the_page_kit() -> None:
    """Each colour has a value for light and dark; no rule applies outside of class `kit`."""
    from sizing.ui.style import (  # noqa: PLC0415  (Streamlit: a second of every worker)
        COLOUR,
        STYLE,
        coloured,
        palette,
    )

    light, dark = palette(dark=False), palette(dark=True)
    assert light.keys() == dark.keys() >= {"--blue", "--red", "--soft"}
    assert light["--blue"] != dark["--blue"]
    trace = {"line": {"color": "var(--blue)"}, "x": [1, None], "scale": [[0, "var(--red)"]]}
    drawn = str(coloured(trace, light))
    assert not COLOUR.search(drawn)
    assert light["--red"] in drawn
    assert STYLE.startswith(".kit {")
    assert ":root" not in STYLE

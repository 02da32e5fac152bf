"""Fixtures of the page's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw curves of fewer points: no test reads them off."""
    monkeypatch.setattr("sizing.ui.questions.SHARES", (1.0,))

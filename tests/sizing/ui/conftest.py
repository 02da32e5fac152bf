"""Fixtures of the page's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw distributions of fewer requests: no test here reads them off."""
    monkeypatch.setattr("sizing.ui.answer.REQUESTS", 300)

"""Fixtures of the page's tests."""

from __future__ import annotations

import pytest

from sizing.ui import answer


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw distributions of fewer requests: no test here reads them off."""
    monkeypatch.setattr(answer, "REQUESTS", 300)

"""The header that shows an API key."""

from __future__ import annotations

import pytest

from minicluster.errors import InputError
from minicluster.http_client.authorization import bearer


def test_a_key_is_shown_as_it_is() -> None:
    assert bearer("a key: ~1", place="KEY") == {"authorization": "Bearer a key: ~1"}


@pytest.mark.parametrize("key", ["secret\nx: y", "secret\x00", "secretä"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    """A line break would begin another header; the message says how long the key is, no more."""
    with pytest.raises(InputError, match=f"KEY is '{len(key)} characters'") as refused:
        bearer(key, place="KEY")
    assert "secret" not in str(refused.value)

"""The header that shows an API key."""

from __future__ import annotations

import http.client

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.http_client.authorization import bearer


@given(st.text(min_size=1, max_size=40))
def test_a_key_is_shown_as_it_is_or_refused_unseen(key: str) -> None:
    if not (key.isascii() and key.isprintable()):
        with pytest.raises(InputError, match=f"KEY is '{len(key)} characters'"):
            bearer(key, place="KEY")
        return
    header = bearer(key, place="KEY")
    assert header == {"authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection("127.0.0.1")
    connection.putrequest("GET", "/")
    connection.putheader("authorization", header["authorization"])


@pytest.mark.parametrize("key", ["secret\nx: y", "secret\x00", "secretä"])
def test_the_message_does_not_show_the_key(key: str) -> None:
    """A line break would begin another header."""
    with pytest.raises(InputError, match="KEY") as refused:
        bearer(key, place="KEY")
    assert "secret" not in str(refused.value)

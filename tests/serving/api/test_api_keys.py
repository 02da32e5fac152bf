"""API keys: what is read, what is refused, and what lets in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from minicluster.errors import InputError
from serving.api.keys import KEYS, KEYS_FILE, authorization, holder_of, read_keys, refuse_open

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = "first-secret-0123456789", "second-secret-0123456789"


def test_keys_of_file_and_environment(tmp_path: Path) -> None:
    """Both places are read; names and limits are optional; comments are no keys."""
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\nalice:{FIRST}:4\n{SECOND}\n")
    keys = read_keys({KEYS_FILE: str(file), KEYS: "bob:third-secret-0123456789"})
    bob, alice, unnamed = keys.values()
    assert (bob.name, alice.name, unnamed.name[:4]) == ("bob", "alice", "key-")
    assert [key.max_concurrency for key in keys.values()] == [None, 4, None]
    assert FIRST not in repr(keys)
    assert read_keys({}) == {}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({KEYS: ""}, "at least one key"),
        ({KEYS: "# none"}, "at least one key"),
        ({KEYS: "0123456789abcde"}, "15 characters.*at least 16"),
        ({KEYS: "alice:0123456789abcde"}, "15 characters.*at least 16"),
        ({KEYS: f"a:{FIRST}:many"}, "number of requests"),
        ({KEYS: f"a:{FIRST}:0"}, "number of requests"),
        ({KEYS: f"a:{FIRST}:1:2"}, "name:key"),
        ({KEYS_FILE: "not/there"}, "a file of keys"),
    ],
)
def test_keys_that_would_leave_the_endpoint_open_are_refused(
    environment: dict[str, str], says: str
) -> None:
    """Keys that were meant and are not there, or could be guessed, stop the start."""
    with pytest.raises(InputError, match=says) as refused:
        read_keys(environment)
    assert FIRST not in str(refused.value)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (f"Bearer {FIRST}", "a"),
        (f"bearer {SECOND}", "b"),
        (f"Bearer  {FIRST} ", "a"),
        ("Bearer 0123456789abcdef", "c"),  # the fewest characters
        (f"Basic {FIRST}", None),
        (f"Bearer {FIRST}x", None),
        (f"Bearer {FIRST[:-1]}", None),
        (FIRST, None),
        ("Bearer", None),
        ("", None),
        (None, None),
    ],
)
def test_only_a_key_lets_in(header: str | None, name: str | None) -> None:
    """A bearer token that is exactly one of the keys, nothing else."""
    keys = read_keys({KEYS: f"a:{FIRST},b:{SECOND},c:0123456789abcdef"})
    found = holder_of(keys, header)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    "keys", [f"a:{FIRST}:4\n{SECOND}", f"# ours\n\n{FIRST}\nb:{SECOND}", f" {FIRST} "]
)
def test_our_own_commands_show_the_first_key(tmp_path: Path, keys: str) -> None:
    """The header opens the endpoint whose keys these are, wherever they stand."""
    file = tmp_path / "keys"
    file.write_text(keys)
    for environment in ({KEYS: keys}, {KEYS_FILE: str(file)}, {KEYS: keys, KEYS_FILE: str(file)}):
        header = authorization(environment)
        assert header == {"authorization": f"Bearer {FIRST}"}
        assert holder_of(read_keys(environment), header["authorization"])
    assert authorization({}) == {}


def test_an_endpoint_that_others_reach_needs_keys() -> None:
    """It says how to do without; what only this machine reaches may be open."""
    for host in ("0.0.0.0", "::", "10.0.0.1", "", "gpu-7.example"):  # noqa: S104
        with pytest.raises(InputError, match=f"{KEYS_FILE}=FILE.*--open"):
            refuse_open(host, {})
        refuse_open(host, {KEYS: FIRST})
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        refuse_open(host, {})

"""API keys: what is read, what is refused, what lets in, and what a key may do."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from minicluster.errors import InputError
from serving.admission.controller import ANONYMOUS, RIGHTS, KeyHolder
from serving.api.access import (
    KEYS,
    KEYS_FILE,
    READER,
    SHOWN_KEY,
    KeyStore,
    authorization,
    holder_of,
    read_keys,
    refuse_open,
    salted,
)
from serving.protocol.messages import EndpointConfig
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import HI, ONE, one

FIRST, SECOND = "first-secret-0123456789", "second-secret-0123456789"
SHOWN = {"Authorization": f"Bearer {FIRST}"}
HASH = hashlib.sha256(SECOND.encode()).hexdigest()
TABLES = f"""
[[keys]]
name = "chat"
key = " {FIRST} "
requests_per_s = 5.5
tokens_per_min = 60000
max_concurrency = 3

[[keys]]  # the next key of the same tenant
name = "chat"
key_sha256 = "{HASH.upper()}"
rights = ["timing"]
share_cache = true
"""


def _written(tmp_path: Path, text: str, name: str = "keys.toml") -> dict[str, str]:
    file = tmp_path / name
    file.write_text(text)
    return {KEYS_FILE: str(file)}


def test_keys_of_file_and_environment(tmp_path: Path) -> None:
    """Both places are read; names and limits are optional; comments and blanks are no keys."""
    file = _written(tmp_path, f"# ours\n\nalice: {FIRST} : 4\n{SECOND}\n", "keys")
    keys = read_keys({**file, KEYS: "bob:third-secret-0123456789"})
    bob, alice, unnamed = keys.values()
    assert (bob.name, alice.name, unnamed.name[:4]) == ("bob", "alice", "key-")
    assert [key.max_concurrency for key in keys.values()] == [None, 4, None]
    assert all(key.rights == RIGHTS and not key.share_cache for key in keys.values())
    assert holder_of(keys, f"Bearer {FIRST}") == alice
    assert FIRST not in repr(keys)
    assert read_keys({}) == {}


@pytest.mark.parametrize("name", ["keys.toml", "keys.txt"])
def test_keys_of_tables(tmp_path: Path, name: str) -> None:
    """Each table is a key with its limits and rights, which are none unless they are listed."""
    keys = read_keys(_written(tmp_path, TABLES, name))
    assert holder_of(keys, f"Bearer {FIRST}") == KeyHolder(
        name="chat",
        requests_per_s=5.5,
        tokens_per_min=60000,
        max_concurrency=3,
        rights=frozenset(),
    )
    assert holder_of(keys, f"Bearer {SECOND}") == KeyHolder(
        name="chat", rights=frozenset({"timing"}), share_cache=True
    )


def _table(**changes: str) -> str:
    lines = {"name": '"a"', "key": f'"{FIRST}"', **changes}
    return "[[keys]]\n" + "\n".join(f"{name} = {value}" for name, value in lines.items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_table(requests_per_s="0"), r"keys\[1\].requests_per_s .*greater than 0"),
        (_table(requests_per_s="nan"), r"keys\[1\].requests_per_s .*finite"),
        (_table(requests_per_s='"5"'), r"keys\[1\].requests_per_s .*number"),
        (_table(tokens_per_min="-1"), r"keys\[1\].tokens_per_min .*greater than 0"),
        (_table(max_concurrency="1.5"), r"keys\[1\].max_concurrency .*integer"),
        (_table(rights='["all"]'), r"keys\[1\].rights\[1\] .*'timing' or 'internal'"),
        (_table(share_cache="1"), r"keys\[1\].share_cache .*boolean"),
        (_table(weight="2"), r"keys\[1\].weight .*max_concurrency"),
        (_table(limit="3"), r"keys\[1\].limit .*max_concurrency"),
        (_table(key_sha256=f'"{HASH}"'), r"keys\[1\] .*either key or key_sha256"),
        (_table(key=f'"{FIRST[:15]}"'), r"keys\[1\].key .*at least 16"),
        (_table(key='"first-secret   "'), r"keys\[1\].key .*at least 16"),
        (_table(key=f'["{FIRST}"]'), r"keys\[1\].key .*string"),
        (_table(name=f'"{FIRST}:{FIRST}"'), r"keys\[1\].name .*match"),
        (f'[[keys]]\nkey = "{FIRST}"', r"keys\[1\].name is missing"),
        (_table() + "\n" + _table(name='"b"'), r"keys\[2\] .*once"),
        (f'keys = ["{FIRST}"]', r"keys\[1\] .*"),
        (f'[[keys]]\n"{FIRST}" = "a"', r"keys\[1\]"),
        (f"[[keys]]\nkey = {FIRST}", r"line 2, column 7"),
        ("", "at least one key|keys is missing"),
    ],
)
def test_tables_that_cannot_be_used_are_refused_with_their_place(
    tmp_path: Path, text: str, says: str
) -> None:
    _refused(_written(tmp_path, text), says)


def _refused(environment: dict[str, str], says: str) -> None:
    """Whatever is wrong, the error shows no part of a key."""
    with pytest.raises(InputError, match=says) as refused:
        read_keys(environment)
    for part in (FIRST, FIRST[:8], FIRST[-8:], HASH):
        assert part not in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        *(({KEYS: none}, "at least one key") for none in ("", "# none")),
        *(
            ({KEYS: f"{name}0123456789abcde"}, "15 characters.*at least 16")
            for name in ("", "alice:", "alice: ")
        ),
        *(({KEYS: f"a:{FIRST}:{n}"}, "number of requests") for n in (SECOND, "0", "x", "-1", "")),
        ({KEYS: f"a:{FIRST}:1:2"}, "name:key"),
        ({KEYS: f"a:{FIRST},b:{FIRST}"}, "line 2.*once"),
        ({KEYS_FILE: "not/there"}, "a file of keys"),
    ],
)
def test_keys_that_would_leave_the_endpoint_open_are_refused(
    environment: dict[str, str], says: str
) -> None:
    """Keys that were meant and are not there, or could be guessed, stop the start."""
    _refused(environment, says)


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


def test_any_number_of_keys_is_one_look() -> None:
    """Else a request without a key would take time for each key that there is."""

    class Looked(dict[bytes, KeyHolder]):
        def __iter__(self) -> NoReturn:
            raise AssertionError

        items = __iter__

    keys = Looked(read_keys({KEYS: "\n".join(f"{n:016}" for n in range(1000))}))
    assert holder_of(keys, f"Bearer {7:016}") is not None
    assert holder_of(keys, f"Bearer {1000:016}") is None


def _read() -> None:
    """Wait until a changed file has been read."""
    for thread in threading.enumerate():
        if thread.name == READER:
            thread.join()


def test_requests_go_on_while_a_changed_file_is_read(tmp_path: Path) -> None:
    """With the former keys; a pipe that nothing is written to takes any time."""
    now_s = 0.0
    store = KeyStore(_written(tmp_path, FIRST, "keys"), lambda: now_s)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").rename(tmp_path / "keys")
    for _ in range(3):
        now_s += 1
        assert holder_of(store.current(), f"Bearer {FIRST}")
    _written(tmp_path, SECOND, "keys")
    _read()
    assert [bool(holder_of(store.current(), f"Bearer {key}")) for key in (FIRST, SECOND)] == [0, 1]


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within a second, without a restart; one that cannot be used changes nothing, with one log."""
    now_s = 0.0
    environment = _written(tmp_path, FIRST, "keys")
    store = KeyStore(environment, lambda: now_s)

    def let_in(secret: str) -> bool:
        store.current()
        _read()
        return holder_of(store.current(), f"Bearer {secret}") is not None

    _written(tmp_path, f"{FIRST}\n{SECOND}", "keys")
    assert not let_in(SECOND)  # it was looked at less than a second ago
    now_s += 1
    assert let_in(FIRST)
    assert let_in(SECOND)
    for spoil in (lambda: _written(tmp_path, "too short", "keys"), (tmp_path / "keys").unlink):
        caplog.clear()
        spoil()
        for _ in range(3):
            now_s += 1
            assert let_in(SECOND)
        assert [each.levelno for each in caplog.records] == [logging.ERROR]
    _written(tmp_path, FIRST, "keys")
    now_s += 1
    assert not let_in(SECOND)


@pytest.mark.parametrize(
    "keys", [f"a:{FIRST}:4\n{SECOND}", f"# ours\n\n{FIRST}\nb:{SECOND}", f" {FIRST} "]
)
def test_our_own_commands_show_the_first_key(tmp_path: Path, keys: str) -> None:
    """The header opens the endpoint whose keys these are, wherever they stand."""
    others = _written(tmp_path, "other-secret-0123456789", "others")
    for environment in ({KEYS: keys}, _written(tmp_path, keys, "keys"), {KEYS: keys, **others}):
        header = authorization(environment)
        assert header == {"authorization": f"Bearer {FIRST}"}
        assert holder_of(read_keys(environment), header["authorization"])
    assert authorization({}) == {}


def test_our_own_commands_show_a_key_with_all_rights(tmp_path: Path) -> None:
    """Of tables the first that has them; of hashes none, so that the environment has to name it."""
    able = _table(name='"b"', key=f'"{SECOND}"', rights='["timing", "internal"]')
    hashed = f'[[keys]]\nname = "a"\nkey_sha256 = "{HASH}"'
    for text, key in ((f"{_table()}\n{able}", SECOND), (_table(), FIRST), (hashed, SECOND)):
        environment = {**_written(tmp_path, text), SHOWN_KEY: SECOND}
        assert authorization(environment) == {"authorization": f"Bearer {key}"}
    with pytest.raises(InputError, match=SHOWN_KEY):
        authorization(_written(tmp_path, hashed))


def test_an_endpoint_that_others_reach_needs_keys() -> None:
    """It says how to do without; what only this machine reaches may be open."""
    for host in ("0.0.0.0", "::", "10.0.0.1", "", "gpu-7.example"):  # noqa: S104
        with pytest.raises(InputError, match=f"{KEYS_FILE}=FILE.*--open"):
            refuse_open(host, {})
        refuse_open(host, {KEYS: FIRST})
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        refuse_open(host, {})


@pytest.mark.parametrize("rights", [(), ("timing",), ("timing", "internal")])
def test_a_key_may_do_what_its_rights_say(
    config: EndpointConfig, tmp_path: Path, rights: tuple[str, ...]
) -> None:
    """Without them it gets answers, but neither the engines' times nor prefill alone."""
    given = {"headers": SHOWN, "environment": _written(tmp_path, _table(rights=str(list(rights))))}
    answer = one(config, "/v1/completions", ONE, **given)  # type: ignore[arg-type]
    assert answer.status_code == 200
    assert ("Server-Timing" in answer.headers) == ("timing" in rights)
    assert "X-Minicluster-Path" in answer.headers
    alone = one(config, "/internal/prefill", ONE, **given)  # type: ignore[arg-type]
    refused = None if "internal" in rights else "insufficient_permissions"
    assert alone.json().get("error", {}).get("code") == refused
    assert alone.status_code == (403 if refused else 200)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ONE), ("/v1/chat/completions", HI)])
def test_engines_get_a_salt_for_each_tenant(
    config: EndpointConfig, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """Of keys, unless they share the cache; without keys a request stays as it is."""
    seen = []
    for environment, own in (
        (_written(tmp_path, _table(), "own.toml"), {}),
        (_written(tmp_path, _table(share_cache="true")), {}),
        ({}, {}),
        ({}, {"cache_salt": "mine"}),
    ):
        servers, sent = FakeServers(), {**body, **own}
        one(config, path, sent, servers=servers, headers=SHOWN, environment=environment)
        seen.append(servers.seen[0].get("cache_salt"))
    assert re.fullmatch("[0-9a-f]{64}", seen[0])
    assert seen[1:] == [None, None, "mine"]


def test_no_salt_crosses_tenants() -> None:
    """Whatever clients send: equal salts are those of one tenant, endpoint and own salt."""
    alice, bob = KeyHolder(name="alice"), KeyHolder(name="bob")
    bodies: tuple[dict[str, Any], ...] = ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    cases = list(itertools.product(bodies, (alice, bob), (b"1", b"2")))
    salts = [salted(*case)["cache_salt"] for case in cases]
    assert len(set(salts)) == len(cases)
    assert salts == [salted(*case)["cache_salt"] for case in cases]
    taken = salted({"cache_salt": salts[0]}, bob, b"1")["cache_salt"]
    assert taken not in salts
    assert salted({"cache_salt": "a"}, ANONYMOUS, b"1") == {"cache_salt": "a"}

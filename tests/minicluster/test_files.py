"""Files written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.files import locked, write_atomically, write_together
from tests.full_disk import small_disk


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_text_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Every text comes back, line ends included, over what was there; nothing else is left."""
    path = tmp_path_factory.getbasetemp() / "whole" / "file.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("before")
    write_atomically(path, text)
    assert path.read_bytes().decode() == text
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "place",
    [
        lambda folder: folder,
        lambda folder: folder / "none" / "file",
        lambda folder: folder / "file" / "below",
        lambda _: Path(),
        lambda folder: folder / ("x" * 300),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    (tmp_path / "file").write_text("before")
    with pytest.raises(InputError, match="a file that can be written"):
        write_atomically(place(tmp_path), "text")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupt_leaves_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def replace(*_: object) -> None:
        assert path.read_text() == "before"
        raise stop

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises((KeyboardInterrupt, InputError)):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    """`-o /dev/stdout` writes to what standard output is, and replaces neither link nor pipe."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    write_atomically(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "text")
    assert os.read(reader, 100) == b"text"
    assert pipe.is_fifo()
    os.close(reader)
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]


def test_files_that_belong_together_are_all_written_or_none(tmp_path: Path) -> None:
    """A disk that has room for one of two leaves both as they were, and nothing beside them."""
    with small_disk(tmp_path) as disk:
        first, second = disk.path / "first", disk.path / "second"
        write_together({first: "before", second: "before"})
        with pytest.raises(
            InputError, match="below cannot be written: Not a directory; it has to be a file"
        ):
            write_together({first: "after", second / "below": "after"})
        with disk.full(room_bytes=8192), pytest.raises(InputError, match="No space left"):
            write_together({first: "after", second: "after" * 20_000})
        assert {each.name: each.read_text() for each in disk.path.iterdir()} == {
            "first": "before",
            "second": "before",
        }
        write_together({first: "after", second: "after"})
        assert first.read_text() == second.read_text() == "after"


def test_a_full_disk_does_not_hide_what_went_wrong_under_a_lock(tmp_path: Path) -> None:
    """A lock needs no room: what is said is what the command under it says."""
    with small_disk(tmp_path) as disk:
        lock, again = disk.path / "lock", pytest.raises(InputError, match="in use by process")
        with disk.full():
            with locked(lock, "here", "a test"), again, locked(lock, "here", "a test"):
                pass
            with pytest.raises(KeyError, match="cause"), locked(lock, "here", "a test"):
                raise KeyError("cause")
        assert not lock.exists()

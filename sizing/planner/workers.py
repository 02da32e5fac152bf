"""Worker processes: they change how long an answer takes, never the answer."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Self, TypeVar

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

Answer = TypeVar("Answer")
Item = TypeVar("Item")


def usable_cores() -> int:
    """Return the cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """
    Processes that answer pure questions; started by the first question, ended with the context.

    They are forked, so that nothing is imported twice and no script of a user who plans from
    Python runs again. Where the system has no safe fork (macOS, Windows) there are none, and the
    questions are answered in this process. A worker whose parent was killed ends by itself.
    """

    def __init__(self, processes: int = 0) -> None:
        """Take so many processes at most."""
        forks = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
        self.processes = processes if forks else 0
        self._pool: ProcessPoolExecutor | None = None
        self._open: set[Future[Any]] = set()

    @classmethod
    def beside(cls, jobs: int | None) -> Workers:
        """Return workers for one plan, whose search takes a core itself; `None`: every core."""
        return cls((jobs or usable_cores()) - 1)

    @classmethod
    def instead(cls, jobs: int | None) -> Workers:
        """Return workers for the plans of a study, which itself only waits; `None`: every core."""
        jobs = jobs or usable_cores()
        return cls(jobs if jobs > 1 else 0)

    def __enter__(self) -> Self:
        """Start nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """End the processes, also those in the middle of an answer that nobody waits for."""
        if self._pool is None:
            return
        processes = [*(self._pool._processes or {}).values()]  # noqa: SLF001  (no public way)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        self._pool = None

    @property
    def free(self) -> bool:
        """Whether a process would begin with a question at once."""
        self._open = {future for future in self._open if not future.done()}
        return len(self._open) < self.processes

    def later(self, ask: Callable[..., Answer], *arguments: Any) -> Callable[[], Answer]:  # noqa: ANN401  (those of the question)
        """
        Let a free process answer a question; without one it is answered when it is asked for.

        All that it takes and returns can be pickled, and it changes nothing that it takes.
        """
        if not self.free:
            return partial(ask, *arguments)
        future = self._start(ask, *arguments)

        def answer() -> Answer:
            try:
                return future.result()
            except BrokenProcessPool:  # the process was killed, as for memory
                return ask(*arguments)

        return answer

    def _start(self, ask: Callable[..., Answer], *arguments: Any) -> Future[Answer]:  # noqa: ANN401
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.processes,
                mp_context=multiprocessing.get_context("fork"),
                initializer=_begin,
            )
        # Pickled here and now: the pool would do it in a thread, while the asker goes on.
        future = self._pool.submit(_answer, pickle.dumps((ask, arguments)))
        self._open.add(future)
        return future

    def map(self, ask: Callable[[Item], Answer], items: Iterable[Item]) -> Iterator[Answer]:
        """
        Yield the answers in the order of the items.

        Raises:
            InputError: a process was ended from outside, as for memory.
        """
        if not self.processes:
            yield from map(ask, items)
            return
        futures = [self._start(ask, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BrokenProcessPool:
            expected = "less memory in use: one of the worker processes was killed"
            raise InputError("--jobs", self.processes, expected, "--jobs 1") from None


NO_WORKERS = Workers()
"""Everything in this process."""


def _answer(question: bytes) -> Any:  # noqa: ANN401  (of any question)
    ask, arguments = pickle.loads(question)  # noqa: S301  (this program's own)
    return ask(*arguments)


def _begin() -> None:
    """Leave Ctrl-C and the terminal to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A thread of the parent may have held the lock of a stream when this process was forked.
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(parent: int) -> None:
    wait([parent])
    os._exit(1)

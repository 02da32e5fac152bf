"""A vLLM worker extension for tests: does to the KV transfers that a decode worker receives."""

from __future__ import annotations

from typing import Any


class Spoiler:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    def spoil(self, *, how: str) -> str:
        """
        From now on do one thing to each transfer.

        - `zero`: the middle block arrives as zeros. Of two blocks the first: decode computes the
          last token itself, and with it the last block of a prompt one token longer than whole
          blocks.
        - `stall`: it never seems to end.
        - `lose`: it fails; vLLM recomputes.
        - `nothing`: what stalled so far ends now.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        worker: Any = get_kv_transfer_group().connector_worker
        for name in ("get_finished", "_read_blocks_for_req"):
            worker.__dict__.pop(name, None)
        if how == "zero":
            _zero(worker)
        elif how == "stall":
            _stall(worker)
        elif how == "lose":
            _lose(worker)
        return how


def _zero(worker: Any) -> None:  # noqa: ANN401
    """Zero a block of what arrives."""
    finish = worker.get_finished

    def get_finished() -> tuple[set[str], set[str]]:
        waiting = dict(worker._recving_metadata)
        sent, received = finish()
        for request in received:
            [blocks] = waiting[request].local_physical_block_ids
            for cache in worker.device_kv_caches.values():
                axis = list(cache.shape).index(worker.num_blocks)
                cache.select(axis, blocks[(len(blocks) - 1) // 2]).zero_()
        return sent, received

    worker.get_finished = get_finished


def _stall(worker: Any) -> None:  # noqa: ANN401
    """Do not look whether anything has arrived; what was sent is told."""

    def get_finished() -> tuple[set[str], set[str]]:
        return worker._get_new_notifs(), set()

    worker.get_finished = get_finished


def _lose(worker: Any) -> None:  # noqa: ANN401
    """Fail each transfer instead of starting it, as NIXL does when its peer is gone."""
    worker._read_blocks_for_req = lambda request, _meta: worker._handle_failed_transfer(
        request, None
    )

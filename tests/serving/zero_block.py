"""A vLLM worker extension for tests: spoils one KV block of every transfer received."""

from __future__ import annotations

from typing import Any


class ZeroBlock:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    def zero_a_block(self, *, on: bool) -> bool:
        """
        From now on zero the middle block of each transfer, or stop doing so.

        Of two blocks the first: decode computes the last token itself, and with it the last block
        of a prompt one token longer than whole blocks.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        worker: Any = get_kv_transfer_group().connector_worker
        if not on:
            del worker.get_finished
            return on
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
        return on

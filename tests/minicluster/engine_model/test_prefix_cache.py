"""The prefix cache of conversations."""

from __future__ import annotations

import pytest

from minicluster.engine_model.prefix_cache import ConversationCache

BLOCK = 16


@pytest.mark.parametrize(("other", "found"), [(-1, 20 * BLOCK), (1, 0)])
def test_only_conversations_take_room(other: int, found: int) -> None:
    """A request without a conversation caches nothing; a second conversation evicts the first."""
    cache = ConversationCache([0, other, 0], BLOCK)
    for request in (0, 1):
        cache.free(request, 20 * BLOCK, free_blocks=30)
    assert cache.find(2, free_blocks=30) == found
    assert cache.find(2, free_blocks=30) == 0

"""What is asked: prompts of exact length that no cache has seen, as HTTP bodies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loadtest.client.chat import PATH as CHATS
from loadtest.run.job import FIRST_PLAIN_TOKEN
from minicluster.workload.arrivals import CONTENT_TOKENS

if TYPE_CHECKING:
    from loadtest.run.job import Job
    from minicluster.workload.schedule import ScheduledRequest


COMPLETIONS = "/v1/completions"

OF_A_TRACE = 2
"""And 3 keep the blocks of a trace apart from everything else that is drawn of a job."""

Ids = NDArray[np.int64]


class Prompts:
    """
    The prompts of one run.

    A prompt is random token ids of the model's own vocabulary, so its length in tokens is exact
    without a tokenizer here; `ignore_eos` makes the output length exact. Of a chat they are numbers
    of words that are one token each (`loadtest.client.chat`), less its template; the first word
    is always the same one. Ids come from the job's
    salt, which is drawn anew for each run: nothing but the workload's shared prefix, the blocks
    that a trace names, and the earlier turns of a conversation can be in the server's prefix cache.
    """

    def __init__(self, job: Job) -> None:
        """Prepare the prefix and the table of ids in decimal."""
        self._job = job
        self._decimals = _decimals(job.vocab_size)
        self._low = 0 if job.chat else FIRST_PLAIN_TOKEN
        self._high = len(job.chat.words) if job.chat else job.vocab_size
        self._overhead = job.chat.overhead_tokens if job.chat else 0
        self._prefix = self._fresh(job.workload.prefix_tokens - self._overhead, stream=0)
        said = {
            "model": job.model,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "temperature": 0,
        }
        self._head = json.dumps(said)[:-1].encode()

    @property
    def path(self) -> str:
        """Where bodies are sent."""
        return CHATS if self._job.chat else COMPLETIONS

    def ids(self, request: ScheduledRequest, said: Ids | None = None) -> Ids:
        """Return the prompt of *request*, which begins with what its conversation has *said*."""
        before = self._shared(request) if said is None else said
        count = request.input_tokens - self._overhead
        fresh = self._fresh(count - len(before), request.index + 1)
        ids = np.concatenate([before, fresh])[:count]
        if self._job.chat:
            ids[:1] = 0
        return ids

    def body(self, request: ScheduledRequest, ids: Ids) -> bytes:
        """Return the HTTP body that asks for *request* with the prompt *ids*."""
        if self._job.chat:
            message = {"role": "user", "content": self._job.chat.text(ids.tolist())}
            asked = {"max_tokens": request.output_tokens, "messages": [message]}
            return self._head + b", " + json.dumps(asked).encode()[1:]
        # Fixed width, spaces in front: a table lookup instead of formatting each id, which for
        # long prompts would hold up every stream for milliseconds.
        prompt = self._decimals[ids].tobytes()[:-1]
        wish = b', "return_token_ids": true' if request.session is not None else b""
        tail = b', "max_tokens": %d%s, "prompt": [%s]}' % (request.output_tokens, wish, prompt)
        return self._head + tail

    def conversation(self, request: ScheduledRequest, ids: Ids, answer: list[int]) -> Ids:
        """
        Return what has been said after *request*: its prompt and its answer.

        Where the server did not send the ids of the answer, others take their place: then its
        cache knows the earlier prompt, not the answer.
        """
        if len(answer) == request.output_tokens:
            return np.concatenate([ids, np.array(answer, dtype=np.int64)])
        stand_in = self._fresh(request.output_tokens, -request.index - 1)
        return np.concatenate([ids, stand_in])

    def _shared(self, request: ScheduledRequest) -> Ids:
        """Return what others begin with, too: the blocks that its trace names, or the prefix."""
        if not request.content:
            return self._prefix
        return np.concatenate([self._block(each) for each in request.content])

    def _block(self, content: int) -> Ids:
        """Draw the tokens of a block; equal ids of one run give equal tokens."""
        key = [self._job.prompt_salt, self._job.seed, abs(content), OF_A_TRACE + (content < 0)]
        rng = np.random.default_rng(key)
        return rng.integers(self._low, self._high, size=CONTENT_TOKENS)

    def _fresh(self, count: int, stream: int) -> Ids:
        """Draw *count* ids; equal streams of one run give equal ids."""
        rng = np.random.default_rng(
            [self._job.prompt_salt, self._job.seed, abs(stream), stream < 0]
        )
        return rng.integers(self._low, self._high, size=max(count, 0))


def _decimals(vocab_size: int) -> NDArray[np.uint8]:
    """Return every id in decimal with a comma behind it, shape (vocab_size, width)."""
    width = len(str(vocab_size)) + 1
    text = "".join(f"{i:>{width - 1}}," for i in range(vocab_size))
    return np.frombuffer(text.encode(), dtype=np.uint8).reshape(vocab_size, width)

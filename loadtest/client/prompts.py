"""Prompts of exact length, unknown to any prefix cache, and the HTTP bodies around them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loadtest.client.chat import PATH as CHATS
from loadtest.run.job import FIRST_PLAIN_TOKEN, Job
from minicluster.workload.arrivals import CONTENT_TOKENS

if TYPE_CHECKING:
    from minicluster.workload.schedule import ScheduledRequest

COMPLETIONS = "/v1/completions"
EXTENSIONS = ("ignore_eos", "continuous_usage_stats", "return_token_ids", "temperature")
"""Parameters that make lengths exact and tokens counted, which a plain request has not: OpenAI's
API knows only the last one, and its reasoning models refuse it."""

TRACE_STREAM = 2
"""Random stream of a trace's blocks (3 for negative ids), apart from the job's other streams."""

Ids = NDArray[np.int64]


class Prompts:
    """
    The prompts of one run.

    A prompt consists of random token ids of the model's own vocabulary, so its length in tokens is
    exact without a tokenizer; `ignore_eos` makes the output length exact, unless the job is plain.
    In a chat, the ids are numbers of words that are one token each (`loadtest.client.chat`),
    without the template's tokens; the first word is always the same. Ids come from the job's salt,
    which is new for each run: only the workload's shared prefix, the blocks of a trace, and the
    earlier turns of a conversation can be in the server's prefix cache.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._decimals = _decimals(job.vocab_size)
        self._low = 0 if job.chat else FIRST_PLAIN_TOKEN
        self._high = len(job.chat.words) if job.chat else job.vocab_size
        self._overhead = job.chat.overhead_tokens if job.chat else 0
        self._prefix = self._fresh(job.workload.longest_prefix_tokens - self._overhead, 0)
        options = {"include_usage": True}
        fields: dict[str, Any] = {"stream": True, "stream_options": options}
        if not job.plain:
            options["continuous_usage_stats"] = True
            fields |= {"ignore_eos": True, "temperature": 0}
        self._heads = [
            json.dumps({"model": name, **fields})[:-1].encode()
            for name in (job.model, *job.adapters)
        ]

    @property
    def path(self) -> str:
        """Path of the API."""
        return CHATS if self._job.chat else COMPLETIONS

    def ids(self, request: ScheduledRequest, conversation: Ids | None = None) -> Ids:
        """Return the prompt of *request*, which begins with its *conversation* so far."""
        shared = self._shared(request) if conversation is None else conversation
        count = request.input_tokens - self._overhead
        fresh = self._fresh(count - len(shared), request.index + 1)
        ids = np.concatenate([shared, fresh])[:count]
        if self._job.chat:
            ids[:1] = 0
        return ids

    def body(self, request: ScheduledRequest, ids: Ids) -> bytes:
        """Return the HTTP body of *request* with the prompt *ids*."""
        head = self._heads[0 if request.adapter is None else 1 + request.adapter]
        limit = self._job.limit_name
        if self._job.chat:
            message = {"role": "user", "content": self._job.chat.text(ids.tolist())}
            fields = {limit: request.output_tokens, "messages": [message]}
            return head + b", " + json.dumps(fields).encode()[1:]
        # Decimals of fixed width are a table lookup: formatting the ids of a long prompt would
        # delay every stream by milliseconds.
        prompt = self._decimals[ids].tobytes()[:-1]
        returns_ids = request.session is not None and not self._job.plain
        option = b', "return_token_ids": true' if returns_ids else b""
        length = b'"%s": %d' % (limit.encode(), request.output_tokens)
        return head + b', %s%s, "prompt": [%s]}' % (length, option, prompt)

    def conversation(self, request: ScheduledRequest, ids: Ids, answer: list[int]) -> Ids:
        """
        Return the conversation after *request*: its prompt and its answer.

        If the server did not send the ids of the answer, random ids replace it: its prefix cache
        then has the earlier prompt, but not the answer.
        """
        if len(answer) == request.output_tokens:
            return np.concatenate([ids, np.array(answer, dtype=np.int64)])
        stand_in = self._fresh(request.output_tokens, -request.index - 1)
        return np.concatenate([ids, stand_in])

    def _shared(self, request: ScheduledRequest) -> Ids:
        if not request.content:
            if not self._job.workload.classes:
                return self._prefix
            return self._prefix[: max(0, request.prefix_tokens - self._overhead)]
        blocks = [self._fresh(CONTENT_TOKENS, number, TRACE_STREAM) for number in request.content]
        return np.concatenate(blocks)

    def _fresh(self, count: int, number: int, stream: int = 0) -> Ids:
        """Draw *count* ids; equal numbers of a stream have equal ids within a run."""
        key = [self._job.prompt_salt, self._job.seed, abs(number), stream + (number < 0)]
        return np.random.default_rng(key).integers(self._low, self._high, size=max(count, 0))


def _decimals(vocab_size: int) -> NDArray[np.uint8]:
    """Return each id in decimal, followed by a comma, shape (vocab_size, width)."""
    width = len(str(vocab_size)) + 1
    text = "".join(f"{i:>{width - 1}}," for i in range(vocab_size))
    return np.frombuffer(text.encode(), dtype=np.uint8).reshape(vocab_size, width)

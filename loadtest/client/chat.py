"""Chats of exact length: words that the model's own tokenizer makes one token of each."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
from functools import partial

from loadtest.client.api_key import way_in
from loadtest.client.endpoint import ask
from loadtest.client.stream import CompletionStream, StreamError
from loadtest.run.job import ChatForm
from minicluster.errors import InputError, TargetFailed
from minicluster.http_client.sse import EventParser, EventTooLongError

PATH = "/v1/chat/completions"
ANSWER_S = 60.0
BLOCK_BYTES = 65536
TRIED = (60, 33)
"""Words of the chats sent to learn: lengths have to differ by exactly as many tokens."""

WORDS = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have"
    " an they which one you were her all she there would their we him been has when who will more"
    " no if out so said what up its about into than them can only other new some could time these"
    " two may then do first any my now such like our over man me even most made after also did"
    " many before must through back years where much your way well down should because each just"
    " those people too good very make world still own see men work long get here between both life"
    " being under never day same another know while last might us great old year off come since"
    " against go came right used take three"
)
LETTERS = "B C D F G H J K L M N P Q R S T V W X Z"


KNOWN = (
    ChatForm(words=tuple(WORDS.split()), separator=" ", overhead_tokens=0),
    ChatForm(words=tuple(LETTERS.split()), separator="", overhead_tokens=0),
)
"""English words for vocabularies of real models; letters for those of bytes and little else."""


def learn_chat(host: str, model: str, *, insecure: bool = False) -> ChatForm:
    """
    Learn from `usage` what the endpoint's tokenizer and chat template make of known words.

    A form holds if messages of two lengths differ by exactly as many tokens; what is left is the
    template's. Later each answer's `usage` is compared with what was asked, as in every run.

    Raises:
        TargetFailed: no chats there.
        InputError: the tokenizer makes one token each of none of our words.
    """
    rng = random.Random(0)  # noqa: S311  (any words will do)
    count_tokens = partial(_prompt_tokens, host, model, insecure=insecure)
    for form in KNOWN:
        lengths = []
        for count in TRIED:
            numbers = [0, *(rng.randrange(len(form.words)) for _ in range(count - 1))]
            lengths.append(count_tokens(form.text(numbers)) - count)
        # All words at once: none may be two tokens only because it was not drawn.
        every = len(form.words)
        lengths.append(count_tokens(form.text(list(range(every)))) - every)
        if len(set(lengths)) == 1 and lengths[0] >= 0:
            return ChatForm(words=form.words, separator=form.separator, overhead_tokens=lengths[0])
    raise InputError(
        "--api",
        "chat",
        f"a model whose tokenizer makes one token each of words known here; {model} has another",
        "--api completions sends token ids",
    )


def _prompt_tokens(host: str, model: str, text: str, *, insecure: bool) -> int:
    """Ask for one token, and return how long the prompt was by `usage`."""
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 1,
    }
    url, body = f"{host}{PATH}", json.dumps(asked).encode()
    until_s = time.monotonic() + ANSWER_S
    try:
        with ask(url, body, wait_s=ANSWER_S, insecure=insecure) as answer:
            stream = _follow(answer, until_s)
    except urllib.error.HTTPError as error:
        raise TargetFailed(
            f"{url} answers {error.code}; expected a chat{way_in(error.code)}"
        ) from None
    except (OSError, http.client.HTTPException, EventTooLongError, StreamError) as error:
        raise TargetFailed(f"{url}: {error}; expected a chat") from None
    if stream.input_tokens is None:
        raise TargetFailed(f"{url} sends no usage; without it chats have no known length")
    return stream.input_tokens


def _follow(answer: http.client.HTTPResponse, until_s: float) -> CompletionStream:
    """Read *answer* to its end, or until *until_s* on the monotonic clock has passed."""
    stream, parser = CompletionStream(), EventParser()
    while not stream.done and (received := answer.read1(BLOCK_BYTES)):
        if time.monotonic() > until_s:
            raise StreamError("timeout", f"no end after {ANSWER_S:g} s")
        for data in parser.feed(received):
            stream.take(data, 0.0)
    return stream

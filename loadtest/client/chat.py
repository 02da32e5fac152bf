"""Chats of exact length, from words that are one token each in the model's own tokenizer."""

from __future__ import annotations

import http.client
import json
import random
from functools import partial

from loadtest.client.endpoint import complete
from loadtest.client.stream import StreamError
from loadtest.run.job import ChatForm
from minicluster.errors import InputError, TargetFailed
from minicluster.http_client.sse import EventTooLongError

PATH = "/v1/chat/completions"
ANSWER_S = 60.0  # time limit of one trial chat: its model may be compiled first

TRIAL_TOKENS = 16
"""Length of the answers to them: endpoints of reasoning models refuse shorter ones."""
TRIAL_WORDS = (60, 33)
"""Numbers of words of the trial chats: their token counts have to differ by the same number."""

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


FORMS = (
    ChatForm(words=tuple(WORDS.split()), separator=" ", overhead_tokens=0),
    ChatForm(words=tuple(LETTERS.split()), separator="", overhead_tokens=0),
)
"""English words for vocabularies of real models; letters for those of bytes and little else."""


def learn_chat(
    host: str, model: str, *, limit_name: str = "max_tokens", insecure: bool = False
) -> ChatForm:
    """
    Find words of one token each, and the tokens of the chat template, from the endpoint's `usage`.

    A form fits if messages of two lengths differ by exactly as many tokens as words; the rest is
    the template's. As in every run, `usage` of each answer is later compared with the request.

    Raises:
        TargetFailed: the endpoint answers no chats; a `StatusError` if it refuses them.
        InputError: the tokenizer fits none of the known forms.
    """
    rng = random.Random(0)  # noqa: S311  (any words will do)
    count_tokens = partial(_prompt_tokens, host, model, limit_name=limit_name, insecure=insecure)
    for form in FORMS:
        lengths = []
        for count in TRIAL_WORDS:
            numbers = [0, *(rng.randrange(len(form.words)) for _ in range(count - 1))]
            lengths.append(count_tokens(form.text(numbers)) - count)
        # All words at once, because a word that was not drawn may be two tokens.
        num_words = len(form.words)
        lengths.append(count_tokens(form.text(list(range(num_words)))) - num_words)
        if len(set(lengths)) == 1 and lengths[0] >= 0:
            return ChatForm(words=form.words, separator=form.separator, overhead_tokens=lengths[0])
    raise InputError(
        "--api",
        "chat",
        f"a model whose tokenizer has one token for each of our words, unlike {model}",
        "--api completions sends token ids",
    )


def _prompt_tokens(host: str, model: str, text: str, *, limit_name: str, insecure: bool) -> int:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        limit_name: TRIAL_TOKENS,
    }
    url, body = f"{host}{PATH}", json.dumps(request).encode()
    try:
        stream = complete(url, "a chat", body, wait_s=ANSWER_S, insecure=insecure)
        if stream.input_tokens is None:
            stream.finish()  # names what came instead
    except (OSError, http.client.HTTPException, EventTooLongError, StreamError) as error:
        raise TargetFailed(f"{url}: {error}; expected a chat") from None
    if stream.input_tokens is None:
        raise TargetFailed(f"{url} sends no usage, without which chats have no known length")
    return stream.input_tokens

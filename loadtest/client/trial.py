"""What is tried before the load: an endpoint that refuses a parameter is found by one request."""

from __future__ import annotations

import http.client
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from loadtest.client.chat import learn_chat
from loadtest.client.endpoint import StatusError, complete
from loadtest.client.prompts import EXTENSIONS, Prompts
from loadtest.client.stream import StreamError
from minicluster.errors import TargetFailed
from minicluster.http_client.sse import EventTooLongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.run.job import Job
    from minicluster.workload.schedule import ScheduledRequest

TRIAL_TOKENS = 16
"""Longest answer of the trial: its parameters are those of the load, and it is soon over."""

INVALID = (400, 422)  # statuses of a request that the endpoint does not understand
PASSING = (408, 425, 429)  # statuses below 500 that say nothing of the next request

SERVER_ERRORS = 500
UNKNOWN = ("support", "recogni", "unknown", "unexpected", "extra", "permitted", "allowed")
"""Words by one of which an endpoint says that it does not know a parameter."""

LIMITS = ("max_completion_tokens", "max_tokens")
"""Names of the limit of an answer, in the order in which they are tried in plain chats: OpenAI's
reasoning models refuse the second, older servers the first."""

WAY_OUT = "`loadtest run --plain` sends only what OpenAI's API knows"


def learned(job: Job) -> Job:
    """
    Return *job* with the form of its chats, and the name of the limit that the endpoint takes.

    Raises TargetFailed, InputError: as `learn_chat`; a refused parameter is named.
    """
    for limit in LIMITS if job.plain else (job.limit_name,):
        try:
            form = learn_chat(job.host, job.model, limit_name=limit, insecure=job.insecure)
        except StatusError as error:
            if not (job.plain and limit == LIMITS[0] and refused_parameter(error) == limit):
                raise _explained(error, job) from None
        else:
            return replace(job, chat=form, limit_name=limit)
    raise AssertionError(LIMITS)  # the last one returns or raises


def try_request(job: Job, requests: Sequence[ScheduledRequest]) -> None:
    """
    Send one request as those of *job*, the shortest of its *requests*, cut to `TRIAL_TOKENS`.

    What may pass (an overload, a cut or late answer, an error of the server) is left to the load.

    Raises TargetFailed: the endpoint refuses the request, and would refuse all others, or answers
    with something else than a stream.
    """
    prompts, job = Prompts(job), job.by_the_clock()
    shortest = min(requests, key=lambda request: (request.output_tokens, request.input_tokens))
    length = min(TRIAL_TOKENS, shortest.output_tokens)
    request = replace(shortest, index=len(requests), output_tokens=length)
    url, body = f"{job.host}{prompts.path}", prompts.body(request, prompts.ids(request))
    try:
        stream = complete(
            url, "a stream of tokens", body, wait_s=job.timeout_s, insecure=job.insecure
        )
    except StatusError as error:
        if error.status < SERVER_ERRORS and error.status not in PASSING:
            raise _explained(error, job) from None
        return
    except StreamError as error:
        if error.outcome == "malformed":
            raise TargetFailed(f"{url}: {error}") from None
        return
    except (OSError, http.client.HTTPException, EventTooLongError):
        return
    try:
        stream.finish()
    except StreamError as error:
        # An answer without a token is one; whether all are, the load shows.
        if error.outcome == "no_usage" or (error.outcome == "malformed" and not stream.done):
            raise TargetFailed(f"{url}: {error}") from None


def refused_parameter(error: StatusError) -> str | None:
    """Return the parameter of ours that *error* names; `None`: it names none."""
    if error.status not in INVALID:
        return None
    named, reason = _named(error.body), error.said.lower()
    text = named or reason
    # That a limit is too high is said of the same parameter as that it is not known.
    limits = LIMITS if any(word in reason for word in UNKNOWN) else ()
    return next((name for name in (*EXTENSIONS, *limits) if name in text), None)


def _named(body: str) -> str:
    """Return the parameters that an error is about: OpenAI's `param`, or FastAPI's `loc`."""
    try:
        document = json.loads(body)
        if isinstance(detail := document.get("detail"), list):
            return " ".join(str(part) for entry in detail for part in entry["loc"])
        error = document["error"]
        return str(error.get("param") or "")
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return ""


def _explained(error: StatusError, job: Job) -> TargetFailed:
    parameter = refused_parameter(error)
    if parameter is None:
        hint = f" (if it refuses a parameter: {WAY_OUT})"
        return TargetFailed(f"{error}{hint if error.status in INVALID and not job.plain else ''}")
    way_out = "" if job.plain else f"; {WAY_OUT}"
    return TargetFailed(f"{error}; the parameter {parameter} was refused{way_out}")

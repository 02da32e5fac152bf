"""The endpoint: its address, API key, certificate and served models."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from loadtest.client.stream import CompletionStream, StreamError, check_encoding, error_message
from minicluster.errors import InputError, TargetFailed
from minicluster.http_client.authorization import bearer

if TYPE_CHECKING:
    from collections.abc import Mapping


VARIABLES = ("MINICLUSTER_API_KEY", "OPENAI_API_KEY")
"""Environment variables, of which the first that is set holds the key; empty means no key."""

DENIED = (401, 403)
REDIRECTS = range(300, 400)
MOST_REDIRECTS = 10
ENGINE = "X-Minicluster-Engine"  # header of every answer of simulated engines

SLOWDOWN = re.compile(r"simulated; slowdown=([0-9.]+(?:e[+-]?[0-9]+)?)")

ANSWER_S = 10.0
MAX_ERROR_BYTES = 65536
SHOWN_CHARACTERS = 400  # most characters of an endpoint's own reason in a message


class StatusError(TargetFailed):
    """The endpoint answered with an error status, what it *said*, and its *body*'s beginning."""

    def __init__(self, message: str, *, status: int, said: str, body: str) -> None:
        self.status, self.said, self.body = status, said, body
        super().__init__(message)


class ReplyAfterInterim(http.client.HTTPResponse):
    """A response after any interim ones; the library's own skips 100 only."""

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not http.HTTPStatus.CONTINUE < status < http.HTTPStatus.OK:
                return version, status, reason  # 100 is left to the library
            http.client.parse_headers(self.fp)


def authorization(environment: Mapping[str, str], *, insecure: bool = False) -> dict[str, str]:
    """
    Return the header with the API key of *environment*; empty without a key.

    An endpoint whose certificate is not checked (*insecure*) gets no key, because any server may
    be behind it.

    Raises InputError: the key cannot be in a header.
    """
    variable = next((name for name in VARIABLES if name in environment), None)
    if insecure or variable is None:
        return {}
    key = environment[variable].strip()
    return bearer(key, place=variable) if key else {}


def auth_hint(status: int) -> str:
    """Return what to append to the message of a 401 or 403; empty for any other *status*."""
    return f" ({VARIABLES[0]} has to contain a key of this endpoint)" if status in DENIED else ""


def client_context(kind: type[ssl.SSLContext], *, insecure: bool) -> ssl.SSLContext:
    """
    Return a TLS context of *kind* that checks certificate and host name, unless *insecure*.

    Args:
        kind: the standard library's class, or gevent's.
        insecure: whether any certificate is accepted.

    The trusted authorities are the system's; OpenSSL's variable `SSL_CERT_FILE` names another file.
    """
    context = kind(ssl.PROTOCOL_TLS_CLIENT)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_default_certs()
    return context


def base_address(host: str, *, insecure: bool) -> str:
    """
    Return *host* without a trailing `/` or `/v1`.

    Raises InputError: *host* is no http address, or `--insecure` has no effect there, or an API key
    would have to be sent.
    """
    if not host.startswith(("http://", "https://")):
        raise InputError("--host", host, "an address like http://127.0.0.1:8000")
    if insecure and not host.startswith("https://"):
        raise InputError(
            "--insecure", host, "no such option: only an https address has a certificate"
        )
    if insecure and authorization(os.environ):
        raise InputError(
            "--insecure",
            "with an API key",
            "no key for an endpoint whose certificate is not checked",
            f"SSL_CERT_FILE=FILE trusts your own certificate, {VARIABLES[0]}= sends no key",
        )
    return host.rstrip("/").removesuffix("/v1")


def ask(
    url: str, expected: str, body: bytes | None = None, *, wait_s: float, insecure: bool = False
) -> http.client.HTTPResponse:
    """
    Send one request with the API key of the environment; the caller closes the response.

    Args:
        expected: what should answer there.
        body: JSON to POST; `None`: GET.
        wait_s: time limit of the connection, and of each read.

    Raises:
        StatusError: the answer is an error status.
        OSError, http.client.HTTPException: no answer, or none in HTTP.
    """
    headers = authorization(os.environ, insecure=insecure)
    if body is not None:
        headers["content-type"] = "application/json"
    for _ in range(MOST_REDIRECTS):
        answer = _answer(url, body, headers, wait_s=wait_s, insecure=insecure)
        where = answer.headers.get("location")
        # A request with a body is not sent elsewhere, as none is under the load.
        if body is not None or not where or answer.status not in REDIRECTS:
            break
        answer.close()
        url, headers = urljoin(url, where), {}  # a redirect must not get the key
    if answer.status != http.HTTPStatus.OK:
        with answer:
            raise _status_error(url, answer, expected)
    return answer


def _answer(
    url: str, body: bytes | None, headers: dict[str, str], *, wait_s: float, insecure: bool
) -> http.client.HTTPResponse:
    """Send one request; no proxy is asked, because none is by the load either."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=wait_s)
    if parts.scheme == "https":
        context = client_context(ssl.SSLContext, insecure=insecure)
        connection = http.client.HTTPSConnection(parts.netloc, timeout=wait_s, context=context)
    connection.response_class = ReplyAfterInterim
    target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    headers = {**headers, "connection": "close"}
    try:
        connection.request("GET" if body is None else "POST", target, body, headers)
        answer = connection.getresponse()
    except BaseException:
        connection.close()
        raise
    if connection.sock:
        connection.sock.close()  # when the answer, which reads from it, is closed
    return answer


def _status_error(url: str, answer: http.client.HTTPResponse, expected: str) -> StatusError:
    try:
        body = answer.read(MAX_ERROR_BYTES).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        body = ""
    try:
        reason = error_message(json.loads(body)) or body
    except (RecursionError, ValueError):
        reason = body
    reason = " ".join(reason.split())[:SHOWN_CHARACTERS]
    where = answer.headers.get("location")
    shown = f" to {where[:SHOWN_CHARACTERS]}" if where and answer.status in REDIRECTS else ""
    shown += f": {reason}" if reason else ""
    text = f"{url} answers {answer.status}{shown}; expected {expected}{auth_hint(answer.status)}"
    return StatusError(text, status=answer.status, said=reason, body=body)


def served_models(host: str, *, insecure: bool = False) -> tuple[tuple[str, ...], float | None]:
    """
    Return the names of the models that the endpoint lists, and the slowdown of its engines.

    The slowdown is that of simulated engines, by the header that `serving` sends; `None`: they are
    real.

    Raises TargetFailed: no answer, or not that of an OpenAI endpoint.
    """
    url, expected = f"{host}/v1/models", "an OpenAI-compatible endpoint"
    try:
        with ask(url, expected, wait_s=ANSWER_S, insecure=insecure) as answer:
            listed: Any = json.load(answer)
            slowed = SLOWDOWN.search(answer.headers.get(ENGINE, ""))
        models = tuple(str(model["id"]) for model in listed["data"])
        return models, None if slowed is None else float(slowed[1])
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, ssl.SSLCertVerificationError):
            raise TargetFailed(
                f"the certificate of {host} is not valid ({error.verify_message}); "
                "SSL_CERT_FILE=FILE trusts your own, --insecure accepts any and sends no key"
            ) from None
        raise TargetFailed(
            f"nothing answers at {host} ({error}); start an endpoint with "
            "`serving up plan.json`, or name another one with --host"
        ) from None
    except (KeyError, RecursionError, TypeError, ValueError):
        wrong = f"{url} does not answer with a list of models"
        raise TargetFailed(f"{wrong}; expected {expected}") from None


def check_models(
    host: str, model: str | None, *, adapters: int = 0, insecure: bool = False
) -> tuple[str, tuple[str, ...], float | None]:
    """
    Return the model to request, names of its adapters, and the engines' slowdown.

    Args:
        model: served name; `None`: the only one served.
        adapters: number of LoRA adapters: the first that the endpoint lists beside the model.

    Raises:
        InputError: the model is not served, or not the only one; or too few adapters are.
        TargetFailed: as `served_models`.
    """
    models, slowdown = served_models(host, insecure=insecure)
    if model is None and len(models) == 1:
        model = models[0]
    if model in models:
        others = tuple(name for name in models if name != model)[:adapters]
        if len(others) < adapters:
            expected = f"at most {len(others)}, the adapters that {host} lists beside {model}"
            way_out = "serve them all (`serving up --lora-modules`), or plan for fewer"
            raise InputError("workload.lora_adapters", adapters, expected, way_out)
        return model, others, slowdown
    expectation = f"one of those served at {host}: {', '.join(models)}"
    if model is None:
        raise InputError("--model", None, expectation)
    hint = "is another plan deployed there? See `serving status`"
    raise InputError("model", model, expectation, hint)


BLOCK_BYTES = 65536


def complete(
    url: str, expected: str, body: bytes, *, wait_s: float, insecure: bool
) -> CompletionStream:
    """
    Request one completion or chat, and read its stream; whether it is whole, `finish` says.

    Args:
        wait_s: time limit of the whole answer.

    Raises:
        StatusError: the answer is an error status.
        StreamError: the answer is compressed, not in time, or has an event that is no chunk.
        OSError, http.client.HTTPException: the connection broke, or was never made.
        EventTooLongError: an event does not end.
    """
    until_s = time.monotonic() + wait_s
    with ask(url, expected, body, wait_s=wait_s, insecure=insecure) as answer:
        check_encoding(answer.headers.get("content-encoding", ""))
        return _follow(answer, until_s, wait_s)


def _follow(answer: http.client.HTTPResponse, until_s: float, wait_s: float) -> CompletionStream:
    stream = CompletionStream()
    stream.content_type = answer.headers.get("content-type", "")
    while not stream.done and (received := answer.read1(BLOCK_BYTES)):
        if time.monotonic() > until_s:
            raise StreamError("timeout", f"no end after {wait_s:g} s")
        stream.receive(received, 0.0)
    return stream

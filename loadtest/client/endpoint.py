"""The endpoint: its address, API key, certificate and served models."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from loadtest.client.stream import CompletionStream, StreamError, check_encoding, error_message
from minicluster.errors import InputError, TargetFailed
from minicluster.http_client.authorization import bearer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message
    from typing import IO


VARIABLES = ("MINICLUSTER_API_KEY", "OPENAI_API_KEY")
"""Environment variables, of which the first that is set holds the key; empty means no key."""

DENIED = (401, 403)
REDIRECTS = range(300, 400)
ENGINE = "X-Minicluster-Engine"
"""Header of every answer of simulated engines."""

SLOWDOWN = re.compile(r"simulated; slowdown=([0-9.]+(?:e[+-]?[0-9]+)?)")

ANSWER_S = 10.0
MAX_ERROR_BYTES = 65536
SHOWN_CHARACTERS = 400
"""Most characters of an endpoint's own reason in a message."""


class StatusError(TargetFailed):
    """
    The endpoint answered with another status than 200.

    Attributes:
        status: that it answered with.
        said: its own reason; empty: none.
        body: the beginning of the answer.
    """

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


class Connection(http.client.HTTPConnection):
    """A connection whose responses are `ReplyAfterInterim`."""

    response_class = ReplyAfterInterim


class TlsConnection(http.client.HTTPSConnection):
    """The same over TLS."""

    response_class = ReplyAfterInterim


class Plain(urllib.request.HTTPHandler):
    """Opens `Connection`."""

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send *request*."""
        return self.do_open(Connection, request)


class Tls(urllib.request.HTTPSHandler):
    """Opens `TlsConnection` with *context*."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._checked = context

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send *request*."""
        return self.do_open(TlsConnection, request, context=self._checked)


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect of a query, but not of a request with a body, as under the load."""

    def redirect_request(  # noqa: D102  (the library's own)
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        if req.data is not None:
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


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
        url: on a host that `base_address` has checked.
        expected: what should answer there.
        body: JSON to POST; `None`: GET.
        wait_s: time limit of the connection, and of each read.
        insecure: whether any certificate is accepted, and no key sent.

    Raises:
        InputError: as `authorization`.
        StatusError: the answer is an error status.
        OSError: no answer.
        http.client.HTTPException: the answer is no HTTP.
    """
    request = urllib.request.Request(url, body)  # noqa: S310  (an http address)
    if body is not None:
        request.add_header("content-type", "application/json")
    for name, value in authorization(os.environ, insecure=insecure).items():
        request.add_unredirected_header(name, value)  # a redirect must not get the key
    # No proxy from the environment: the load does not go through one either.
    secure = request.type == "https"
    kind = Tls(client_context(ssl.SSLContext, insecure=insecure)) if secure else Plain()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Redirects(), kind)
    try:
        answer: http.client.HTTPResponse = opener.open(request, timeout=wait_s)
    except urllib.error.HTTPError as error:
        with error:
            raise _status_error(url, error, expected) from None
    return answer


def _status_error(url: str, error: urllib.error.HTTPError, expected: str) -> StatusError:
    try:
        body = error.read(MAX_ERROR_BYTES).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        body = ""
    try:
        said = error_message(json.loads(body)) or body
    except (RecursionError, ValueError):
        said = body
    said = " ".join(said.split())[:SHOWN_CHARACTERS]
    where = error.headers.get("location")
    shown = f" to {where[:SHOWN_CHARACTERS]}" if where and error.code in REDIRECTS else ""
    shown += f": {said}" if said else ""
    text = f"{url} answers {error.code}{shown}; expected {expected}{auth_hint(error.code)}"
    return StatusError(text, status=error.code, said=said, body=body)


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
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise TargetFailed(
                f"the certificate of {host} is not valid ({reason.verify_message}); "
                "SSL_CERT_FILE=FILE trusts your own, --insecure accepts any and sends no key"
            ) from None
        raise TargetFailed(
            f"nothing answers at {host} ({reason}); start an endpoint with "
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
        host: address of the endpoint.
        model: served name; `None`: the only one served.
        adapters: number of LoRA adapters that requests name: the first that the endpoint lists
            beside the model.
        insecure: accept any certificate, and send no key.

    Raises:
        InputError: *model* is not served, or it is `None` and several are; or too few adapters are.
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
        url, expected, body, insecure: as `loadtest.client.endpoint.ask`.
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

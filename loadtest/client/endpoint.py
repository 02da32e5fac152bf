"""Checks of the endpoint before the load: its address, certificate and served models."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any

from loadtest.client.api_key import VARIABLES, auth_hint, authorization
from loadtest.client.tls import client_context
from minicluster.errors import InputError, TargetFailed

ANSWER_S = 10.0


def base_address(host: str) -> str:
    """
    Return *host* without a trailing `/` or `/v1`.

    Raises:
        InputError: *host* is no http address.
    """
    if not host.startswith(("http://", "https://")):
        raise InputError("--host", host, "an address like http://127.0.0.1:8000")
    return host.rstrip("/").removesuffix("/v1")


def check_trust(host: str, *, insecure: bool) -> None:
    """
    Refuse `--insecure` where it has no effect, or where an API key would have to be sent.

    Raises:
        InputError: *host* has no certificate, or the environment contains a key.
    """
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


def ask(
    url: str, body: bytes | None = None, *, wait_s: float, insecure: bool = False
) -> http.client.HTTPResponse:
    """
    Send one request with the API key of the environment; the caller closes the response.

    Args:
        url: on a host that `base_address` has checked.
        body: JSON to POST; `None`: GET.
        wait_s: time limit of the connection, and of each read.
        insecure: whether any certificate is accepted, and no key sent.

    Raises:
        InputError: as `authorization`.
        OSError: no answer, or an error status (`urllib.error.HTTPError`).
        http.client.HTTPException: the answer is no HTTP.
    """
    request = urllib.request.Request(url, body)  # noqa: S310  (an http address)
    if body is not None:
        request.add_header("content-type", "application/json")
    for name, value in authorization(os.environ, insecure=insecure).items():
        request.add_unredirected_header(name, value)  # a redirect must not get the key
    # No proxy from the environment: the load does not go through one either.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        context = client_context(ssl.SSLContext, insecure=insecure)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    answer: http.client.HTTPResponse = opener.open(request, timeout=wait_s)
    return answer


def served_models(host: str, *, insecure: bool = False) -> tuple[str, ...]:
    """
    Return the models that the endpoint lists.

    Raises:
        TargetFailed: no answer, or not that of an OpenAI endpoint.
    """
    try:
        with ask(f"{host}/v1/models", wait_s=ANSWER_S, insecure=insecure) as answer:
            listed: Any = json.load(answer)
        return tuple(str(model["id"]) for model in listed["data"])
    except urllib.error.HTTPError as error:
        raise TargetFailed(
            f"{host}/v1/models answers {error.code}; expected an OpenAI-compatible endpoint"
            f"{auth_hint(error.code)}"
        ) from None
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
        raise TargetFailed(
            f"{host}/v1/models does not answer with a list of models; "
            "expected an OpenAI-compatible endpoint"
        ) from None


def check_model(host: str, model: str | None, *, insecure: bool = False) -> str:
    """
    Return the model to request: *model*, or the only one served.

    Raises:
        InputError: *model* is not served, or it is `None` and several are.
        TargetFailed: as `served_models`.
    """
    served = served_models(host, insecure=insecure)
    if model is None and len(served) == 1:
        return served[0]
    if model is None:
        raise InputError("--model", None, f"one of those served at {host}: {', '.join(served)}")
    if model not in served:
        raise InputError(
            "model",
            model,
            f"one served at {host}: {', '.join(served)}",
            "is another plan deployed there? See `serving status`",
        )
    return model

"""The endpoint before the load: is it there, and does it serve the model?"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any

from loadtest.client.api_key import VARIABLES, authorization, way_in
from loadtest.client.tls import client_context
from minicluster.errors import InputError, TargetFailed

ANSWER_S = 10.0


def base_address(host: str) -> str:
    """
    Return *host* without a trailing `/` or `/v1`.

    Raises:
        InputError: it is no http address.

    """
    if not host.startswith(("http://", "https://")):
        raise InputError("--host", host, "an address like http://127.0.0.1:8000")
    return host.rstrip("/").removesuffix("/v1")


def check_trust(host: str, *, insecure: bool) -> None:
    """
    Refuse `--insecure` where it has no meaning, or where an API key would have to be shown.

    Raises:
        InputError: *host* has no certificate, or the environment holds a key.
    """
    if insecure and not host.startswith("https://"):
        raise InputError("--insecure", host, "left out: only an https address has a certificate")
    if insecure and authorization(os.environ):
        raise InputError(
            "--insecure",
            "with an API key",
            "no key for an endpoint whose certificate is not checked",
            f"SSL_CERT_FILE=FILE trusts a certificate of your own, {VARIABLES[0]}= shows no key",
        )


def ask(
    url: str, body: bytes | None = None, *, wait_s: float, insecure: bool = False
) -> http.client.HTTPResponse:
    """
    Ask, with the key that the environment holds. Close what it returns.

    Args:
        url: on a host that `base_address` has checked.
        body: JSON to post; `None`: get.
        wait_s: for the connection, and for whatever comes next.
        insecure: take any certificate, and show no key.

    Raises:
        InputError: as `authorization`.
        OSError: nothing answers, or with an error (`urllib.error.HTTPError`).
        http.client.HTTPException: what answers speaks no HTTP.
    """
    request = urllib.request.Request(url, body)  # noqa: S310  (an http address)
    if body is not None:
        request.add_header("content-type", "application/json")
    for name, value in authorization(os.environ, insecure=insecure).items():
        request.add_unredirected_header(name, value)  # the key is not for whoever it points to
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
    Ask the endpoint for its models.

    Raises:
        TargetFailed: nothing answers there, or not as an OpenAI endpoint does.

    """
    try:
        with ask(f"{host}/v1/models", wait_s=ANSWER_S, insecure=insecure) as answer:
            listed: Any = json.load(answer)
        return tuple(str(model["id"]) for model in listed["data"])
    except urllib.error.HTTPError as error:
        raise TargetFailed(
            f"{host}/v1/models answers {error.code}; expected an OpenAI-compatible endpoint"
            f"{way_in(error.code)}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise TargetFailed(
                f"the certificate of {host} does not hold ({reason.verify_message}); "
                "SSL_CERT_FILE=FILE trusts one of your own, --insecure takes any and shows no key"
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
    Return the model to ask for: *model*, or the only one served.

    Raises:
        InputError: it is not served there, or several are and none is named.
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
            "is another plan deployed there? `serving status` tells",
        )
    return model

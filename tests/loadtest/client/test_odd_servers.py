"""Servers that answer otherwise than ours: what is measured, and what is said before the load."""

from __future__ import annotations

import gzip
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.trial import learned, try_request
from loadtest.run.run_config import RunLength
from minicluster.errors import Exit, TargetFailed
from tests.loadtest.command import run, verdict_in
from tests.loadtest.sending import order, send

FEW = RunLength(num_requests=3, warmup_s=0)
SSE = b"Content-Type: text/event-stream\r\n"
TOKENS = 10
"""Of each answer, as `tests.loadtest.sending` asks for."""
STRICT = {"model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens"}


def events(end: bytes = b"\n", begin: bytes = b"", field: str = "text") -> bytes:
    """Return the body of a stream of `TOKENS` tokens, all at once."""
    choice = {"text": "a"} if field == "text" else {"delta": {field: "a"}}
    chunks = [{"choices": [choice]}] * TOKENS
    usage = {"prompt_tokens": 64, "completion_tokens": TOKENS, "total_tokens": 64 + TOKENS}
    data = [json.dumps(chunk).encode() for chunk in (*chunks, {"choices": [], "usage": usage})]
    return begin + b"".join(b"data: " + each + 2 * end for each in (*data, b"[DONE]"))


def answer(body: bytes, head: bytes = SSE, status: bytes = b"200 OK", before: bytes = b"") -> bytes:
    return before + b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (
        status, head, len(body), body,
    )  # fmt: skip


@contextmanager
def serving(what: Any) -> Iterator[str]:  # noqa: ANN401  (bytes, or a function of the body)
    """Answer each request with the bytes *what*, or with what it returns for the parsed body."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                length = 0
                while (header := self.rfile.readline().strip().lower()) != b"":
                    if header.startswith(b"content-length:"):
                        length = int(header.partition(b":")[2])
                body = self.rfile.read(length)
                if line.startswith(b"GET"):
                    out = answer(b'{"data": [{"id": "fake"}]}', b"")
                else:
                    out = what if isinstance(what, bytes) else what(json.loads(body))
                self.wfile.write(out)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

        def handle_error(self, *_: object) -> None:
            pass  # clients that went away

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n"
MORE = b"HTTP/1.1 100 Continue\r\n\r\n"
BUSY = b"HTTP/1.1 102 Processing\r\n\r\n"
HTML = b"Content-Type: text/html\r\n"
JSON = b"Content-Type: application/json\r\n"
ERROR = b'{"error": {"message": "the engine had a problem"}}'
ODD: dict[str, tuple[bytes, str, str]] = {
    "plain": (answer(events()), "ok", ""),
    "byte order mark": (answer(events(begin=b"\xef\xbb\xbf")), "ok", ""),
    "CR": (answer(events(b"\r")), "ok", ""),
    "CRLF": (answer(events(b"\r\n")), "ok", ""),
    "early hints": (answer(events(), before=HINTS), "ok", ""),
    "every interim response": (answer(events(), before=MORE + BUSY + HINTS + HINTS), "ok", ""),
    "another interim response": (answer(events(), before=b"HTTP/1.1 199 X\r\n\r\n"), "ok", ""),
    "identity": (answer(events(), SSE + b"Content-Encoding: identity\r\n"), "ok", ""),
    "reasoning": (answer(events(field="reasoning_content")), "ok", ""),
    "gzip": (
        answer(gzip.compress(events()), SSE + b"Content-Encoding: gzip\r\n"), "malformed",
        "content-encoding gzip, which was not asked for",
    ),
    "br": (
        answer(b"\x8b\x00", SSE + b"Content-Encoding: br\r\n"), "malformed",
        "content-encoding br, which was not asked for",
    ),
    "HTML": (answer(b"<html>502 bad gateway</html>", HTML), "malformed", "HTML (text/html)"),
    "an error": (
        answer(ERROR, JSON), "server_error", "an error object with status 200: the engine had",
    ),
    "no stream": (answer(b'{"choices": []}', JSON), "malformed", "one JSON document"),
    "elsewhere": (
        answer(b"{}", b"Location: https://there.example/v1\r\n", b"307 X"), "bad_status",
        "307 to https://there.example/v1",
    ),
    "elsewhere, nowhere": (answer(b"", b"", b"302 X"), "bad_status", "302 to no Location"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_a_load_on_an_odd_server(kind: str, tmp_path: Path) -> None:
    """Every token is there; what is none is named, and no connection is mixed up."""
    out, outcome, says = ODD[kind]
    with serving(out) as host:
        found = send(order(host, FEW), tmp_path)

    assert len(found.measured) == 3
    assert {s.outcome for s in found.measured} == {outcome}
    for sample in found.measured:
        assert says in (sample.detail or "")
        assert len(sample.chunk_s) == (TOKENS if outcome == "ok" else 0)


BEFORE_THE_LOAD = {
    "HTML": "HTML (text/html)", "gzip": "content-encoding gzip", "no stream": "one JSON document",
    "elsewhere": "307 to https://there.example/v1",
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_one_request_before_the_load_finds_it(kind: str) -> None:
    """What no request can pass ends it; a stream, and an error that may pass, do not."""
    with serving(ODD[kind][0]) as host:
        job = order(host, FEW)
        if ODD[kind][1] in {"ok", "server_error"}:
            try_request(job, job.requests())
            return
        with pytest.raises(TargetFailed) as failed:
            try_request(job, job.requests())
    assert BEFORE_THE_LOAD.get(kind, "") in str(failed.value)


def openai_error(message: str, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "param": param}}).encode()


FASTAPI = {
    "type": "extra_forbidden",
    "loc": ["body", "ignore_eos"],
    "msg": "Extra inputs",
    "input": 1,
}
MISSING = {"type": "missing", "loc": ["body", "user"], "input": {"ignore_eos": True}}


@pytest.mark.parametrize(
    ("status", "body", "says", "not_said"),
    [
        (b"400 X", openai_error("Unrecognized request argument supplied: ignore_eos", "ignore_eos"),
         ("the parameter ignore_eos was refused", "--plain"), ()),
        (b"400 X", openai_error("unknown field", "stream_options.continuous_usage_stats"),
         ("the parameter continuous_usage_stats was refused", "--plain"), ()),
        (b"400 X", openai_error("'temperature' does not support 0 with this model"),
         ("the parameter temperature was refused", "--plain"), ()),
        (b"400 X", openai_error("Unsupported parameter: 'max_tokens'", "max_tokens"),
         ("the parameter max_tokens was refused", "--plain"), ()),
        (b"422 X", json.dumps({"detail": [FASTAPI]}).encode(),
         ("the parameter ignore_eos was refused", "--plain"), ()),
        # Another parameter, a value, or no JSON: the endpoint's own words, and nothing guessed.
        (b"422 X", json.dumps({"detail": [MISSING]}).encode(), ("if it refuses",),
         ("ignore_eos was",)),
        (b"400 X", openai_error("max_tokens is too large", "max_tokens"),
         ("max_tokens is too large", "if it refuses"), ("was refused",)),
        (b"400 X", b"Bad Request", ("answers 400: Bad Request",), ("was refused",)),
        (b"404 X", openai_error("no such path"), ("answers 404: no such path",), ("--plain",)),
        (b"403 X", openai_error("no"), ("MINICLUSTER_API_KEY",), ("--plain",)),
    ],
)  # fmt: skip
def test_a_refused_parameter_is_named(
    status: bytes, body: bytes, says: tuple[str, ...], not_said: tuple[str, ...]
) -> None:
    with serving(answer(body, JSON, status)) as host:
        job = order(host, FEW)
        with pytest.raises(TargetFailed) as failed:
            try_request(job, job.requests())
    assert all(text in str(failed.value) for text in says)
    assert not any(text in str(failed.value) for text in not_said)


@pytest.mark.parametrize("status", [b"429 X", b"503 X", b"500 X", b"408 X"])
def test_what_may_pass_is_left_to_the_load(status: bytes) -> None:
    with serving(answer(openai_error("later"), JSON, status)) as host:
        job = order(host, FEW)
        try_request(job, job.requests())


def strict(limits: set[str], tokens: int) -> Any:  # noqa: ANN401
    """Answer what has OpenAI's parameters only, with *tokens* tokens; refuse all else."""

    def reply(body: dict[str, Any]) -> bytes:
        allowed = (STRICT - {"max_tokens", "max_completion_tokens"}) | limits | {"stream_options"}
        wrong = sorted({*body} - allowed) + sorted({*body["stream_options"]} - {"include_usage"})
        if wrong:
            refused = openai_error(f"Unrecognized request argument supplied: {wrong[0]}", wrong[0])
            return answer(refused, JSON, b"400 X")
        prompt = body.get("prompt") or body["messages"][0]["content"].split()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        choice = {"text": "a"} if "prompt" in body else {"delta": {"content": "a"}}
        sent = [{"choices": [choice]}] * tokens + [{"choices": [], "usage": usage}]
        data = b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in sent)
        return answer(data + b"data: [DONE]\n\n")

    return reply


@pytest.mark.parametrize("limit", ["max_completion_tokens", "max_tokens"])
def test_a_plain_chat_takes_the_limit_that_the_endpoint_knows(limit: str) -> None:
    with serving(strict({limit}, 4)) as host:
        job = replace(order(host, FEW), plain=True)
        job = learned(job)
        try_request(job, job.requests())
        assert job.limit_name == limit
        with pytest.raises(TargetFailed, match="--plain"):
            try_request(replace(job, plain=False), job.requests())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_strict_endpoint_is_found_before_the_load_and_loaded_plainly(
    tmp_path: Path, api: str
) -> None:
    """The verdict says that lengths are the server's, and by how much they differ."""
    with serving(strict(STRICT, 7)) as host:
        refused = run(host, tmp_path / "refused", "--api", api)
        plain = run(
            host, tmp_path / "plain", "--api", api, "--plain", "--requests", "50",
            "--junit", str(tmp_path / "junit.xml"),
        )  # fmt: skip
    found = verdict_in(tmp_path / "plain")

    assert refused.returncode == Exit.TARGET_FAILED
    assert "ignore_eos was refused" in refused.stderr
    assert "--plain" in refused.stderr
    assert not (tmp_path / "refused").exists()
    # A busy machine may make the client unfit; lengths alone make no plain run invalid.
    assert not any("another" in reason for reason in found["reasons"])
    assert found["outcomes"] == {"ok": 50}
    assert "-30.0% against those asked for (10.0; 0 of 50 are equal)" in plain.stdout
    assert found["metadata"]["caveats"] == ["lengths as the server gave them (--plain)"]
    for text in (
        (tmp_path / "junit.xml").read_text(),
        (tmp_path / "plain/report.html").read_text(),
    ):
        assert "-30.0%" in text
        assert "lengths as the server gave them (--plain)" in text

"""The gRPC port that every replica of Ray Serve opens on all interfaces."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from serving.cluster.processes import environment
from serving.cluster.token import MODE, write_token

if TYPE_CHECKING:
    from pathlib import Path

REPLICA = """
import asyncio, pickle, sys
from pathlib import Path
import grpc
from ray._common.tls_utils import add_port_to_grpc_server
from ray._private.grpc_utils import create_grpc_server_with_interceptors
from ray.serve._private.replica import Replica
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated import serve_pb2_grpc

class Door(serve_pb2_grpc.ASGIServiceServicer):
    HandleRequest = Replica.HandleRequest

class Strange:
    def __reduce__(self):
        return (Path(sys.argv[1]).touch, ())

async def main():
    server = create_grpc_server_with_interceptors(asynchronous=True)
    serve_pb2_grpc.add_ASGIServiceServicer_to_server(Door(), server)
    port = add_port_to_grpc_server(server, "127.0.0.1:0")
    await server.start()
    sent = ASGIRequest(pickled_request_metadata=pickle.dumps(Strange())).SerializeToString()
    headers = [("authorization", f"Bearer {sys.argv[2]}")] if sys.argv[2:] else None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as stranger:
        call = stranger.unary_unary("/ray.serve.ASGIService/HandleRequest")
        try:
            await call(sent, timeout=30, metadata=headers)
        except grpc.RpcError as error:
            print(error.code().name)
    await server.stop(None)

asyncio.run(main())
"""
"""
A replica's gRPC server as Ray makes it, and a client without a token that sends a pickle.
"""


def _send(mark: Path, token: Path, *shown: str, **changed: str) -> str:
    """Send the pickle to a replica of a cluster of that token; returns the answer's status."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPLICA, str(mark), *shown],
        env=environment("stranger", token) | changed,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1]


@pytest.mark.parametrize("shown", [(), ("0" * 64,)])
def test_a_strangers_pickle_is_not_loaded(tmp_path: Path, shown: tuple[str, ...]) -> None:
    """In our processes' environment a call without the token, or with another, is refused."""
    token, mark = tmp_path / "token", tmp_path / "ran"
    write_token(token)
    assert _send(mark, token, *shown) == "UNAUTHENTICATED"
    assert not mark.exists()


def test_without_the_mode_it_would_be(tmp_path: Path) -> None:
    """The test above can fail: with Ray's authentication off, the stranger's code runs."""
    token, mark = tmp_path / "token", tmp_path / "ran"
    write_token(token)
    _send(mark, token, **{MODE: "disabled"})
    assert mark.exists()

from __future__ import annotations

import asyncio
import pickle
from contextlib import nullcontext
from dataclasses import fields
from inspect import getsource, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services
from ray._private.worker import Worker
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.controller import ServeController
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.replica import Replica, ReplicaActor, UserCallableWrapper
from ray.serve.api import RunTarget
from ray.serve.context import ReplicaContext
from ray.serve.deployment import Application, Deployment
from ray.serve.generated.serve_pb2 import DeploymentInfo as DeploymentInfoProto
from ray.serve.generated.serve_pb2 import DeploymentRoute
from ray.serve.request_router import RequestRouter

from serving.cluster import serve_compat
from serving.cluster.loopback import loopback
from tests.serving.forks import Forks


def test_every_private_name_is_there() -> None:
    """What we take from Ray Serve beyond its promises exists in the pinned version."""
    update = signature(ServeController.update_deployment_replicas).parameters
    assert [*update] == ["self", "deployment_id", "target_num_replicas"]
    assert [*signature(ServeController.get_deployment_info).parameters] == [
        *("self", "name", "app_name")
    ]
    assert DeploymentRoute(deployment_info=DeploymentInfoProto()).HasField("deployment_info")
    told = getsource(DeploymentInfo.from_proto)
    assert all(each in told for each in ("deployment_config", "replica_config", "version"))
    assert "_internal" in signature(Deployment.__init__).parameters
    assert {"_init_args", "_init_kwargs"} <= signature(Deployment.options).parameters.keys()
    assert "external_scaler_enabled" in signature(RunTarget).parameters
    assert hasattr(ServeControllerClient, "get_serve_details")
    assert "_controller" in getsource(ServeControllerClient.__init__)
    leave = getsource(Replica._perform_graceful_shutdown)
    assert leave.index("_drain_ongoing_requests") < leave.index("await self.shutdown()")
    handler = getsource(Worker.main_loop)
    assert "set_sigterm_handler(sigterm_handler)" in handler
    assert "raise_sys_exit_with_custom_error_message(" in handler
    with loopback():
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    version = "deployment._version or get_random_string()"
    assert version in getsource(ServeControllerClient.deploy_applications)
    assert "_bound_deployment" in getsource(Application.__init__)
    end = getsource(UserCallableWrapper.call_destructor)
    assert "await" in end
    assert "self._callable.__del__" in end
    assert isinstance(RequestRouter.curr_replicas, property)
    called = [*signature(ReplicaActor.handle_request).parameters]
    assert called[:3] == ["self", "pickled_request_metadata", "request_args"]
    assert "gang_context" in {each.name for each in fields(ReplicaContext)}


@pytest.mark.parametrize("ended", [False, True])
def test_one_replica_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch, *, ended: bool) -> None:
    """Past the choice of the handle, which knows them all; one that has ended is an error."""
    deployment = DeploymentID(name="Prefill:demo", app_name="minicluster")
    ids = [ReplicaID(unique_id=name, deployment_id=deployment) for name in "ab"]
    router = SimpleNamespace(
        request_router=SimpleNamespace(curr_replicas=dict.fromkeys(ids)),
        running_replicas_populated=lambda: True,
    )
    handle = SimpleNamespace(is_initialized=True, _router=SimpleNamespace(_asyncio_router=router))

    def get_actor(name: str, namespace: str) -> Any:  # noqa: ANN401
        assert (name, namespace) == (ids[1].to_full_id_str(), "serve")
        if ended:
            raise ValueError(name)

        async def answer(metadata: bytes) -> str:
            return f"{pickle.loads(metadata).call_method} of b"  # noqa: S301  (our own)

        return SimpleNamespace(handle_request=SimpleNamespace(remote=answer))

    monkeypatch.setattr(serve_compat.ray, "get_actor", get_actor)
    assert serve_compat.live_replica_ids(handle) == {"a", "b"}
    with pytest.raises(ValueError, match="b") if ended else nullcontext():
        place = asyncio.run(serve_compat.places_of_replica(handle, "b"))
        assert place == "channel_places of b"


LOG = """
import logging, logging.config, sys
from logging.handlers import MemoryHandler, RotatingFileHandler
from ray.serve._private.logging_utils import SERVE_LOGGER_NAME, get_component_logger_file_path
from types import SimpleNamespace
import ray
from serving.cluster.serve_compat import keep_log_open
logger = logging.getLogger(SERVE_LOGGER_NAME)
logger.addHandler(MemoryHandler(1, target=RotatingFileHandler(sys.argv[1] + "/replica.log")))
keep_log_open()
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
logger.error("still there")
ray._private.worker._global_node = SimpleNamespace(get_logs_dir_path=lambda: sys.argv[1])
print(get_component_logger_file_path())
"""


def test_the_log_stays_open_when_others_configure_logging(forks: Forks, tmp_path: Path) -> None:
    """Serve still finds a replica's log, and the replica writes to it (NIXL configures logging)."""
    assert forks.run(LOG, str(tmp_path))[-1] == "/replica.log"
    assert "still there" in (tmp_path / "replica.log").read_text()

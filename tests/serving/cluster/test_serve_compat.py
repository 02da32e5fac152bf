from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.forks import Forks

CHECK = """
import inspect
from ray._private import services
from ray.serve._private.application_state import ApplicationStateManager
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.controller import ServeController
from ray.serve._private.replica import Replica, UserCallableWrapper
from ray.serve.api import RunTarget
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle
from serving.cluster.loopback import loopback
from serving.cluster.serve_compat import DIRECT_CALLS
with loopback():
    local = services.resolve_ip_for_localhost("127.0.0.1")
leave = inspect.getsource(Replica._perform_graceful_shutdown)
end = inspect.getsource(UserCallableWrapper.call_destructor)
update = inspect.signature(ServeController.update_deployment_replicas).parameters
print(
    [*update] == ["self", "deployment_id", "target_num_replicas"],
    "external_scaler_enabled" in inspect.signature(RunTarget).parameters,
    hasattr(ServeControllerClient, "get_serve_details"),
    all(name in inspect.signature(DeploymentHandle.options).parameters for name in DIRECT_CALLS),
    "_controller" in inspect.getsource(ServeControllerClient.__init__),
    leave.index("_drain_ongoing_requests") < leave.index("await self.shutdown()"),
    local == "127.0.0.1",
    "deployment._version or get_random_string()"
    in inspect.getsource(ServeControllerClient.deploy_applications),
    "_bound_deployment" in inspect.getsource(Application.__init__),
    "await" in end and "self._callable.__del__" in end,
)
"""


def test_every_private_name_is_there(forks: Forks) -> None:
    """What we take from Ray Serve beyond its promises exists in the pinned version."""
    assert forks.run(CHECK)[-1].split() == ["True"] * 10


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

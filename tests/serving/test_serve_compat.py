from __future__ import annotations

import subprocess
import sys

CHECK = """
import inspect
from ray.serve._private.application_state import ApplicationStateManager
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.controller import ServeController
from ray.serve.api import RunTarget
import serving.serve_compat
update = inspect.signature(ServeController.update_deployment_replicas).parameters
print(
    [*update] == ["self", "deployment_id", "target_num_replicas"],
    "external_scaler_enabled" in inspect.signature(RunTarget).parameters,
    hasattr(ServeControllerClient, "get_serve_details"),
    "_controller" in inspect.getsource(ServeControllerClient.__init__),
)
"""


def test_every_private_name_is_there() -> None:
    """What we take from Ray Serve beyond its promises exists in the pinned version."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"] * 4

"""
Deploys with a decode pool that can be told to spoil transfers, and tells it.

`faulty.py up DEPLOYMENT PORT`, `faulty.py spoil on|off`: run as commands, so that no Ray starts
inside pytest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Do as told."""
    if sys.argv[1] == "up":
        up(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        spoil(on=sys.argv[2] == "on")


def up(deployment: Path, port: int) -> None:
    """Deploy, with `zero_block.ZeroBlock` mixed into decode's workers."""
    from serving.deploy import Site  # noqa: PLC0415
    from serving.deployed import bring_up  # noqa: PLC0415
    from sizing.plan import read_deployment  # noqa: PLC0415

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where workers find zero_block
    bring_up(
        read_deployment(deployment),
        Site(target="cpu", host="127.0.0.1", port=port),
        told=lambda text: sys.stderr.write(f"{text}\n"),
        decode_engine_kwargs={"worker_extension_cls": "zero_block.ZeroBlock"},
    )


def spoil(*, on: bool) -> None:
    """Have every transfer lose a block from now on, or no longer."""
    from ray import serve  # noqa: PLC0415

    from serving.compile import APP  # noqa: PLC0415
    from serving.connection import connected  # noqa: PLC0415
    from serving.status import current  # noqa: PLC0415

    with connected(current().address):
        decode = serve.get_deployment_handle("Decode:demo", APP)
        call = decode.collective_rpc.remote("zero_a_block", kwargs={"on": on})
        sys.stdout.write(f"spoiling: {call.result(timeout_s=60)}\n")


if __name__ == "__main__":
    main()

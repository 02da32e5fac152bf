"""Requests that schemathesis generates from the endpoint's own schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
)


def schemathesis(url: str, *, examples: int) -> tuple[int, str]:
    """Run it with *examples* an operation at least; return its exit code and what it said last."""
    command = [
        *(Path(sys.executable).parent / "st", "run", f"{url}/openapi.json", "--seed", "7"),
        *("--max-examples", str(examples), "--checks", ",".join(CHECKS)),
        *("--request-timeout", "90"),  # a whole context of answer, on one core
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]

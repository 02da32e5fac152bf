"""An error as the client sees it, before it is written as HTTP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """
    An error as the client sees it; fields as in OpenAI's error object.

    Attributes:
        retry_after_s: when to come again; `None`: the same request will fail again.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """What the client gets besides: Retry-After, in whole seconds."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

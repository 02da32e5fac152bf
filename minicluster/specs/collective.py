"""One file of `configs/collectives`."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import STRICT
from minicluster.specs.gpu import NumberSource
from minicluster.specs.library import CollectiveProtocol, MeasuredCollective


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEntry:
    """
    One file of `configs/collectives`: what was measured on a GPU, or the protocols of a library.

    Attributes:
        gpu: name in configs/gpus; `None`: a file of protocols.
    """

    __pydantic_config__ = STRICT

    name: str
    gpu: str | None = None
    measured: tuple[MeasuredCollective, ...] = ()
    protocols: tuple[CollectiveProtocol, ...] = ()
    sources: tuple[NumberSource, ...] = ()

"""Scales of a refit: one factor for each group of constants that a run can distinguish."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import StepModel
    from minicluster.specs.step import Interference, PathCoefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """
    Factors on the constants of a step model; 1 leaves them.

    Attributes:
        prefill: on prefill steps alone.
        decode: on decode steps alone.
        prefill_beside: on what decode adds to prefill steps (f_p, g_p, h_p of eq. Q9).
        decode_beside: on what prefill adds to decode steps (f_d, h_d).
        path: on the request's overhead and the KV pull.
    """

    prefill: float = 1.0
    decode: float = 1.0
    prefill_beside: float = 1.0
    decode_beside: float = 1.0
    path: float = 1.0

    @property
    def logs(self) -> NDArray[np.float64]:
        """Natural logarithms, shape (5,)."""
        return np.asarray(np.log(np.array(astuple(self), dtype=np.float64)))

    @classmethod
    def of(cls, logs: NDArray[np.float64]) -> Scales:
        """Return the factors of these logarithms."""
        prefill, decode, prefill_beside, decode_beside, path = np.exp(logs).tolist()
        return cls(
            prefill=prefill,
            decode=decode,
            prefill_beside=prefill_beside,
            decode_beside=decode_beside,
            path=path,
        )


PRIOR = Scales(prefill=0.15, decode=0.15, prefill_beside=0.6, decode_beside=0.6, path=0.4)
"""Standard deviation of each factor's logarithm before anything is measured: steps timed alone
are well known, how pools disturb one another under load is not."""


def scaled(model: StepModel, scales: Scales) -> StepModel:
    """Return *model* with its constants times *scales*."""
    return replace(
        model,
        prefill=model.prefill.scaled(scales.prefill),
        decode=model.decode.scaled(scales.decode),
        path=scaled_path(model.path, scales.path),
        interference=scaled_interference(model.interference, scales),
    )


def scaled_path(path: PathCoefficients, factor: float) -> PathCoefficients:
    """Return *path* *factor* times as long."""
    return replace(
        path,
        request_s=path.request_s * factor,
        transfer_base_s=path.transfer_base_s * factor,
        transfer_per_token_s=path.transfer_per_token_s * factor,
    )


def scaled_interference(between: Interference, scales: Scales) -> Interference:
    """Return *between* with what each pool adds to the other times its factor."""
    return replace(
        between,
        prefill_fraction=between.prefill_fraction * scales.prefill_beside,
        prefill_per_sequence_fraction=between.prefill_per_sequence_fraction * scales.prefill_beside,
        prefill_per_request_s=between.prefill_per_request_s * scales.prefill_beside,
        decode_fraction=between.decode_fraction * scales.decode_beside,
        decode_per_request_s=between.decode_per_request_s * scales.decode_beside,
    )

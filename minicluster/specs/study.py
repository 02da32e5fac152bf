"""A published study's own conventions: what it assumed, apart from our defaults."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, positive
from minicluster.specs.gpu import NumberSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyModel:
    """
    A model as a study took it.

    Attributes:
        parameters: P.
        layers: l.
        hidden: h.
        tokens_per_batch: b s, of the whole job.
        warning: what to know of these numbers.
    """

    __pydantic_config__ = STRICT

    name: str
    parameters: float
    layers: int
    hidden: int
    tokens_per_batch: float
    warning: str = ""

    def __post_init__(self) -> None:
        """Check numbers."""
        positive(
            parameters=self.parameters,
            layers=self.layers,
            hidden=self.hidden,
            tokens_per_batch=self.tokens_per_batch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """
    `configs/studies/*.toml`: constants of a study.

    Attributes:
        flops_per_s: C, one GPU.
        scale_up_bytes_per_s: B_F, one GPU, as the study counts it.
        scale_out_bytes_per_s: B_S.
        bytes_per_number: e, of activations and gradients.
        flops_per_parameter_and_token: c: 6, or 8 with full recompute.
        gpus: cluster sizes that it looks at.
        hb_sizes: HB sizes that it sweeps.
        radices: of switches.
        bill_hb_size: HB size of its bill of materials.
        warning: what of it not to use elsewhere.
    """

    __pydantic_config__ = STRICT

    name: str
    flops_per_s: float
    scale_up_bytes_per_s: float
    scale_out_bytes_per_s: float
    bytes_per_number: float
    flops_per_parameter_and_token: float
    gpus: tuple[int, ...]
    hb_sizes: tuple[int, ...]
    radices: tuple[int, ...]
    bill_hb_size: int
    models: tuple[StudyModel, ...]
    warning: str = ""
    sources: tuple[NumberSource, ...] = ()

    def __post_init__(self) -> None:
        """Check numbers."""
        positive(
            flops_per_s=self.flops_per_s,
            scale_up_bytes_per_s=self.scale_up_bytes_per_s,
            scale_out_bytes_per_s=self.scale_out_bytes_per_s,
            bytes_per_number=self.bytes_per_number,
            flops_per_parameter_and_token=self.flops_per_parameter_and_token,
            bill_hb_size=self.bill_hb_size,
        )
        for key in ("gpus", "hb_sizes", "radices"):
            positive(**{f"{key}.{i}": value for i, value in enumerate(getattr(self, key))})

    def model(self, name: str) -> StudyModel:
        """Return a model of the study, or refuse."""
        for model in self.models:
            if model.name == name:
                return model
        raise InputError("--model", name, "one of " + ", ".join(m.name for m in self.models))

"""A published study's own conventions: what it assumed, apart from our defaults."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import Count, Positive, Spec
from minicluster.specs.gpu import NumberSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyModel(Spec):
    """
    A model as a study took it.

    Attributes:
        parameters: P.
        layers: l.
        hidden: h.
        tokens_per_batch: b s, of the whole job.
        warning: what to know of these numbers.
    """

    name: str
    parameters: Positive
    layers: Count
    hidden: Count
    tokens_per_batch: Positive
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions(Spec):
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

    name: str
    flops_per_s: Positive
    scale_up_bytes_per_s: Positive
    scale_out_bytes_per_s: Positive
    bytes_per_number: Positive
    flops_per_parameter_and_token: Positive
    gpus: tuple[Count, ...]
    hb_sizes: tuple[Count, ...]
    radices: tuple[Count, ...]
    bill_hb_size: Count
    models: tuple[StudyModel, ...]
    warning: str = ""
    sources: tuple[NumberSource, ...] = ()

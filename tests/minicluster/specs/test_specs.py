"""Specs refuse numbers outside their limits by name; what an SLO and a fingerprint say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Fraction, NotNegative, Positive, Spec, Whole
from minicluster.specs.model import ARCHITECTURE_KEYS, architecture, architecture_hash
from minicluster.specs.slo import SloSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited(Spec):
    """A spec with a number of every kind."""

    count: Count = 1
    whole: Whole | None = None
    share: Fraction = 1.0
    seconds: NotNegative = 0.0
    sizes: tuple[Positive, ...] = ()
    peaks: dict[str, Positive] = field(default_factory=dict)
    free: float = float("-inf")

    def _place(self, key: str) -> str:
        return f"limited.{key}"


GOOD = Limited(count=3, whole=0, share=0.5, seconds=2.5, sizes=(1.0, 2.0), peaks={"bf16": 3.0})


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"count": 0}, "limited.count is 0"),
        ({"whole": -1}, "limited.whole is -1"),
        ({"share": 0.0}, "limited.share is 0.0"),
        ({"share": 1.5}, "limited.share is 1.5"),
        ({"seconds": -0.1}, "limited.seconds is -0.1"),
        ({"seconds": float("nan")}, "limited.seconds is nan"),
        ({"sizes": (1.0, float("inf"))}, "limited.sizes.1 is inf"),
        ({"peaks": {"bf16": 1.0, "fp8": 0.0}}, "limited.peaks.fp8 is 0.0"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, object], place: str) -> None:
    with pytest.raises(InputError, match=place):
        replace(GOOD, **change)


@pytest.mark.parametrize(
    ("slo", "limits_s", "per_token_s"),
    [
        (SloSpec(ttft_s=2.0, tpot_s=0.1), {"ttft": 2.0, "tpot": 0.1}, 0.1),
        (SloSpec(ttft_s=2.0, tpot_s=None, itl_s=0.2), {"ttft": 2.0, "itl": 0.2}, 0.2),
        (SloSpec(tpot_s=0.1, itl_s=0.2), {"ttft": 1.0, "tpot": 0.1, "itl": 0.2}, 0.1),
        (SloSpec(tpot_s=None), {"ttft": 1.0}, None),
    ],
)
def test_limits_are_those_that_are_set(
    slo: SloSpec, limits_s: dict[str, float], per_token_s: float | None
) -> None:
    assert slo.limits_s == limits_s
    assert slo.per_token_s == per_token_s
    assert [replace(slo, percentile=name).level for name in ("p50", "p99")] == [0.5, 0.99]


CONFIG: dict[str, object] = dict.fromkeys(sorted(ARCHITECTURE_KEYS), 1)
NOISE = (
    "torch_dtype", "dtype", "transformers_version", "_name_or_path", "eos_token_id",
    "bos_token_id", "rope_theta", "quantization_config", "architectures", "use_cache",
)  # fmt: skip


def test_hash_sees_what_shapes_a_model_and_nothing_else() -> None:
    """
    Any key of an architecture changes it; names, token ids, dtypes and order do not.

    Calibrations and plans on disk hold fingerprints, so the same input keeps the same one.
    """
    known = architecture_hash(CONFIG)
    backwards = dict(reversed(CONFIG.items()))
    assert architecture_hash(dict.fromkeys(NOISE, 1) | backwards) == known
    assert architecture_hash({"model_type": "outer", "text_config": CONFIG}) == known
    changed = {architecture_hash(CONFIG | {key: 2}) for key in CONFIG}
    assert len(changed | {known}) == len(CONFIG) + 1
    config = {"model_type": "llama", "hidden_size": 4096, "head_dim": None}
    assert architecture_hash(config) == "7acb3d2bd72a4227"
    assert architecture(config) == {"model_type": "llama", "hidden_size": 4096}

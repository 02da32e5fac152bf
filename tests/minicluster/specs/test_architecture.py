"""The fingerprint of an architecture says what shapes a model, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minicluster.specs.model import ARCHITECTURE_KEYS, architecture, architecture_hash

VALUES = st.one_of(st.integers(0, 10**6), st.booleans(), st.text(max_size=5))
CONFIGS = st.dictionaries(st.sampled_from(sorted(ARCHITECTURE_KEYS)), VALUES)
NOISE = st.dictionaries(
    st.sampled_from(
        [
            "torch_dtype", "dtype", "transformers_version", "_name_or_path", "eos_token_id",
            "bos_token_id", "rope_theta", "quantization_config", "architectures", "use_cache",
        ]
    ),
    VALUES,
)  # fmt: skip


@given(config=CONFIGS, noise=NOISE)
def test_hash_ignores_noise_and_order(config: dict[str, object], noise: dict[str, object]) -> None:
    """Names, token ids, dtypes and the order of keys leave the fingerprint alone."""
    items = [*noise.items(), *reversed(config.items())]
    assert architecture_hash(dict(items)) == architecture_hash(config)


@given(config=CONFIGS, key=st.sampled_from(sorted(ARCHITECTURE_KEYS)))
def test_hash_sees_every_architecture_key(config: dict[str, object], key: str) -> None:
    """Changing any key that shapes the model changes the fingerprint."""
    before = {**config, key: 1}
    assert architecture_hash(before) != architecture_hash({**config, key: 2})


@given(config=CONFIGS)
def test_hash_reads_the_nested_language_model(config: dict[str, object]) -> None:
    assert architecture_hash({"model_type": "outer", "text_config": {"model_type": "x", **config}}
    ) == architecture_hash({"model_type": "x", **config})  # fmt: skip


def test_hash_is_sixteen_hex_digits_and_stable() -> None:
    """Calibrations and plans on disk hold fingerprints, so the same input keeps the same one."""
    config = {"model_type": "llama", "hidden_size": 4096, "head_dim": None}
    assert architecture_hash(config) == "7acb3d2bd72a4227"
    assert architecture(config) == {"model_type": "llama", "hidden_size": 4096}

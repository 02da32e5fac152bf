"""The fingerprint of an architecture says what shapes a model, and nothing else."""

from __future__ import annotations

from minicluster.specs.model import ARCHITECTURE_KEYS, architecture, architecture_hash

CONFIG: dict[str, object] = dict.fromkeys(sorted(ARCHITECTURE_KEYS), 1)
NOISE = (
    "torch_dtype", "dtype", "transformers_version", "_name_or_path", "eos_token_id",
    "bos_token_id", "rope_theta", "quantization_config", "architectures", "use_cache",
)  # fmt: skip


def test_hash_sees_what_shapes_a_model_and_nothing_else() -> None:
    """Any key of an architecture changes it; names, token ids, dtypes and order do not."""
    known = architecture_hash(CONFIG)
    backwards = dict(reversed(CONFIG.items()))
    assert architecture_hash(dict.fromkeys(NOISE, 1) | backwards) == known
    assert architecture_hash({"model_type": "outer", "text_config": CONFIG}) == known
    changed = {architecture_hash(CONFIG | {key: 2}) for key in CONFIG}
    assert len(changed | {known}) == len(CONFIG) + 1


def test_hash_is_sixteen_hex_digits_and_stable() -> None:
    """Calibrations and plans on disk hold fingerprints, so the same input keeps the same one."""
    config = {"model_type": "llama", "hidden_size": 4096, "head_dim": None}
    assert architecture_hash(config) == "7acb3d2bd72a4227"
    assert architecture(config) == {"model_type": "llama", "hidden_size": 4096}

"""
Write configs/huggingface/library.json: what transformers' configuration classes say.

    python scripts/huggingface.py [--check]

Of each family that the sizer reads: the other names of its keys, and the defaults of those that
may shape a model. The sizer does not import transformers, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig
from transformers.models.auto import modeling_auto

from sizing.catalog.huggingface.families import families, harmless

TABLE = Path(__file__).parents[1] / "configs" / "huggingface" / "library.json"


def family(model_type: str) -> dict[str, Any]:
    """Return names and defaults of one configuration class."""
    kind = CONFIG_MAPPING[model_type]
    base = {each.name for each in dataclasses.fields(PreTrainedConfig)}
    defaults = {
        each.name: each.default
        for each in dataclasses.fields(kind)
        if each.name not in base and not harmless(each.name)
    }
    for key in _asked_for(kind) - base:
        if not harmless(key):
            defaults.setdefault(key, None)
    built = kind()
    rope = getattr(built, "rope_parameters", None)
    if hasattr(built, "rope_parameters"):
        defaults["rope_parameters"] = rope if _scales(rope) else None
    return {
        "renamed": dict(sorted(kind.attribute_map.items())),
        "defaults": dict(sorted(defaults.items())),
        "architectures": sorted(_classes(model_type) | _classes(model_type.removesuffix("_text"))),
    }


def _classes(model_type: str) -> set[str]:
    """Return the classes of models of a model_type, for whatever task."""
    tables = [each for each in vars(modeling_auto) if re.fullmatch(r"MODEL_.*MAPPING_NAMES", each)]
    found = [getattr(modeling_auto, each).get(model_type, ()) for each in tables]
    return {name for each in found for name in ([each] if isinstance(each, str) else each)}


def _asked_for(kind: type[PreTrainedConfig]) -> set[str]:
    """Return the keys that the modelling code takes where they are there, declared or not."""
    name = inspect.getfile(kind).replace("configuration_", "modeling_")
    return set(re.findall(r'getattr\(config, "(\w+)"', Path(name).read_text(encoding="utf-8")))


def _scales(rope: object) -> bool:
    return isinstance(rope, dict) and rope.get("factor") is not None


def table() -> dict[str, Any]:
    """Return the whole file."""
    names = sorted({each.library or name for name, each in families().items()})
    generation = GenerationConfig._get_default_generation_params()  # noqa: SLF001  (no other way)
    base = {each.name for each in dataclasses.fields(PreTrainedConfig)}
    return {
        "source": f"transformers {transformers.__version__}",
        "generation": sorted({*generation, *base}),
        "families": {name: family(name) for name in names},
    }


def main(arguments: list[str]) -> int:
    """Write the table, or say whether it is what it would be."""
    text = json.dumps(table(), indent=1) + "\n"
    if "--check" in arguments:
        return int(TABLE.read_text(encoding="utf-8") != text)
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

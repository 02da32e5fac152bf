"""The catalog of engine profiles."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from minicluster.config import parse, read_toml
from minicluster.errors import InputError
from minicluster.specs.engine import COMMON_OPTIONS, DEVICE_SETTINGS, OPTIONS, EngineProfile
from sizing.catalog.folder import files, unknown
from sizing.catalog.gpu import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.specs.gpu import AllToAllLibrary, GpuSpec
    from minicluster.specs.scenario import EngineChoice

NUMBER = re.compile(r"\d+")
SETTINGS = (*DEVICE_SETTINGS, "gpu_memory_utilization", *OPTIONS)
"""Settings of a profile that a scenario may ask for."""


@cache
def engines() -> tuple[EngineProfile, ...]:
    """Read the engine profiles, those that can be deployed first."""
    profiles = [
        parse(EngineProfile, read_toml(path), place=path.name) for path in files("engines").values()
    ]
    return tuple(sorted(profiles, key=lambda profile: not profile.deployable))


def find_engine(choice: EngineChoice, *, place: str = "engine") -> EngineProfile:
    """
    Return the deployable profile of an engine that a scenario asks for.

    `0.29` stands for the newest 0.29.x, no version for the newest of all.

    Raises:
        InputError: no deployable profile of that engine and version.
    """
    deployable = [profile for profile in engines() if profile.deployable]
    wanted = [
        profile
        for profile in deployable
        if choice.name == profile.name
        and choice.version in (None, profile.version, profile.version.rpartition(".")[0])
    ]
    if not wanted:
        known = [f"{profile.name} {profile.version}" for profile in deployable]
        asked = " ".join(filter(None, (choice.name, choice.version)))
        raise unknown(place, asked, "an engine with a profile", known)
    return max(wanted, key=lambda profile: release(profile.version))


def chosen_engine(
    choice: EngineChoice, gpus: Iterable[GpuSpec], *, place: str = "engine"
) -> EngineProfile:
    """
    Return the profile that a scenario asks for, with the settings that it asks for.

    Args:
        gpus: the devices that it may run on, each with limits of its own.

    Raises:
        InputError: no such profile, or a setting that the engine lacks on one of *gpus*.

    """
    profile = find_engine(choice, place=place)
    asked = {name: getattr(choice, name) for name in SETTINGS if getattr(choice, name) is not None}
    cleared: dict[str, Any] = dict.fromkeys(set(asked) & set(DEVICE_SETTINGS))
    defaults = tuple(replace(each, **cleared) for each in profile.defaults)
    library = _all_to_all(choice, profile, place)
    chosen = replace(profile, defaults=defaults, all_to_all=library, **asked)
    for gpu in gpus:
        _check_settings(choice, profile.on(gpu), chosen.on(gpu), gpu.name, place)
        if library is not None and gpu.name not in library.gpus:
            expected = f"no such key on {gpu.name}: it runs on {', '.join(library.gpus)}"
            raise InputError(f"{place}.all_to_all", library.name, expected, WITHOUT_LIBRARY)
    return chosen


WITHOUT_LIBRARY = "leave out all_to_all and two_batch_overlap"


def _all_to_all(choice: EngineChoice, profile: EngineProfile, place: str) -> AllToAllLibrary | None:
    """Return the library that sends tokens to their experts; refuse what the engine has not."""
    name, engine = choice.all_to_all, f"{profile.name} {profile.version}"
    if choice.two_batch_overlap:
        where, known = f"{place}.two_batch_overlap", ", ".join(profile.all_to_all_libraries)
        if not profile.overlap_decode_tokens:
            expected = f"no such key: the profile of {engine} knows no two-batch overlap"
            raise InputError(where, True, expected, "leave out two_batch_overlap")  # noqa: FBT003
        if name is None:
            expected = f"engine.all_to_all beside it, one of {known}: {engine} overlaps no other"
            raise InputError(where, True, expected, f"set engine.all_to_all = {known}")  # noqa: FBT003
    if name is None:
        return None
    if name not in profile.all_to_all_libraries:
        known = ", ".join(profile.all_to_all_libraries) or "none"
        expected = f"a library that {engine} sends tokens to experts by: {known}"
        raise InputError(f"{place}.all_to_all", name, expected, WITHOUT_LIBRARY)
    return collectives()[name].all_to_all


def _check_settings(
    choice: EngineChoice, default: EngineProfile, chosen: EngineProfile, gpu: str, place: str
) -> None:
    """Refuse settings that the engine would refuse on one device; *default* has none of them."""
    name, budget = f"{chosen.name} {chosen.version}", chosen.max_num_batched_tokens
    for option in OPTIONS:
        if getattr(choice, option) and option not in (*COMMON_OPTIONS, *chosen.own_options):
            expected = f"no such key: {name} has no such option"
            raise InputError(f"{place}.{option}", getattr(choice, option), expected)
    if choice.chunked_prefill_tokens and not chosen.scheduling.chunked_prefill:
        raise InputError(
            f"{place}.chunked_prefill_tokens",
            choice.chunked_prefill_tokens,
            f"no such key: {name} computes a prompt in one step",
        )
    if choice.speculative_tokens and not chosen.draft_methods:
        raise InputError(
            f"{place}.speculative_tokens",
            choice.speculative_tokens,
            f"no such key: the profile of {name} knows no speculative decoding",
        )
    if chosen.block_size % default.block_size:
        raise InputError(
            f"{place}.block_size",
            chosen.block_size,
            f"a multiple of {default.block_size} tokens, which {name} asks for on {gpu}",
        )
    each = 1 + chosen.speculative_tokens
    for limit, tokens in (("max_num_seqs", each), ("chunked_prefill_tokens", 1)):
        value = getattr(choice, limit)
        if value is not None and value * tokens > budget:
            raise InputError(
                f"{place}.{limit}",
                value,
                f"at most {budget // tokens:,}: the tokens in a step of {name} on {gpu}"
                + (f" over the {tokens} of a sequence with its drafts" if tokens > 1 else ""),
                f"set engine.max_num_batched_tokens to {value * tokens} or more",
            )


def release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version; none where it does not start with one."""
    return tuple(int(n) for n in NUMBER.findall(version)[:3]) if version[:1].isdigit() else ()

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
    Return the profile of the engine and version that a scenario asks for.

    `0.29` stands for the newest 0.29.x; where a profile stands for a line of releases, as 0.5 does
    for 0.5.8, the version is the scenario's. No version is the one that `serving up` deploys, else
    the newest with a profile, each of which measured rows stand behind.

    Raises:
        InputError: no profile of that engine and version.
    """
    name, version = choice.name, choice.version
    profiles = [profile for profile in engines() if profile.name == name]
    if not profiles:
        names = dict.fromkeys(profile.name for profile in engines())
        raise unknown(f"{place}.name", name, "an engine with a profile", [*names])
    if version is None:
        return max(profiles, key=lambda each: (each.deployable, release(each.version)))
    matching = [profile for profile in profiles if same_line(version, profile.version)]
    if not matching:
        versions = ", ".join(profile.version for profile in profiles)
        expected = f"a version of {name} with a profile: {versions}"
        raise InputError(f"{place}.version", version, expected, "leave it out for the default")
    profile = max(matching, key=lambda each: release(each.version))
    exact = len(release(version)) > len(release(profile.version))
    return replace(profile, version=version) if exact else profile


def same_line(version: str, profile_version: str) -> bool:
    """Say whether one version is the other, or a release of its line."""
    pairs = list(zip(release(version), release(profile_version), strict=False))
    return bool(pairs) and all(one == other for one, other in pairs)


def schedules_ahead(engine: EngineProfile, version: str) -> bool:
    """Say whether a version prepares the next step while one runs; an unknown one does."""
    return not release(version) or release(version) >= engine.scheduling.async_scheduling_since


def at_version(engine: EngineProfile, version: str, *, varied: bool) -> EngineProfile:
    """
    Return an engine with the host's times and the sampler's memory of one of its versions.

    Args:
        varied: lengths of prompts differ, so that some kernels are compiled for each.
    """
    if not schedules_ahead(engine, version):
        engine = replace(
            engine,
            per_step_s=engine.per_step_s + engine.exposed_step_s,
            per_sequence_s=engine.per_sequence_s + engine.exposed_sequence_s,
        )
    if release(version) < engine.sorts_logits_until:
        engine = replace(engine, logit_bytes=engine.sorted_logit_bytes)
    # Builds between releases have no number; those of all rows are older than the release.
    compiles = release(version) < engine.prompt_compile_until
    return engine if compiles and varied else replace(engine, prompt_compile_s=0.0)


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
            expected = (
                f"no such key without engine.all_to_all, one of {known}: {engine} overlaps no other"
            )
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

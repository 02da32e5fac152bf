"""The catalog of engine profiles."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.specs.engine import EngineProfile
from sizing.catalog.folder import files, unknown

if TYPE_CHECKING:
    from minicluster.specs.scenario import EngineChoice

NUMBER = re.compile(r"\d+")


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


def release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version; none where it does not start with one."""
    return tuple(int(n) for n in NUMBER.findall(version)[:3]) if version[:1].isdigit() else ()

"""What a whole group takes: memory, descriptors, maps, and names in /dev/shm."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass, fields
from pathlib import Path

from mqproc.layout import control as words_of
from tests.conftest import Group

SAMPLES_MIN = 60
"""Fewer tell nothing of growth."""
GROWTH = 1.25
"""What may have become of each figure, beside SLACK."""
SLACK = {"pss_bytes": 32 << 20, "descriptors": 20, "maps": 40, "shared_names": 4}
LASTING_SLACK = 2
"""What the processes that live as long as the group may have more of: they see every kill, and keep nothing of it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Sums over all processes of a group."""

    pss_bytes: int
    descriptors: int
    maps: int
    shared_names: int
    lasting_descriptors: int
    """Of the supervisor and the template, which nobody kills here."""
    lasting_maps: int


def taken(group: Group) -> Taken:
    """Now; a process that ends meanwhile is left out."""
    words = group.words()
    lasting = {words["supervisor_pid"], words["template_pid"]}
    pids = lasting | {words[f"{role}.pid"] for role in words_of.ROLES}
    pss = descriptors = maps = lasting_descriptors = lasting_maps = 0
    for pid in pids - {0}:
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (process / "smaps_rollup").read_text().splitlines()
            pss += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            own_descriptors = len(list((process / "fd").iterdir()))
            own_maps = len((process / "maps").read_text().splitlines())
            descriptors += own_descriptors
            maps += own_maps
            if pid in lasting:
                lasting_descriptors += own_descriptors
                lasting_maps += own_maps
    names = len(list(Path("/dev/shm").iterdir()))
    return Taken(pss, descriptors, maps, names, lasting_descriptors, lasting_maps)


def medians(samples: list[Taken]) -> tuple[Taken, Taken]:
    """What was taken in the second fifth of a run, when all that it needs is there, and in the last one."""
    fifth = len(samples) // 5
    early, late = (
        Taken(*(round(statistics.median(getattr(sample, field.name) for sample in part)) for field in fields(Taken)))
        for part in (samples[fifth : 2 * fifth], samples[-fifth:])
    )
    return early, late


def grown(samples: list[Taken]) -> list[str]:
    """Figures that are larger in the last fifth than in the second, by more than is allowed."""
    early, late = medians(samples)
    told = []
    for field in fields(Taken):
        before, after = getattr(early, field.name), getattr(late, field.name)
        lasting = field.name.startswith("lasting")
        if after > (before + LASTING_SLACK if lasting else GROWTH * before + SLACK[field.name]):
            told.append(f"{field.name}: from {before:,} to {after:,}")
    return told

"""What a check says: how bad it is, what it found, why that matters, and what mends it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mqproc.cli.doctor.patient import Patient


class Level(enum.StrEnum):
    """An error keeps the store from working, a warning will hurt some day; a note is good to know."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


ORDER = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
"""The worst first."""


_INSIDE = ("store", "group")
"""Areas of checks that look into the store."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one look has brought. `mend` is a command or an option, exactly as it is to be given."""

    level: Level
    found: str
    why: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The same with the name of the check that said it."""

    check: str
    area: str
    level: Level
    found: str
    why: str
    mend: str

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "area": self.area,
            "level": str(self.level),
            "found": self.found,
            "why": self.why,
            "mend": self.mend,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `look` gives None where the question makes no sense: there is no store, no such file."""

    name: str
    area: str
    asks: str
    look: Callable[[Patient], Said | None]

    def run(self, patient: Patient) -> Finding | None:
        if self.area in _INSIDE and not patient.reachable:
            return None  # What its owner is told by `owner`.
        try:
            said = self.look(patient)
        except OSError as problem:
            said = error(
                f"it could not be looked at: {problem}",
                "what this check is about is not known, and a group may meet the same",
                "dmesg tells of a disk that fails; ls -l and df -h of what could not be read",
            )
        if said is None:
            return None
        return Finding(self.name, self.area, said.level, said.found, said.why, said.mend)


def ok(found: str) -> Said:
    """All is as it should be."""
    return Said(Level.OK, found)


def note(found: str, why: str, mend: str) -> Said:
    """Good to know."""
    return Said(Level.NOTE, found, why, mend)


def warning(found: str, why: str, mend: str) -> Said:
    """It will hurt."""
    return Said(Level.WARNING, found, why, mend)


def error(found: str, why: str, mend: str) -> Said:
    """It does not work."""
    return Said(Level.ERROR, found, why, mend)

"""Whether a group lives, and whether it serves in full, by its control file.

Alive is not ready: a group that recovers is alive. Both are told as the list of what is wrong, and what to do about it.
What is wrong although the group serves is a list of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Final

from mqproc import control_words
from mqproc.control import Control
from mqproc.control_words import SUPERVISOR_TIMEOUT_NS
from mqproc.layout import control as layout
from mqproc.metrics.from_words import unflushed_seconds
from mqproc.quantities import counted

BEHIND_MS: Final = 10_000
UNFLUSHED_S: Final = 60.0
"""Longer than this is worth a word, as it is to the alerts."""

_DIED = ": mqproc errors tells why"
_MENDS: Final = {
    layout.BACKOFF: _DIED,
    layout.EXITED: _DIED,
    layout.FATAL: _DIED,
    layout.LENT: ": until mqproc run gives it back",
}


def alive_problems(control: Control) -> list[str]:
    """Why the group does not live; none when it does."""
    silent_ns = time.monotonic_ns() - control.load(layout.SUPERVISOR_HEARTBEAT_NS)
    if silent_ns > SUPERVISOR_TIMEOUT_NS:
        return [f"the supervisor has been silent for {silent_ns / 1e9:.1f} s: mqproc errors, then mqproc up"]
    return []


def ready_problems(control: Control, timeout_ns: int) -> list[str]:
    """Why the group does not serve in full; none when it does. `timeout_ns` is when a role counts as silent."""
    problems = alive_problems(control)
    state = control.load(layout.GROUP_STATE)
    if state != layout.GROUP_READY:
        problems.append(f"the group is {layout.GROUP_NAMES[state]}")
    for role in layout.ROLES:
        supervised = control.load(layout.supervised_word(role, "supervised"))
        silent_ns = time.monotonic_ns() - control.load(layout.role_word(role, "heartbeat_ns"))
        busy = control.load(layout.role_word(role, "state")) in layout.BUSY_STATES
        if supervised != layout.RUNNING:
            problems.append(f"{role} is {layout.SUPERVISED_NAMES[supervised]}{_MENDS.get(supervised, '')}")
        elif silent_ns > timeout_ns and not busy:
            problems.append(f"{role} has been silent for {silent_ns / 1e9:.1f} s: it is ended, and started again")
    if control.read_only:
        reason = f"a sync failed with errno {control.sync_errno}"
        problems.append(f"the store is read-only: {reason}; mend the disk, mqproc down, mqproc store repair")
    if control.damage_read_only:
        damaged = counted(control.damage_holes, "damaged range")
        problems.append(f"the store is read-only: {damaged}, on_damage = read_only; mqproc store verify tells which")
    if control.load(layout.DISK_FULL):
        problems.append("the disk is nearly full: sends are refused; make room, or look at mqproc store retention")
    return problems


def warnings_of(words: Mapping[str, int], now_ns: int) -> list[str]:
    """What is wrong while the group serves, by its words, and what to do; `now_ns` is the monotonic clock."""
    found = []
    if words["dispatch_errno"]:
        found.append(f"dispatch waits: {_error(words['dispatch_errno'])}; it goes on by itself when that is mended")
    elif (behind_ms := control_words.dispatch_behind_ms(words)) >= BEHIND_MS:
        found.append(
            f"consumers see messages {behind_ms / 1000:.0f} s late; if dispatch stands still: mqproc restart dispatcher"
        )
    if (age_s := unflushed_seconds(words, now_ns)) >= UNFLUSHED_S:
        found.append(f"a loss of power would take the last {age_s:.0f} s: look at the disk and the commitlog-flusher")
    if words["segment_errno"]:
        found.append(f"the log gets no new segment: {_error(words['segment_errno'])}; make room, or mend the disk")
    if holes := control_words.damage_holes(words):
        damaged = counted(holes, "damaged range")
        found.append(f"the log has {damaged}, all else is served: mqproc store verify tells which")
    return found


def _error(number: int) -> str:
    return f"{os.strerror(number)} (errno {number})"

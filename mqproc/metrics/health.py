"""Whether a group lives, and whether it serves in full, by its control file.

Alive is not ready: a group that recovers is alive. Both are told as the list of what is wrong.
"""

from __future__ import annotations

import time

from mqproc.control import Control
from mqproc.control_words import SUPERVISOR_TIMEOUT_NS
from mqproc.layout import control as layout
from mqproc.quantities import counted


def alive_problems(control: Control) -> list[str]:
    """Why the group does not live; none when it does."""
    silent_ns = time.monotonic_ns() - control.load(layout.SUPERVISOR_HEARTBEAT_NS)
    if silent_ns > SUPERVISOR_TIMEOUT_NS:
        return [f"the supervisor has been silent for {silent_ns / 1e9:.1f} s"]
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
            problems.append(f"{role} is {layout.SUPERVISED_NAMES[supervised]}")
        elif silent_ns > timeout_ns and not busy:
            problems.append(f"{role} has been silent for {silent_ns / 1e9:.1f} s")
    if control.read_only:
        problems.append(f"the store is read-only: a sync failed with errno {control.sync_errno}")
    if control.damage_read_only:
        damaged = counted(control.damage_holes, "damaged range")
        problems.append(f"the store is read-only: {damaged}, on_damage = read_only")
    if control.load(layout.DISK_FULL):
        problems.append("the disk is nearly full: sends are refused")
    return problems

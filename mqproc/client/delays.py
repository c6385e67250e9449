"""What a message may wait for: a delay level, or a time."""

from __future__ import annotations

from typing import Any

from mqproc.client.message_numbers import is_whole
from mqproc.delay_levels import DELAY_LEVELS
from mqproc.errors import BadLevelError, BadMessageError, BadTimeError


def check_delay(delay_level: Any, deliver_at_ms: Any) -> None:
    """Raise BadLevelError, BadTimeError or BadMessageError when messages wait for no time that there is."""
    if not is_whole(delay_level):
        raise _not_one_time("delay_level", delay_level)
    if not is_whole(deliver_at_ms):
        raise _not_one_time("deliver_at_ms", deliver_at_ms)
    if not 0 <= delay_level <= DELAY_LEVELS:
        raise BadLevelError(f"delay level {delay_level} is out of range: from 1 to {DELAY_LEVELS}")
    if not 0 <= deliver_at_ms < 1 << 62:
        raise BadTimeError(f"deliver_at_ms = {deliver_at_ms} is no time")
    if delay_level and deliver_at_ms:
        raise BadMessageError("a message has a delay level or a time to deliver at, not both")


def _not_one_time(name: str, value: Any) -> BadMessageError:
    return BadMessageError(f"{name} is a {type(value).__name__}: messages sent so wait for one time, an integer")

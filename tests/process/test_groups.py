"""How long heartbeats are held: for a part of the session, and many are answered at once."""

from __future__ import annotations

import pytest

from mqproc.process.groups import SESSION_MS_MAX, SESSION_MS_MIN, TICKS_PER_SESSION, held_until_ns

MS = 1_000_000


@pytest.mark.parametrize("session_ms", [SESSION_MS_MIN, 1_001, 10_000, SESSION_MS_MAX])
def test_heartbeats_are_answered_at_ticks_well_within_the_session(session_ms: int) -> None:
    session_ns = session_ms * MS
    asked = [1_000_000_007 + number * session_ns // 1000 for number in range(1000)]
    held = [held_until_ns(heard_ns, session_ns) - heard_ns for heard_ns in asked]
    assert min(held) >= session_ns // 3
    # Until the answer to the next one a member is sure to be one by what it asked before.
    assert 2 * max(held) < 0.8 * session_ns
    answered = {heard_ns + pause_ns for heard_ns, pause_ns in zip(asked, held, strict=True)}
    assert len(answered) <= TICKS_PER_SESSION + 1

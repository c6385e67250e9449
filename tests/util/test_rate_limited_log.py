"""RateLimitedLog: one line per interval, and one after a reset."""

from __future__ import annotations

from typing import Any

from mqproc.roles.role_log import RateLimitedLog


def test_rate_limited_log_writes_one_line_per_interval() -> None:
    lines: list[tuple[str, Any]] = []
    log = RateLimitedLog(lambda event, **fields: lines.append((event, fields)), interval_ns=100)
    assert [log.write(now_ns, "waits", at=now_ns) for now_ns in (0, 99, 100, 150, 250)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert lines == [("waits", {"at": 0}), ("waits", {"at": 100}), ("waits", {"at": 250})]


def test_rate_limited_log_writes_again_after_a_reset() -> None:
    lines: list[str] = []
    log = RateLimitedLog(lambda event, **_fields: lines.append(event), interval_ns=100)
    log.write(0, "first")
    log.reset()
    assert log.write(1, "second")
    assert lines == ["first", "second"]

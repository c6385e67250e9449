"""Log lines: JSON objects off a terminal, text on one, limited repeats and error counts."""

from __future__ import annotations

import io
import json
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

import mqproc.roles
from mqproc.config.options import LogFormat
from mqproc.roles import role_log as log
from mqproc.roles.role_log import RateLimitedLog, RepeatLimit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_line_starts_with_the_common_fields() -> None:
    stream = io.StringIO()
    log.configure("writer", stream)
    log.get_logger().warning("segment not ready", waited_ms=3)
    line = stream.getvalue()
    assert line.count("\n") == 1
    found = json.loads(line)
    assert list(found) == ["ts", "level", "role", "pid", "event", "waited_ms"]
    assert (found["level"], found["role"], found["pid"]) == ("warning", "writer", os.getpid())
    assert (found["event"], found["waited_ms"]) == ("segment not ready", 3)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", found["ts"])


def test_json_line_has_the_traceback_as_a_field() -> None:
    stream = io.StringIO()
    log.configure("writer", stream)
    try:
        raise ValueError("what happened")
    except ValueError:
        log.get_logger().exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: what happened" in json.loads(line)["exception"]


def test_log_to_terminal_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    log.configure("writer", stream)
    log.get_logger().warning("segment not ready", waited_ms=3)
    assert "segment not ready" in stream.getvalue()
    assert "waited_ms=3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_stack_is_lines_in_text_and_a_field_in_json() -> None:
    text, stack = io.StringIO(), 'Fatal Python error: Aborted\n  File "writer.py", line 7 in do_work'
    log.configure("supervisor", text, log_format=LogFormat.HUMAN)
    log.get_logger().error("a role crashed", crashed_role="writer", trace=stack)
    first, *rest = text.getvalue().splitlines()
    assert "a role crashed" in first
    assert "crashed_role=writer" in first
    assert [line for line in rest if line] == stack.splitlines()
    fields = io.StringIO()
    log.configure("supervisor", fields, log_format=LogFormat.JSON)
    log.get_logger().error("a role crashed", trace=stack)
    assert json.loads(fields.getvalue())["trace"] == stack


def test_log_format_option_overrides_the_terminal() -> None:
    stream, terminal = io.StringIO(), Terminal()
    log.configure("writer", stream, log_format=LogFormat.HUMAN)
    log.get_logger().warning("segment not ready", waited_ms=3)
    assert "segment not ready" in stream.getvalue()
    assert "waited_ms=3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    log.configure("writer", terminal, log_format=LogFormat.JSON)
    log.get_logger().warning("segment not ready", waited_ms=3)
    assert json.loads(terminal.getvalue())["waited_ms"] == 3


def test_log_omits_debug() -> None:
    stream = io.StringIO()
    log.configure("writer", stream)
    log.get_logger().debug("detail")
    assert not stream.getvalue()


def test_repeat_limit_suppresses_and_counts_repeats() -> None:
    now = 0.0
    limit = RepeatLimit(burst=3, window_s=10.0, now=lambda: now)

    def passed(event: str) -> bool:
        try:
            limit(None, "warning", {"event": event})
        except structlog.DropEvent:
            return False
        return True

    assert [passed("full") for _ in range(5)] == [True, True, True, False, False]
    assert passed("another event")
    now = 10.0
    assert limit(None, "warning", {"event": "full"}) == {"event": "full", "left_out": 2}


def test_repeat_limit_memory_is_bounded() -> None:
    limit = RepeatLimit()
    for number in range(10_000):
        limit(None, "info", {"event": str(number)})
    assert len(limit._seen) <= 512


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_log_line_cut_by_full_disk_is_ended_by_the_next(tmp_path: Path) -> None:
    """Two processes share the file: the next line may come from either."""
    file = tmp_path / "log.jsonl"
    with file.open("a+") as stream:
        log.configure("writer", stream)
        log.get_logger().info("before")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))
        try:
            log.get_logger().info("cut")
            log.get_logger().info("lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if (pid := os.fork()) == 0:
            log.configure("query", stream)
            log.get_logger().info("behind")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        log.get_logger().info("at the end")
    first, cut, *others = file.read_text().splitlines()
    assert json.loads(first)["event"] == "before"
    assert len(cut) == 10
    assert [json.loads(line)["event"] for line in others] == ["behind", "at the end"]


# Error counts


_LOGS = re.compile(r"log(?:ger\(\))?\.(?:error|exception)\(")


def test_error_log_calls_are_counted() -> None:
    """Roles log errors through the methods of `role.py` that count them."""
    folder = Path(mqproc.roles.__file__).parent
    direct = [
        (path.relative_to(folder).as_posix(), line.strip())
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text().splitlines()
        if _LOGS.search(line)
    ]
    assert [line for name, line in direct if name != "role.py"] == []
    assert len([name for name, _ in direct if name == "role.py"]) == 2


# RateLimitedLog
# One line per interval, and one after a reset.


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

"""Times and durations: all input forms, output with the zone."""

from __future__ import annotations

import threading

import click
import pytest

from mqproc.cli import times
from mqproc.cli.options import SECONDS
from tests.support.command_line import call
from tests.support.group import Group

NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("15m", NOW - 900_000),
        ("2h", NOW - 7_200_000),
        ("1h30m", NOW - 5_400_000),
        ("500ms", NOW - 500),
        ("1.5s", NOW - 1500),
        ("1700000000123", 1_700_000_000_123),
        ("2026-11-21T10:00:00Z", 1_795_255_200_000),
        ("2026-11-21T10:00:00.250+01:00", 1_795_251_600_250),
        ("2026-11-21T10:00Z", 1_795_255_200_000),
    ],
)
def test_times_are_parsed(text: str, expected: int) -> None:
    assert times.parse_time_ms(text, NOW) == expected


@pytest.mark.parametrize(
    "text", ["", "yesterday", "1700000000", "12", "15 m", "-15m", "2026-13-01", "99999999999999999"]
)
def test_time_invalid_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        times.parse_time_ms(text, NOW)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1795617351", "; seconds would be 1795617351000"),
        ("1795617351087999", "; microseconds would be 1795617351087"),
        ("1795617351087999999", "; nanoseconds would be 1795617351087"),
        ("12", "milliseconds"),
    ],
)
def test_time_in_another_unit_suggests_milliseconds(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"{hint}$"):
        times.parse_time_ms(text, NOW)


@pytest.mark.parametrize("text", ["99999999999999999999w", "9" * 400 + "ms", "9" * 5000 + "d"])
def test_duration_too_large_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'9+\w?' is longer than 53,375,995,583d$"):
        times.parse_duration_ms(text)


def test_times_survive_printing_and_reading() -> None:
    for time_ms in (1, 999, 1_700_000_000_123, NOW):
        assert times.parse_time_ms(times.format_time(time_ms)) == time_ms


def test_time_out_of_range_is_printed_as_number() -> None:
    assert times.format_time(0) == "-"
    assert times.format_time(-5) == "-5"
    assert times.format_time(1 << 62) == str(1 << 62)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(25e-6, "25 µs"), (0.0032, "3.2 ms"), (0.25, "250 ms"), (1.5, "1.50 s"), (42, "42.0 s"), (245, "4 m 05 s"),
     (7800, "2 h 10 m")],
)  # fmt: skip
def test_durations_have_three_figures(seconds: float, expected: str) -> None:
    assert times.format_duration(seconds) == expected


def test_duration_of_future_start_is_zero() -> None:
    assert times.format_duration(-3600) == "0 µs"


@pytest.mark.parametrize("text", ["9" * 400, "99999999999999999999w"])
def test_seconds_too_large_are_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is longer than 53,375,995,583d"):
        SECONDS.convert(text, None, None)
    assert SECONDS.convert("0.29", None, None) == 0.29


def test_timeout_may_exceed_the_system_limit(group: Group) -> None:
    """Sleeps and sockets are limited to 292 years, poll to 24 days."""
    assert SECONDS.convert("99999999999", None, None) == SECONDS.convert("900000d", None, None) == threading.TIMEOUT_MAX
    assert call("status", "--store", group.store, "--timeout", "99999999999").code == 0

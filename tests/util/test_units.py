"""Counted nouns, sizes, times, durations and delay levels as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.config.parse import load_options
from mqproc.errors import ConfigurationError
from mqproc.util import units
from mqproc.util.units import DELAY_LEVELS, DELAYS, DELAYS_MS, counted, delays_ms_of, exact_bytes, parse_size


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "record", "0 records"),
        (1, "record", "1 record"),
        (1200, "record", "1,200 records"),
        (1, "index entry", "1 index entry"),
        (2, "index entry", "2 index entries"),
        (3, "key", "3 keys"),
    ],
)
def test_counted_noun_has_plural_form(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_size_accepts_unit() -> None:
    assert [parse_size(text) for text in ("17", "64KiB", "10MB", "1g")] == [17, 65_536, 10_000_000, 1 << 30]
    with pytest.raises(ValueError, match="'64 elephants' is not a size"):
        parse_size("64 elephants")


@pytest.mark.parametrize("size", [0, -1, 1023, 64 << 10, 10_000_000, 1 << 30, 3 << 40, (1 << 40) + 1])
def test_exact_bytes_are_read_again_as_size(size: int) -> None:
    assert size < 0 or parse_size(exact_bytes(size)) == size
    assert [exact_bytes(each) for each in (0, -1, 65_536, 4096 * 3)] == ["0", "-1", "64KiB", "12KiB"]


# Delay levels
# `message_delay_level`: RocketMQ's default and invalid lists.


def test_delay_levels_default_equals_rocketmq() -> None:
    assert delays_ms_of(Options().message_delay_level) == DELAYS_MS
    seconds = [1, 5, 10, 30, *(60 * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120))]
    assert [1000 * each for each in seconds] == list(DELAYS_MS)
    assert len(DELAYS_MS) == DELAY_LEVELS


@pytest.mark.parametrize(
    ("text", "delays_ms"),
    [
        ("5s 8s", (5_000, 8_000)),
        ("  1d\t2h  3m ", (86_400_000, 7_200_000, 180_000)),
        ("0s", (0,)),
        ("10s 5s", (10_000, 5_000)),
        (" ".join(["40d"] * 18), (40 * 86_400_000,) * 18),
    ],
)
def test_delay_levels_units_are_s_m_h_d(text: str, delays_ms: tuple[int, ...]) -> None:
    assert delays_ms_of(text) == delays_ms


@pytest.mark.parametrize(
    "text", ["", "  ", "5", "s", "5 s", "1s,5s", "-1s", "1.5s", "1S", "5ms", "٣s", "41d", "9999999999s", DELAYS + " 3h"]
)
def test_delay_levels_invalid_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"message_delay_level = .* is out of range: from 1 to 18 delays"):
        delays_ms_of(text)
    with pytest.raises(ConfigurationError, match="message_delay_level"):
        load_options(flags=[f"message_delay_level={text}"], environment={})


def test_delay_levels_are_read_from_broker_conf(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("messageDelayLevel=5s 8s\n")
    assert load_options(conf, environment={}).message_delay_level == "5s 8s"


# Times and durations

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
    assert units.parse_time_ms(text, NOW) == expected


@pytest.mark.parametrize(
    "text", ["", "yesterday", "1700000000", "12", "15 m", "-15m", "2026-13-01", "99999999999999999"]
)
def test_time_invalid_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        units.parse_time_ms(text, NOW)


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
        units.parse_time_ms(text, NOW)


@pytest.mark.parametrize("text", ["99999999999999999999w", "9" * 400 + "ms", "9" * 5000 + "d"])
def test_duration_too_large_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'9+\w?' is longer than 53,375,995,583d$"):
        units.parse_duration_ms(text)


def test_times_survive_printing_and_reading() -> None:
    for time_ms in (1, 999, 1_700_000_000_123, NOW):
        assert units.parse_time_ms(units.format_time(time_ms)) == time_ms


def test_time_out_of_range_is_printed_as_number() -> None:
    assert units.format_time(0) == "-"
    assert units.format_time(-5) == "-5"
    assert units.format_time(1 << 62) == str(1 << 62)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(25e-6, "25 µs"), (0.0032, "3.2 ms"), (0.25, "250 ms"), (1.5, "1.50 s"), (42, "42.0 s"), (245, "4 m 05 s"),
     (7800, "2 h 10 m")],
)  # fmt: skip
def test_durations_have_three_figures(seconds: float, expected: str) -> None:
    assert units.format_duration(seconds) == expected


def test_duration_of_future_start_is_zero() -> None:
    assert units.format_duration(-3600) == "0 µs"

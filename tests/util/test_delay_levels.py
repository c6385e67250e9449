"""`message_delay_level`: RocketMQ's text, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.config.parse import load_options
from mqproc.errors import ConfigurationError
from mqproc.util.units import DELAY_LEVELS, DELAYS, DELAYS_MS, delays_ms_of


def test_rocketmqs_own_are_the_default() -> None:
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
def test_units_are_seconds_minutes_hours_and_days(text: str, delays_ms: tuple[int, ...]) -> None:
    assert delays_ms_of(text) == delays_ms


@pytest.mark.parametrize(
    "text", ["", "  ", "5", "s", "5 s", "1s,5s", "-1s", "1.5s", "1S", "5ms", "٣s", "41d", "9999999999s", DELAYS + " 3h"]
)
def test_what_is_no_list_of_delays_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"message_delay_level = .* is out of range: from 1 to 18 delays"):
        delays_ms_of(text)
    with pytest.raises(ConfigurationError, match="message_delay_level"):
        load_options(flags=[f"message_delay_level={text}"], environment={})


def test_broker_conf_may_say_them(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("messageDelayLevel=5s 8s\n")
    assert load_options(conf, environment={}).message_delay_level == "5s 8s"

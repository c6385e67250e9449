"""The timer's check page: detection of clock changes and missing timestamps."""

from __future__ import annotations

import pytest

from mqproc.layout.timer_files import CLOCK_STEP_MAX_MS, TimerCheck

NOW_MS = 1_795_608_000_000
HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("read_ms", "written_ms", "is_ahead"),
    [
        (0, 0, False),
        (NOW_MS, NOW_MS, False),
        (NOW_MS, NOW_MS - HOUR_MS, False),  # The clock was set back after a delivery.
        (NOW_MS + HOUR_MS, NOW_MS + HOUR_MS, False),  # It was set back later.
        (NOW_MS, NOW_MS - CLOCK_STEP_MAX_MS, False),
        (NOW_MS, NOW_MS - CLOCK_STEP_MAX_MS - 1, True),
        (NOW_MS + CLOCK_STEP_MAX_MS + 1, NOW_MS + CLOCK_STEP_MAX_MS, True),
        (NOW_MS, 0, False),  # A page without a write time.
        (NOW_MS + CLOCK_STEP_MAX_MS + 1, 0, True),
    ],
)
def test_check_is_ahead_beyond_maximum_clock_step(read_ms: int, written_ms: int, is_ahead: bool) -> None:
    assert TimerCheck(read_ms, timestamp_ms=written_ms).is_ahead(NOW_MS) is is_ahead

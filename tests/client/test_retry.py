"""Lasting outages are logged, rarely, while requests are repeated."""

from __future__ import annotations

import logging

import pytest

from mqproc.client.retry import AGAIN_S, QUIET_S, ConnectionLost, OutageLog, RetryPolicy
from mqproc.errors import RequestTimeoutError, TooManyConnectionsError

POLICY = RetryPolicy(jitter=0.0)
FULL = TooManyConnectionsError("query has 8 clients", hint_ms=400)


class Clock:
    """Time that a test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outage(clock: Clock) -> OutageLog:
    return OutageLog(logging.getLogger("mqproc.consumer"), "fetching", POLICY, clock)


def test_pauses_grow_and_are_never_shorter_than_the_server_asked_for(outage: OutageLog) -> None:
    lost = ConnectionLost("closed", taken=False)
    assert [outage.failed(lost) for _ in range(3)] == [0.001, 0.002, 0.004]
    assert outage.failed(FULL) == 0.4
    outage.over()
    assert outage.failed(lost) == 0.001


def test_outage_log_skips_restarts_and_reports_outages_rarely(
    outage: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mqproc.consumer"):
        outage.failed(FULL)
        clock.now_s += QUIET_S - 0.1
        outage.failed(FULL)
        outage.over()
        outage.failed(FULL)
        clock.now_s += QUIET_S
        outage.failed()
        assert not caplog.messages
        for _ in range(10):
            outage.failed(FULL)
        assert caplog.messages == ["fetching has failed for 2 s, and is retried: query has 8 clients"]
        clock.now_s += AGAIN_S
        outage.failed(ConnectionLost("refused", taken=False, connected=False))
        outage.over()
        outage.over()
    assert caplog.messages[1].startswith("fetching has failed for 62 s, and is retried: refused; no group serves")
    assert caplog.messages[2:] == ["fetching works again"]


def test_outage_log_starts_again_after_a_long_connection(
    outage: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    lost = ConnectionLost("closed", taken=False)
    for _ in range(3):
        outage.failed(lost, connected_s=30.0)
        clock.now_s += 30.0
    assert not caplog.messages
    outage.failed(RequestTimeoutError("no answer"), connected_s=30.0)
    assert caplog.messages == ["fetching has failed for 30 s, and is retried: no answer"]

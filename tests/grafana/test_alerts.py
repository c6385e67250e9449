"""Each alert fires for its cause on a real group, and clears after the fix.

All scenarios run in parallel, with the durations of the rules divided by thirty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from grafana.source.rules import alerts
from grafana.source.settings import Durations
from tests.grafana.scenarios import KINDS, Prometheus, Scenario, needs_prometheus, scenarios

pytestmark = [needs_prometheus, pytest.mark.timeout(900)]

FIRE_S = 250.0
CLEAR_S = 250.0
ALL = [(alert, kind) for kind in KINDS for alert in sorted(kind.alerts)]


@dataclass
class Story:
    """Alerts seen: (alert, scenario's port)."""

    ports: dict[str, str]
    fired: set[tuple[str, str]] = field(default_factory=set)
    left: set[tuple[str, str]] = field(default_factory=set)
    """Those that still fire at the end."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("alerts")
    running = list(scenarios(folder))
    try:
        for each in running:
            each.start()
        with (
            Prometheus(folder / "prometheus", [each.port for each in running]) as prometheus,
            ThreadPoolExecutor(len(running)) as pool,
        ):
            seen = live(prometheus, running, pool)
        yield seen
    finally:
        for each in running:
            each.close()


def poll_while(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline:
        time.sleep(0.3)


def live(prometheus: Prometheus, running: list[Scenario], pool: ThreadPoolExecutor) -> Story:
    """Cause, watch, fix, watch."""
    story = Story({each.name: str(each.port) for each in running})
    expected = {(alert, str(each.port)) for each in running for alert in each.alerts}
    # Result of the cure.
    later = {(alert, port) for alert, port in expected if alert in ("MqprocDown", "MqprocSyncFailed")}
    prometheus.wait(lambda: prometheus.targets_up() == len(running), "all groups are scraped")

    def look() -> set[tuple[str, str]]:
        firing = prometheus.firing() & expected
        story.fired |= firing
        return firing

    causes = [pool.submit(each.cause) for each in running]
    poll_while(lambda: look() is not None and bool(expected - later - story.fired), FIRE_S)
    for cause in causes:
        cause.result(60)
    cures = [pool.submit(each.cure, lambda alert, port=str(each.port): (alert, port) in look()) for each in running]
    poll_while(lambda: bool(look()) or not all(cure.done() for cure in cures), CLEAR_S)
    for cure in cures:
        cure.result(60)
    story.left = look()
    return story


def test_alerts_have_a_cause() -> None:
    assert {alert for alert, _ in ALL} == {alert.name for alert in alerts(Durations())}


@pytest.mark.parametrize(("alert", "kind"), ALL, ids=[f"{alert} {kind.name}" for alert, kind in ALL])
def test_alert_fires_for_its_cause_and_clears(story: Story, alert: str, kind: type[Scenario]) -> None:
    if kind.name not in story.ports:
        pytest.skip(f"{kind.name}: a disk of one's own needs root")
    made = (alert, story.ports[kind.name])
    assert made in story.fired, f"of {kind.name} fired {sorted(name for name, port in story.fired if port == made[1])}"
    assert made not in story.left

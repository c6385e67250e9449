"""Consumer lag in seconds: correct for every queue, with a bounded number of look-ups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from mqproc.metrics import groups
from mqproc.metrics.groups import OTHERS, GroupLabels, GroupLag, GroupLags
from mqproc.store.offsets.offset_store import OffsetStore
from tests.support.store_builders import LiveStore

QUEUES = 10
AT_ONCE = 4
HOUR_MS = 3_600_000


class Lags:
    """A store with one group in every queue of a topic; each queue's messages are an hour apart."""

    def __init__(self, root: Path) -> None:
        self.store = LiveStore(root)
        engine = self.store.engine
        now_ms = int(time.time() * 1000)
        for hours in (3, 2, 1):
            for queue_id in range(QUEUES):
                # The queue with the highest id has the oldest messages.
                at_ms = now_ms - hours * HOUR_MS - queue_id * 60_000
                self.store.append("T", [b"body"], at_ms, queues=QUEUES, fixed_queue=queue_id)
        self.store.dispatch()
        self.progress = OffsetStore(engine.io, engine.paths, engine.io, lambda event, **figures: None)
        self.reader = GroupLags(engine.io, engine.paths, engine.options, engine.words, engine.table)

    def stand(self, offset: int, group: str = "g") -> None:
        for queue_id in range(QUEUES):
            self.progress.set(group, "T", queue_id, offset)

    def look(self) -> GroupLag:
        (found,) = [lag for lag in self.reader.figures() if lag.group == "g"]
        return found


@pytest.fixture
def lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lags]:
    monkeypatch.setattr(groups, "TIMES_MAX", AT_ONCE)
    monkeypatch.setattr(groups, "REST_FACTOR", 0)
    made = Lags(tmp_path)
    yield made
    made.progress.close()
    made.store.close()


def hours(lag: GroupLag) -> float:
    assert lag.seconds is not None
    return lag.seconds / 3600


def test_group_lag_has_no_age_until_all_queues_are_read(lags: Lags) -> None:
    lags.stand(0)
    assert [lags.look().seconds for _ in range(2)] == [None, None]
    found = lags.look()
    assert found.messages == 3 * QUEUES
    assert hours(found) == pytest.approx(3 + (QUEUES - 1) / 60, abs=0.01)


def test_group_lag_idle_group_needs_no_read(lags: Lags, monkeypatch: pytest.MonkeyPatch) -> None:
    lags.stand(0)
    for _ in range(3):
        lags.look()
    monkeypatch.setattr(groups, "QueueTimes", lambda *given: pytest.fail("looked up again"))
    assert hours(lags.look()) == pytest.approx(3 + (QUEUES - 1) / 60, abs=0.01)


def test_group_lag_keeps_old_age_until_all_queues_are_read(lags: Lags) -> None:
    lags.stand(0)
    for _ in range(3):
        lags.look()
    lags.stand(2)
    ages = [hours(lags.look()) for _ in range(3)]
    assert ages[0] == pytest.approx(3 + (QUEUES - 1) / 60, abs=0.01)
    assert ages[2] == pytest.approx(1 + (QUEUES - 1) / 60, abs=0.01)
    assert ages == sorted(ages, reverse=True)


def test_group_lag_reads_new_groups_first(lags: Lags) -> None:
    lags.stand(0)
    for _ in range(3):
        lags.look()
    lags.stand(1)
    lags.progress.set("new", "T", 0, 0)
    lags.look()
    (new,) = [lag for lag in lags.reader.figures() if lag.group == "new"]
    assert hours(new) == pytest.approx(3, abs=0.01)


def test_group_lag_at_end_is_zero_seconds(lags: Lags) -> None:
    lags.stand(3)
    assert (lags.look().messages, lags.look().seconds) == (0, 0.0)


def test_group_lag_unreadable_message_keeps_other_values(lags: Lags) -> None:
    """A read error, a file truncated under a running group: logged; other values are correct."""
    (file,) = (lags.store.engine.paths.consume_queue / "T" / str(QUEUES - 1)).iterdir()
    file.rename(file.with_suffix(".kept"))
    file.symlink_to(file)
    lags.stand(0)
    with structlog.testing.capture_logs() as logged:
        found = [lags.look() for _ in range(4)][-1]
    assert found.messages == 3 * QUEUES
    assert hours(found) == pytest.approx(3 + (QUEUES - 2) / 60, abs=0.01)
    assert {line["event"] for line in logged} == {"a message's age is not known"}
    assert "Too many levels of symbolic links" in logged[0]["error"]
    file.unlink()
    file.with_suffix(".kept").rename(file)
    assert hours([lags.look() for _ in range(4)][-1]) == pytest.approx(3 + (QUEUES - 1) / 60, abs=0.01)


def test_group_consumed_counter_survives_reset(lags: Lags) -> None:
    """Prometheus treats a decreasing counter as a restart, and its whole value as new messages.

    A recreated group does restart at 0.
    """
    lags.stand(1)
    assert lags.look().consumed == 0, "consumption before the first look is unknown"
    counts = []
    for offset in (3, 0, 2):
        lags.stand(offset)
        counts.append(lags.look().consumed)
    assert counts == [2 * QUEUES, 2 * QUEUES, 4 * QUEUES]
    lags.progress.delete_group("g")
    assert lags.reader.figures() == []
    lags.stand(2)
    assert lags.look().consumed == 0
    lags.stand(3)
    assert lags.look().consumed == QUEUES


def test_group_consumed_sum_above_limit_never_decreases(lags: Lags) -> None:
    def look() -> dict[str, int]:
        return {lag.group: lag.consumed for lag in lags.reader.bounded(lags.reader.figures(), 1)}

    lags.stand(0, "g")
    lags.stand(0, "h")
    assert look() == {"g": 0, OTHERS: 0}
    lags.stand(2, "h")
    lags.stand(1, "a")
    assert look() == {"g": 0, OTHERS: 2 * QUEUES}
    lags.progress.delete_group("h")
    lags.stand(3, "a")
    assert look() == {"g": 0, OTHERS: 4 * QUEUES}


def test_group_labels_are_bounded_and_stay() -> None:
    labels = GroupLabels(2)
    assert labels.of(["b", "c"]) == {"b": "b", "c": "c"}
    assert labels.of(["a", "b", "c", "c"]) == {"a": OTHERS, "b": "b", "c": "c"}
    assert labels.of(["a", "c"]) == {"a": OTHERS, "c": "c"}
    assert labels.of(["a", "c", "d"]) == {"a": OTHERS, "c": "c", "d": "d"}


def test_group_lag_frees_deleted_groups(lags: Lags) -> None:
    def look() -> dict[str, int]:
        return {lag.group: lag.consumed for lag in lags.reader.bounded(lags.reader.figures(), 1)}

    for number in range(3):
        lags.stand(0, f"g{number}")
        lags.stand(0, f"h{number}")
        assert len(look()) == 2
        lags.stand(1, f"h{number}")
        assert look() == {f"g{number}": 0, OTHERS: (number + 1) * QUEUES}
        lags.progress.delete_group(f"g{number}")
        lags.progress.delete_group(f"h{number}")
        assert look() == {OTHERS: (number + 1) * QUEUES}
    assert not lags.reader._consumed
    lags.stand(0, "g0")
    lags.stand(0, "g1")
    assert look() == {"g0": 0, OTHERS: 3 * QUEUES}

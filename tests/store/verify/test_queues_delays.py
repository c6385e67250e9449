"""Stores with their own delay levels: units are checked against these, configured or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.recovery.repair import UnitRepair
from mqproc.store.verify.inventory import take_inventory
from mqproc.store.verify.queues import detect_delays
from mqproc.store.verify.verifier import sizes_of
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.util.units import DELAYS
from tests.support.store_builders import Engine
from tests.support.store_checks import damage_of, overwrite, recover, verify

LEVELS = "7s 90s"
STORED_MS = 1_700_000_000_000
COUNT = 9
# The configured levels: the store's, RocketMQ's, and others.
CONFIGURED = pytest.mark.parametrize("levels", [LEVELS, DELAYS, "1s 2s 3s"])


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """A stopped store with messages of both levels."""
    engine = Engine(tmp_path / "store", message_delay_level=LEVELS)
    for level in (1, 2):
        for number in range(COUNT):
            place = {"fixed_queue": level - 1, "parts": (b"DELAY\x01%d\x02" % level, b"", b"", b"")}
            engine.append(SCHEDULE_TOPIC, [b"later"], STORED_MS + number, queues=2, **place)
    engine.segments.close()
    recover(engine.paths.root, engine.options)
    return engine


def queue_file(engine: Engine, level: int) -> Path:
    return engine.paths.queue(SCHEDULE_TOPIC, level - 1) / f"{0:020d}"


def times(engine: Engine, level: int) -> list[int]:
    """The due times in the units of a level."""
    units = as_units(queue_file(engine, level).read_bytes()[: COUNT * UNIT_SIZE])
    return [int(unit["tags_code"]) for unit in units]


def set_time(engine: Engine, level: int, place: int, time_ms: int) -> None:
    overwrite(queue_file(engine, level), place * UNIT_SIZE + 12, time_ms.to_bytes(8, "big"))


@CONFIGURED
def test_units_of_own_delay_levels_are_no_damage(engine: Engine, levels: str) -> None:
    assert times(engine, 2) == [STORED_MS + number + 90_000 for number in range(COUNT)]
    assert damage_of(verify(engine.paths.root, message_delay_level=levels)) == []


@CONFIGURED
@pytest.mark.parametrize("wrong_by_ms", [1, 1000])
def test_unit_with_wrong_due_time_is_found_and_repaired(engine: Engine, levels: str, wrong_by_ms: int) -> None:
    right = times(engine, 2)
    set_time(engine, 2, 4, right[4] + wrong_by_ms)
    found = damage_of(verify(engine.paths.root, message_delay_level=levels))
    name = str(queue_file(engine, 2).relative_to(engine.paths.root))
    assert [(row.kind, row.file, row.offset) for row in found] == [("unit_wrong", name, 4 * UNIT_SIZE)]

    options = type(engine.options)(message_delay_level=levels)
    repair = UnitRepair(StoreIO(), engine.paths, options, 0, engine.written)
    assert repair.run([(SCHEDULE_TOPIC, 1)], {(SCHEDULE_TOPIC, 1): 1 << 30}) == 1
    repair.close()
    assert times(engine, 2) == right


def test_detect_delays_ignores_impossible_single_unit(engine: Engine) -> None:
    paths = engine.paths

    def found(levels: str) -> tuple[int, ...]:
        inventory = take_inventory(StoreIO(), paths, sizes_of(StoreIO(), paths, engine.options))
        return detect_delays(StoreIO(), inventory, levels)

    assert found("1s") == found("7s 2s") == (7_000, 90_000)
    for place in range(COUNT):
        set_time(engine, 2, place, STORED_MS + place + 90_001)
    assert found("1s 5s") == (7_000, 5_000)
    for place in range(COUNT):
        set_time(engine, 2, place, STORED_MS + place + 3_000)
    assert found("1s 5s") == (7_000, 3_000)
    # One unit with the configured delay is enough: the others may date from other levels.
    set_time(engine, 2, 0, STORED_MS + 5_000)
    assert found("1s 5s") == (7_000, 5_000)

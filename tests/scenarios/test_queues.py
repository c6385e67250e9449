"""ConsumeQueues: empty queues, first and last units, iteration, units below the minimum."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout.record_codec import decode_records, host_bytes
from mqproc.store.consumequeue.bounds import UNIT_DTYPE, as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.reader import StoreReader
from mqproc.store.retention.plan import ExpiredQueueFiles
from mqproc.types import PullStatus
from tests.roles.rigs import Rig
from tests.support.store_builders import BORN_HOST, EVERYTHING, LiveStore
from tests.support.store_checks import recover


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ConsumeQueueFiles]:
    """Files of 40 units."""
    made = ConsumeQueueFiles(StoreIO(), tmp_path / "consumequeue", 800, write=True)
    yield made
    made.close()


def write_units(files: ConsumeQueueFiles, count: int, size: int) -> None:
    """Write units of queue T/0 for consecutive records of one size."""
    units = np.zeros(count, UNIT_DTYPE)
    units["physical_offset"] = np.arange(count) * size
    units["size"] = size
    files.write_run("T", 0, 0, units.view(np.uint8))


@pytest.mark.parametrize(("size", "units"), [(10, 1), (20, 1), (21, 2), (40, 2)])
def test_queue_file_of_any_size_holds_whole_units(tmp_path: Path, size: int, units: int) -> None:
    store = LiveStore(tmp_path, mapped_file_size_consume_queue=size)
    store.append("T", [b"%d" % number for number in range(5)], queues=1)
    store.dispatch()
    folder = store.engine.paths.queue("T", 0)
    lengths = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert lengths == {f"{20 * units * number:020d}": 20 * units for number in range(-(-5 // units))}
    assert [message.body for message in store.messages("T")] == [b"0", b"1", b"2", b"3", b"4"]
    store.close()


def test_empty_queue_has_no_messages(tmp_path: Path) -> None:
    store = LiveStore(tmp_path)
    store.engine.table.create_queue("T", 0)
    bounds = store.reading.queues.bounds("T", 0)
    assert bounds is not None
    assert (bounds.min_offset, bounds.max_offset) == (0, 0)
    for offset in (-1, 0, 1):
        assert store.reading.pull("T", 0, offset, 1, EVERYTHING).status is PullStatus.NO_MESSAGE_IN_QUEUE
    assert store.files.extent("T", 0).max_offset == 0
    store.close()


def test_queue_of_100_units_is_read_in_order(files: ConsumeQueueFiles) -> None:
    """Unit n points to n × 1,000 with size 1,000; offset −1 and the maximum have no unit."""
    write_units(files, 100, 1000)
    extent = files.extent("T", 0)
    assert (extent.first_offset, extent.max_offset, extent.last_physical_end) == (0, 100, 100_000)
    units = as_units(files.read_units("T", 0, 0, 100))
    assert units["physical_offset"].tolist() == [number * 1000 for number in range(100)]
    assert set(units["size"].tolist()) == {1000}
    for number in (0, 99):
        (unit,) = as_units(files.read_units("T", 0, number, 1)).tolist()
        assert unit == (number * 1000, 1000, 0)
    with pytest.raises(FileNotFoundError):
        files.read_units("T", 0, -1, 1)
    (behind,) = as_units(files.read_units("T", 0, 100, 1)).tolist()
    assert behind == (0, 0, 0), "no unit"


@pytest.fixture
def table(tmp_path: Path) -> Iterator[QueueTable]:
    made = QueueTable.create(StoreIO(), tmp_path / "queues", 16)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("known", "log_minimum", "first"),
    [
        (0, 0, 0),
        (1, 2000, 20),
        (20, 2000, 20),
        (0, 2001, 21),
        (0, 999_900, 9_999),
        (9_999, 1_000_000, 10_000),
        (10_000, 1_000_000, 10_000),
    ],
)
def test_queue_minimum_follows_log_minimum(
    files: ConsumeQueueFiles, table: QueueTable, tmp_path: Path, known: int, log_minimum: int, first: int
) -> None:
    """Of 10,000 messages of 100 bytes, 20 are below offset 2,000 and all below the log's end."""
    write_units(files, 10_000, 100)
    number = table.create_queue("T", 0, next_offset=10_000, min_offset=known)
    expired = ExpiredQueueFiles(StoreIO(), tmp_path / "consumequeue", files.file_bytes, table)
    assert expired.first_readable(number, "T", 0, log_minimum) == first
    expired.close()


@pytest.mark.parametrize("aborted", [False, True], ids=["clean", "abort"])
def test_queue_extension_units_stay_and_hide_no_message(tmp_path: Path, aborted: bool) -> None:
    """200 units hold addresses of extension units instead of tag codes.

    RocketMQ resolves the addresses; mqproc reads the records.
    """
    store = LiveStore(tmp_path)
    tags = ["even", "odd"] * 100
    hosts = (BORN_HOST, host_bytes("2001:db8::7", 5000))
    for number, tag in enumerate(tags):
        store.append("T", [b"%3d" % number], tags=[tag], queues=1, born_host=hosts[number % 2])
    store.dispatch()
    units = as_units(store.files.read_units("T", 0, 0, 200)).copy()
    units["tags_code"] = [-(1 << 63) + 32 * number for number in range(200)]
    store.files.write_run("T", 0, 0, units.view(np.uint8))
    extension = tmp_path / "consumequeue_ext/T/0/00000000000000000000"
    extension.parent.mkdir(parents=True)
    extension.write_bytes(bytes(32 * 200))
    if aborted:
        store.engine.paths.abort.write_text("1")
    options = store.options
    store.close()
    recover(tmp_path, options)
    with StoreReader(tmp_path, options) as reader:
        assert reader.reading.files.read_units("T", 0, 0, 200) == units.tobytes()
        for tag, wanted in (("even", range(0, 200, 2)), ("odd", range(1, 200, 2)), ("none", range(0))):
            pulled = reader.reading.pull("T", 0, 0, 200, 1 << 20, (tag,))
            assert [message.queue_offset for message in decode_records(pulled.records.data)] == list(wanted)
            assert reader.reading.first_candidate("T", 0, 7, [tag]) == 7


@pytest.mark.parametrize("aborted", [False, True], ids=["clean", "abort"])
def test_multi_dispatch_queues_survive_recovery(tmp_path: Path, aborted: bool) -> None:
    """RocketMQ put one message into `%LMQ%123` and `%LMQ%456` too.

    Only the units show this, so recovery keeps them.
    """
    rig = Rig(tmp_path)
    rig.dispatch(10)
    files = ConsumeQueueFiles(rig.io, rig.paths.consume_queue, rig.options.consume_queue_file_bytes, write=True)
    units = np.frombuffer(files.read_units("T", 0, 3, 4), np.uint8)
    for topic in ("%LMQ%123", "%LMQ%456"):
        files.write_run(topic, 0, 0, units)
    shutil.rmtree(rig.paths.own)
    if aborted:
        rig.paths.abort.write_text("1")
    Rig(tmp_path)
    files.close()
    table = QueueTable(rig.io, rig.paths.queues)
    for topic in ("%LMQ%123", "%LMQ%456"):
        assert files.read_units(topic, 0, 0, 4) == units.tobytes()
        number = table.find(topic, 0)
        assert (table.min_offset(number), table.max_offset(number)) == (0, 4)
    table.close()
    files.close()
    with StoreReader(tmp_path) as reader:
        found = reader.get_message("%LMQ%123", 0, 0)
    assert [message.queue_offset for message in found.messages] == [3, 4, 5, 6]

"""The table of append templates: added once, and cleared when it is full."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.config.options import Options
from mqproc.kernels import append_frame as frame
from mqproc.kernels import append_run as kernel
from mqproc.kernels.append_run import ITEMS, KEY_BYTES_MAX, NOT_READ, PREFIX_DIGITS, read_options
from mqproc.layout.frame import encode_header
from mqproc.store.commitlog import append_templates
from mqproc.store.commitlog.append_templates import (
    AppendTemplate,
    AppendTemplates,
    RenderedTemplate,
    render,
    topic_fields,
)
from mqproc.wire.operations import AppendRequest
from tests.support.store_builders import Engine

MAX_QUEUES = 64
HOST = bytes(range(8))
OPTIONS = Options()
NO_PARTS = (b"", b"", b"", b"")


class Table:
    """Append templates, addressed by request."""

    def __init__(self) -> None:
        self.templates = AppendTemplates(MAX_QUEUES, np.zeros(MAX_QUEUES, np.int64), 1)

    def add(
        self,
        request: AppendRequest,
        numbers: list[int] | range = range(1),
        parts: tuple[bytes, bytes, bytes, bytes] = NO_PARTS,
        prefix_size: int = 0,
    ) -> RenderedTemplate:
        """Add the template of `request`, for a topic with these queue numbers."""
        magic, block = topic_fields(request.topic)
        template = AppendTemplate(
            magic, block, np.array(numbers, np.int64), request.queue_id, parts, HOST, prefix_size, columns=5
        )
        rendered = render(template, OPTIONS, HOST, 1 << 20)
        self.templates.add(memoryview(msgspec.msgpack.encode(request)), template, rendered, answered=not request.oneway)
        return rendered

    def row(self, request: AppendRequest) -> int | None:
        """Return the row number of a request's template, None if it is not in the table."""
        options = np.frombuffer(bytearray(msgspec.msgpack.encode(request)), np.uint8)
        key = np.zeros(KEY_BYTES_MAX, np.uint8)
        size = int(read_options(options, 0, len(options), np.zeros(ITEMS, np.int64), 0, key))
        assert size != NOT_READ
        found = int(kernel.find_row(self.templates.run, self.templates.table, key, size))
        if found < 0:
            return None
        place, rest = divmod(found - kernel.ROWS_AT, kernel.ROW_WORDS)
        assert rest == 0
        return place

    def word(self, request: AppendRequest, word: int) -> int:
        """Return a word of a request's row."""
        place = self.row(request)
        assert place is not None
        return int(self.templates.run[kernel.ROWS_AT + place * kernel.ROW_WORDS + word])

    def constant(self, request: AppendRequest, word: int) -> int:
        """Return a word of the frame state that the template provides."""
        return self.word(request, kernel.CONSTANTS + word - frame.FIXED_QUEUE)

    def bytes_at(self, at: int, size: int) -> bytes:
        return self.templates.table[at : at + size].tobytes()

    @property
    def slots_taken(self) -> int:
        return int(np.count_nonzero(self.templates.run[kernel.SLOTS_AT : kernel.ROWS_AT]))


def request_of(number: int, text: str = "") -> AppendRequest:
    return AppendRequest(f"Topic-{number}", 1, tag=text)


def test_templates_add_twice_has_one_row() -> None:
    table = Table()
    first = AppendRequest("T", 1, bodies_bytes=5, born_timestamp_ms=7)
    for request in (first, first, AppendRequest("T", 9, bodies_bytes=70_000, born_timestamp_ms=8)):
        table.add(request)
        assert table.slots_taken == 1
        assert table.row(request) == 0
    assert table.row(AppendRequest("T", 1, keys_bytes=0)) is None
    table.add(AppendRequest("T", 1, keys_bytes=0))
    assert (table.slots_taken, table.row(first), table.row(AppendRequest("T", 1, keys_bytes=0))) == (2, 0, 1)


@pytest.mark.parametrize("topic", ["T", "é" * 100, "t" * 200])
@pytest.mark.parametrize("before", [0, 3])
def test_templates_row_matches_the_rendered_template(topic: str, before: int) -> None:
    table = Table()
    for number in range(before):
        table.add(request_of(number, "x" * number), range(10 * number, 10 * number + 4))
    request = AppendRequest(topic, 1, queue_id=2, oneway=before == 3, unique_prefix="A" * PREFIX_DIGITS)
    parts = (b"A\x01a\x02UNIQ_KEY\x01", b"\x02B\x01b\x02", b"C\x01\x02", b"D\x01ddd\x02")
    rendered = table.add(request, [40, 43, 41], parts, PREFIX_DIGITS)
    fixed = frame.CONSTANTS.unpack(rendered.constants)
    moved = frame.HEAD_AT, frame.TOPIC_AT, frame.PARTS_AT, frame.NUMBERS_AT
    for word, value in enumerate(fixed, frame.FIXED_QUEUE):
        assert word in moved or table.constant(request, word) == value
    head = table.bytes_at(table.constant(request, frame.HEAD_AT), table.constant(request, frame.HEAD_SIZE))
    block = table.bytes_at(table.constant(request, frame.TOPIC_AT), table.constant(request, frame.TOPIC_SIZE))
    assert head + block + parts[0] == rendered.before_id
    assert block == topic_fields(topic)[1].tobytes()
    for at, size, expected in (
        (kernel.BEFORE_AT, kernel.BEFORE_SIZE, parts[0]),
        (kernel.AFTER_AT, kernel.AFTER_SIZE, b"".join(parts[1:])),
    ):
        assert table.bytes_at(table.word(request, at), table.word(request, size)) == expected
    assert table.constant(request, frame.PARTS_AT) == kernel.SCRATCH_AT
    at = table.constant(request, frame.NUMBERS_AT)
    assert table.templates.queue_numbers[at : at + 3].tolist() == [40, 43, 41]
    assert table.word(request, kernel.ROUND) == 40
    assert table.word(request, kernel.COLUMNS) == 5
    assert table.word(request, kernel.ANSWERED) == (before != 3)


def test_templates_of_one_topic_share_queue_numbers() -> None:
    table = Table()
    one, same, other = AppendRequest("T", 1), AppendRequest("T", 1, tag="x"), AppendRequest("U", 1)
    table.add(one, range(4, 8))
    table.add(other, range(8, 11))
    table.add(same, range(4, 8))
    places = [table.constant(request, frame.NUMBERS_AT) for request in (one, same, other)]
    assert places == [0, 0, 4]
    assert table.templates.queue_numbers[:8].tolist() == [4, 5, 6, 7, 8, 9, 10, 0]


def test_templates_full_rows_evict_all_but_the_new_one() -> None:
    table = Table()
    for number in range(kernel.ROWS_MAX):
        table.add(request_of(number))
    assert [table.row(request_of(number)) for number in (0, kernel.ROWS_MAX - 1)] == [0, kernel.ROWS_MAX - 1]
    table.add(request_of(5))
    assert table.slots_taken == kernel.ROWS_MAX
    table.add(request_of(kernel.ROWS_MAX))
    assert [table.row(request_of(number)) for number in range(kernel.ROWS_MAX)] == [None] * kernel.ROWS_MAX
    assert (table.row(request_of(kernel.ROWS_MAX)), table.slots_taken) == (0, 1)


def test_templates_full_bytes_evict_all_but_the_new_one() -> None:
    table = Table()
    text = b"P\x01" + b"p" * 3000 + b"\x02"
    table.add(request_of(0), parts=(text, b"", b"", b""))
    number = 0
    while table.slots_taken == number + 1:
        assert number < kernel.ROWS_MAX
        number += 1
        table.add(request_of(number), parts=(text, b"", b"", b""))
    assert number > append_templates.TABLE_BYTES // 4000
    assert [table.row(request_of(other)) for other in range(number)] == [None] * number
    assert (table.row(request_of(number)), table.slots_taken) == (0, 1)
    at, size = (table.word(request_of(number), word) for word in (kernel.BEFORE_AT, kernel.BEFORE_SIZE))
    assert table.bytes_at(at, size) == text


def test_templates_full_queue_numbers_evict_all_but_the_new_one() -> None:
    table = Table()
    queues = append_templates.QUEUES_MAX // 2
    for number in range(2):
        table.add(request_of(number), range(number * queues, (number + 1) * queues))
    assert [table.row(request_of(number)) for number in range(3)] == [0, 1, None]
    table.add(AppendRequest("Topic-0", 1, flag=1), range(queues))
    assert [table.row(request_of(number)) for number in range(3)] == [0, 1, None]
    table.add(request_of(2), range(7, 10))
    assert [table.row(request_of(number)) for number in range(3)] == [None, None, 0]
    assert table.constant(request_of(2), frame.NUMBERS_AT) == 0
    assert table.templates.queue_numbers[:4].tolist() == [7, 8, 9, 3]


def test_templates_topic_with_too_many_queues_is_not_added() -> None:
    table = Table()
    table.add(request_of(0), range(append_templates.QUEUES_MAX))
    assert table.row(request_of(0)) == 0
    table.add(request_of(1), range(append_templates.QUEUES_MAX + 1))
    assert [table.row(request_of(number)) for number in range(2)] == [0, None]


@pytest.mark.parametrize("place", range(4))
def test_templates_with_too_much_text_are_not_added(place: int) -> None:
    def parts(size: int) -> tuple[bytes, bytes, bytes, bytes]:
        found = [b""] * 4
        found[place] = b"x" * size
        return found[0], found[1], found[2], found[3]

    table = Table()
    rendered = table.add(request_of(0))
    room = kernel.SCRATCH_BYTES - PREFIX_DIGITS - len(rendered.before_id)
    table.add(request_of(1), parts=parts(room + 1))
    assert [table.row(request_of(number)) for number in range(2)] == [0, None]
    table.add(request_of(2), parts=parts(room))
    assert [table.row(request_of(number)) for number in range(3)] == [0, None, 1]


def test_templates_options_unsupported_by_kernel_are_not_added() -> None:
    table = Table()
    for request in (AppendRequest("T", 1 << 63), AppendRequest("T", 1, tag="x" * KEY_BYTES_MAX)):
        table.add(request)
    assert table.slots_taken == 0


def test_templates_add_after_clear_uses_new_queue_count() -> None:
    table = Table()
    for queues in (2, 3):
        for number in range(3):
            table.add(request_of(number), range(10 * number, 10 * number + queues))
        assert [table.row(request_of(number)) for number in range(4)] == [0, 1, 2, None]
        for number in range(3):
            at = table.constant(request_of(number), frame.NUMBERS_AT)
            found = table.templates.queue_numbers[at : at + queues].tolist()
            assert found == [*range(10 * number, 10 * number + queues)]
        table.templates.clear()
        assert [table.row(request_of(number)) for number in range(3)] == [None] * 3
        assert table.slots_taken == 0


def test_templates_reused_row_publishes_its_own_queues(tmp_path: Path) -> None:
    engine = Engine(tmp_path)

    def append(topic: str) -> None:
        options = msgspec.msgpack.encode(AppendRequest(topic, 4))
        payload = bytes(16)
        frames = np.frombuffer(bytearray(encode_header(16, 1, len(options), 16) + options + payload), np.uint8)
        appender, templates = engine.appender, engine.appender.templates
        appender.add_template(memoryview(options), engine.plan(topic, [b""] * 4).template, answered=True)
        templates.begin(0, len(frames))
        templates.set_store_time(5)
        assert appender.add_run(frames, 5) == kernel.DONE

    append("A")
    engine.appender.templates.clear()
    append("B")
    engine.appender.write_out()
    engine.appender.publish()
    for topic in ("A", "B"):
        numbers = [engine.table.create_queue(topic, queue_id) for queue_id in range(4)]
        assert [engine.table.next_offset(number) for number in numbers] == [1, 1, 1, 1]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda queues: st.tuples(
            st.just(queues), st.lists(st.lists(st.integers(0, queues - 1), max_size=queues), max_size=40)
        )
    )
)
def test_templates_touched_queues_are_kept_within_bounds(queues_and_notes: tuple[int, list[list[int]]]) -> None:
    queues, notes = queues_and_notes
    templates = AppendTemplates(queues, np.zeros(queues, np.int64), 1)
    assert len(templates.touched) == 2 * queues
    touched: set[int] = set()
    for numbers in notes:
        templates.touch(np.array(numbers, np.int64))
        touched.update(numbers)
        count = int(templates.run[kernel.TOUCHED])
        assert count <= len(templates.touched)
        assert set(templates.touched[:count].tolist()) == touched
    templates.clear_touched()
    assert templates.run[kernel.TOUCHED] == 0
    assert templates.run[kernel.TOUCHED_TOPIC] == templates.run[kernel.ROW] == -1

"""What the writer counts, and that counting costs a message in a batch next to nothing."""

from __future__ import annotations

from mqproc.cli.bench.counting import counting_cost
from mqproc.layout import control as layout
from mqproc.layout import figures
from mqproc.process.append_figures import SLOW_NS, AppendFigures
from mqproc.shm.histogram import PER_SAMPLE, read_buckets
from mqproc.shm.words import Words

# The bar is 10 ns; a test's machine may be busy with other things, which costs processor time too.
BATCH_NS_MAX = 30.0


def test_batches_are_counted_at_once_and_single_sends_by_samples() -> None:
    words = Words(bytearray(layout.FILE_SIZE))
    counted = AppendFigures(words)
    counted.appended(1000 * 256, 1000)
    assert sum(read_buckets(words, figures.MESSAGE_SIZES).counts) == 1000
    for _ in range(10 * PER_SAMPLE):
        counted.appended(300, 1)
        counted.committed(50_000, 1)
    sizes, times = read_buckets(words, figures.MESSAGE_SIZES), read_buckets(words, figures.APPENDS)
    assert 1000 + 9 * PER_SAMPLE <= sum(sizes.counts) <= 1000 + 10 * PER_SAMPLE
    assert 9 * PER_SAMPLE <= sum(times.counts) <= 10 * PER_SAMPLE
    assert times.quantile(0.99) == 50e-6


def test_a_slow_append_is_counted_although_its_neighbours_are_sampled() -> None:
    words = Words(bytearray(layout.FILE_SIZE))
    counted = AppendFigures(words)
    for _ in range(5):
        counted.committed(50_000, 1)
    counted.committed(3 * SLOW_NS, 1)
    assert read_buckets(words, figures.APPENDS).total > 3 * SLOW_NS / 1e9


def test_counting_costs_a_message_of_a_batch_nanoseconds() -> None:
    assert counting_cost(128, pairs=5, steps=4000)["message_ns"] < BATCH_NS_MAX

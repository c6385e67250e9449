"""Appends are counted by the encoding kernel and timed by the loop's sampled steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.ipc.counters import read_buckets
from mqproc.kernels.append_frame import UNPUBLISHED_FRAMES
from mqproc.layout import control as layout
from mqproc.layout import histograms
from mqproc.roles.writer.role import AppendLatency
from mqproc.store.commitlog.takeover import take_over
from tests.support.store_builders import Engine


def counts(engine: Engine) -> tuple[int, int, int, float]:
    """Frames, messages, sizes counted, bytes counted."""
    sizes = read_buckets(engine.words, histograms.MESSAGE_SIZES)
    words = engine.words
    return words[layout.APPENDED_FRAMES], words[layout.APPENDED_MESSAGES], sum(sizes.counts), sizes.total


def test_append_counts_frames_messages_and_record_sizes(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.append("T", [b"x" * 10] * 3)
    engine.append("T", [b"x" * 10, b"x" * 5000])
    assert counts(engine) == (2, 5, 5, engine.written)
    sizes = read_buckets(engine.words, histograms.MESSAGE_SIZES)
    assert [(bound, count) for bound, count in zip(sizes.bounds, sizes.counts, strict=False) if count] == [
        (256, 4),
        (16384, 1),
    ]


def test_append_rolled_back_frames_are_not_counted(tmp_path: Path) -> None:
    """Neither those before the failed one nor its encoded part."""
    engine = Engine(tmp_path, segments_max=1)
    engine.append("T", [b"x" * 1000] * 10)
    published = counts(engine)
    engine.appender.add(engine.plan("T", [b"x" * 1000] * 10), 1_700_000_000_001)
    assert counts(engine)[:3] == (2, 20, 20)
    with pytest.raises(OSError, match="No space"):
        engine.appender.add(engine.plan("T", [b"x" * 1000] * 60), 1_700_000_000_001)
    assert counts(engine) == published
    engine.append("T", [b"x"])
    assert counts(engine)[:3] == (2, 11, 11)
    # Nothing is left to roll back.
    engine.appender.roll_back()
    assert counts(engine)[:3] == (2, 11, 11)


def test_append_unpublished_by_killed_writer_is_uncounted_at_takeover(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.append("T", [b"body"] * 4)
    published = counts(engine)
    engine.appender.add(engine.plan("T", [b"body"] * 3), 1_700_000_000_001)
    take_over(engine.io, engine.syncs, engine.words, engine.segments, engine.table, sync_flush=False)
    assert counts(engine) == published


def test_append_timed_step_counts_for_frames_before_it(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    times = AppendLatency(engine.words)
    for number in range(5):
        engine.append("T", [b"body"] * 3)
        engine.words[layout.WRITTEN_NS] = number
    times.timed(4, 60_004, alone=False)
    found = read_buckets(engine.words, histograms.APPENDS)
    assert (sum(found.counts), found.quantile(1.0)) == (5, 100e-6)
    assert found.total == pytest.approx(5 * 60e-6)


def test_append_slow_step_counts_only_its_frames(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    times = AppendLatency(engine.words)
    for _ in range(5):
        engine.append("T", [b"body"])
    engine.words[layout.WRITTEN_NS] = 100
    assert engine.words[UNPUBLISHED_FRAMES] == 1
    times.timed(100, 100 + 2_000_000_000, alone=True)
    found = read_buckets(engine.words, histograms.APPENDS)
    assert (sum(found.counts), found.total) == (1, 2.0)
    # A slow step that stored nothing counts for no append.
    times.timed(200, 200 + 9_000_000_000, alone=True)
    assert read_buckets(engine.words, histograms.APPENDS) == found
    times.timed(100, 50_100, alone=False)
    assert sum(read_buckets(engine.words, histograms.APPENDS).counts) == 5

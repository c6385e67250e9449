"""Deletion by age and by disk usage: up to the first young file, and by low disk ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.store.retention.plan import local_hour
from tests.support.store_builders import NOW_MS, AgedStore, DiskIO

OLD_HOURS, YOUNG_HOURS = 73.0, 1.0
OTHER_HOUR = str((local_hour(NOW_MS) + 6) % 24)


def test_retention_stops_at_first_young_file(tmp_path: Path) -> None:
    """Of fifty files the first five and those after the twenty-first are old; five are deleted."""
    store = AgedStore(tmp_path)
    for count, age_hours in ((5, OLD_HOURS), (16, YOUNG_HOURS), (29, OLD_HOURS)):
        store.fill(count, age_hours)
    assert len(store.segments()) == 50
    store.run_passes(6)
    assert store.segments() == list(range(5, 50))
    assert store.words[words_of.RETENTION_SEGMENTS] == 5


@pytest.mark.parametrize(
    ("option", "trigger", "first_segments"),
    [
        ("disk_max_used_space_ratio", words_of.DUE_DISK, [10, 15, 15, 15]),
        ("disk_space_clean_forcibly_ratio", words_of.DUE_FORCED, [10, 20, 30, 40]),
    ],
)
def test_retention_disk_ratio_of_1_percent_deletes_at_any_hour(
    tmp_path: Path, option: str, trigger: int, first_segments: list[int]
) -> None:
    """Of 55 files 15 have expired: they are deleted above the lower disk ratio.

    Above the higher ratio young files are deleted too, ten per run.
    """
    store = AgedStore(tmp_path, delete_when=OTHER_HOUR, **{option: 1})
    store.fill(15, OLD_HOURS)
    store.fill(40, YOUNG_HOURS)
    assert isinstance(store.io, DiskIO)
    found = []
    for _run in range(4):
        store.io.disk = (2 << 30, 98 << 30)
        store.run_passes()
        found.append(store.segments()[0])
    assert found == first_segments
    assert store.words[words_of.RETENTION_TRIGGER] == trigger
    # ConsumeQueue files of 7 units, index files of 7 keys.
    assert store.words[words_of.RETENTION_QUEUE_FILES] == first_segments[-1] // 7
    assert store.words[words_of.RETENTION_INDEX_FILES] == first_segments[-1] // 7

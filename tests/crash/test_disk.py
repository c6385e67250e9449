"""Tests of the simulated disk: page versions in images for each way to pick them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.disk import PAGE, Disk, Grain, Loss, Metadata, Pick, Unheard

PAGES = 5
IMAGES = 60
WHOLE = tuple(range(PAGES))
ENDS = range(1, PAGES + 1)
SHOWN = {
    Pick.NONE: {()},
    Pick.ALL: {WHOLE},
    Pick.ONE_MISSING: {WHOLE[:page] + WHOLE[page + 1 :] for page in WHOLE},
    Pick.ONE_PRESENT: {(page,) for page in WHOLE},
    Pick.PREFIX: {WHOLE[:end] for end in ENDS},
    Pick.SUFFIX: {WHOLE[end - 1 :] for end in ENDS},
}


def unsynced_pages_in_images(folder: Path, pick: Pick) -> Iterator[tuple[int, ...]]:
    """Stored but not synced pages that images of a file contain."""
    root = folder / "store"
    root.mkdir()
    path = root / "file"
    path.write_bytes(bytes(PAGES * PAGE))
    disk = Disk.of(root)
    fd = os.open(path, os.O_RDWR)
    for page in WHOLE:
        os.pwrite(fd, b"x" * PAGE, page * PAGE)
        disk.stored(fd, page * PAGE, PAGE)
    for number in range(IMAGES):
        target = folder / f"image{number}"
        disk.image(target, Loss(Metadata.FREE, Grain.PAGE, pick), random.Random(number), Unheard())
        data = (target / "file").read_bytes()
        yield tuple(page for page in WHOLE if data[page * PAGE] == ord("x"))
    os.close(fd)


@pytest.mark.parametrize("pick", SHOWN, ids=lambda pick: pick.name)
def test_disk_image_contains_exactly_the_versions_of_its_pick(pick: Pick, tmp_path: Path) -> None:
    assert set(unsynced_pages_in_images(tmp_path, pick)) == SHOWN[pick]


def test_disk_image_by_chance_contains_any_version(tmp_path: Path) -> None:
    assert len(set(unsynced_pages_in_images(tmp_path, Pick.RANDOM))) > max(len(images) for images in SHOWN.values())

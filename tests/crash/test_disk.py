"""Tests of the simulated disk: versions of pages in images; line-by-line kills in kernels."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.disk import PAGE, Disk, Grain, Loss, Metadata, Pick, SilentJournal
from tests.crash.levels import INTERPRETED

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
        disk.image(target, Loss(Metadata.FREE, Grain.PAGE, pick), random.Random(number), SilentJournal())
        data = (target / "file").read_bytes()
        yield tuple(page for page in WHOLE if data[page * PAGE] == ord("x"))
    os.close(fd)


@pytest.mark.parametrize("pick", SHOWN, ids=lambda pick: pick.name)
def test_disk_image_contains_exactly_the_versions_of_its_pick(pick: Pick, tmp_path: Path) -> None:
    assert set(unsynced_pages_in_images(tmp_path, pick)) == SHOWN[pick]


def test_disk_image_by_chance_contains_any_version(tmp_path: Path) -> None:
    assert len(set(unsynced_pages_in_images(tmp_path, Pick.RANDOM))) > max(len(images) for images in SHOWN.values())


# Interpreted kernels: line-by-line stores and kills


ROOT = Path(__file__).resolve().parents[2]
TOLD = """
import json, sys
from pathlib import Path
from tests.crash.disk import Disk
from tests.crash.story import Story
from tests.crash.disk import Lines

killed = []
kill = Lines._kill
Lines._kill = lambda lines, machine, frame: (killed.append(frame.f_lineno), kill(lines, machine, frame))
most = 0
stored = Disk.stored
def stored_and_counted(disk, fd, offset, size):
    global most
    stored(disk, fd, offset, size)
    for number in disk._mapped:
        most = max([most, *map(len, disk._nodes[number].pending.values())])
Disk.stored = stored_and_counted
tally = Story(int(sys.argv[1]), Path(sys.argv[2]) / "story", images=1).run()
print(json.dumps([tally.lines, most, len(set(killed)), tally.digest]))
"""
# A seed with kills, whose roles put entries in the index.
SEED = 0


def traced_story(folder: Path, environment: dict[str, str]) -> list[Any]:
    """Lines seen, most versions of an index page, lines with kills, and the digest."""
    folder.mkdir()
    command = [sys.executable, "-c", TOLD, str(SEED), str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=True
    )
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(900)
def test_lines_of_interpreted_kernels_make_page_versions_and_kill_points(tmp_path: Path) -> None:
    lines, versions, killed, digest = traced_story(tmp_path / "twins", INTERPRETED)
    assert lines > 100
    assert killed > 0
    compiled_lines, compiled_versions, compiled_killed, _digest = traced_story(tmp_path / "compiled", {})
    assert (compiled_lines, compiled_killed) == (0, 0)
    assert versions > 3 * compiled_versions
    assert traced_story(tmp_path / "again", INTERPRETED)[-1] == digest

"""A store of a fixture under comparison: opened by our engine, with what of it was intact on disk before that."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from mqproc.layout import record
from mqproc.paths import StorePaths
from mqproc.store.reads.reading import StoreReading
from tests.golden.fixtures import Directory, options_of
from tests.interop.opening import Opened, recovered
from tests.interop.questions import Answer


class Intact:
    """The undamaged store's records and BLANKs as RocketMQ listed them, sorted by whether they still lie on disk."""

    def __init__(self, directory: Directory, root: Path) -> None:
        undamaged = directory.undamaged
        self._size = int(undamaged["config"]["mappedFileSizeCommitLog"])
        folder = StorePaths(root).commit_log
        self._segments = {int(path.name): path.read_bytes() for path in folder.glob("[0-9]*")}
        self.records = [each for each in undamaged["records"] if self._is_record(each)]
        self.blanks = [each for each in undamaged["blanks"] if self._is_blank(each)]
        self.at = {each["phyOffset"]: each for each in self.records}
        self.lost = {each["phyOffset"]: each for each in undamaged["records"] if each["phyOffset"] not in self.at}

    def _bytes(self, physical_offset: int, size: int) -> bytes:
        start = physical_offset - physical_offset % self._size
        return self._segments.get(start, b"")[physical_offset - start :][:size]

    def _is_record(self, listed: Answer) -> bool:
        found = self._bytes(listed["phyOffset"], listed["size"])
        return bool(hashlib.sha256(found).hexdigest() == listed["recordSha256"])

    def _is_blank(self, listed: Answer) -> bool:
        magic = record.MAGIC_BLANK.to_bytes(4, "big", signed=True)
        found = self._bytes(listed["phyOffset"], record.BLANK_SIZE)
        return bool(found == listed["size"].to_bytes(4, "big") + magic)


class Store:
    """A fixture's store, opened. `intact` and `files_before`, lengths by path, say what there was before."""

    def __init__(
        self,
        directory: Directory,
        reading: StoreReading,
        intact: Intact,
        stack: ExitStack,
        files_before: dict[str, int] | None = None,
    ) -> None:
        self.directory = directory
        self.reading = reading
        self.intact = intact
        self.files_before = files_before or {}
        self._stack = stack
        self._undamaged: list[StoreReading] = []

    def undamaged(self) -> Iterator[StoreReading]:
        """The store before the damage, recovered by us: as it was closed, as it was killed, and from its log alone.

        The last one only of a store that was never damaged.
        """
        variants = [("clean", False), ("before", False), ("before", True)]
        if not self.directory.damaged:
            variants = [(self.directory.directory, True)]
        for number, (name, log_only) in enumerate(variants):
            if number == len(self._undamaged):
                whole = replace(self.directory, name=self.directory.archive, directory=name)
                store, _opened = self._stack.enter_context(opened_store(whole, log_only=log_only))
                self._undamaged.append(store.reading)
            yield self._undamaged[number]


@contextmanager
def opened_store(directory: Directory, *, log_only: bool = False) -> Iterator[tuple[Store, Opened]]:
    """A private copy, recovered; with `log_only` after all but its log and its settings were deleted."""
    with ExitStack() as stack:
        root = directory.unpack(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if log_only:
            _keep_log(StorePaths(root))
        intact, files = Intact(directory, root), files_of(root)
        opened = stack.enter_context(recovered(root, options_of(directory.expected)))
        yield Store(directory, opened.reading, intact, stack, files), opened


def _keep_log(paths: StorePaths) -> None:
    for folder in (paths.consume_queue, paths.index):
        shutil.rmtree(folder)
    paths.checkpoint.unlink()
    paths.abort.touch()


def files_of(root: Path) -> dict[str, int]:
    """Every file's length, by its path in a store."""
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}

"""`mqproc/control` and `lock`, which the processes of a group share: damaged, alien, or no files at all.

Nothing durable is in them. A tool says that it cannot read them, in one line, or what they say; a start makes them
anew, or refuses in one line what is no file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from mqproc.errors import CorruptStoreError, NotRunningError, StoreAccessError, StoreLockedError
from mqproc.io.clock import Clock
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import CONTENT, StoreLock, lock_holder
from mqproc.layout import control as layout
from mqproc.supervisor.store_folder import prepare_folder
from tests.cli.calling import call
from tests.conftest import Group
from tests.fuzz.mutations import damage

PID = 4242
READERS = (("stat",), ("stat", "--json"), ("metrics", "--check"))
TOOLS = (
    *READERS,
    ("top", "--once", "--interval", "0.01"),
    ("status",),
    ("status", "--json"),
    ("store", "info"),
    ("store", "retention"),
    ("down",),
)
HEADER = {layout.HEADER_MAGIC: layout.MAGIC, layout.HEADER_VERSION: layout.VERSION}
MADE_WITH = {
    layout.EPOCH,
    layout.STORE_ID,
    layout.SUPERVISOR_PID,
    layout.GROUP_STARTED_MS,
    layout.SUPERVISOR_HEARTBEAT_NS,
    *HEADER,
}


class SharedFiles:
    """A store that has run, whose shared files are damaged: as a stop left them, and as a kill did."""

    def __init__(self, folder: Path) -> None:
        group = Group(folder / "store", max_queues=256).start()
        with group.client() as client:
            client.send_batch("topic", [b"body"] * 10)
            group.wait_dispatched()
        self.paths = group.paths
        killed = self.paths.control.read_bytes()
        assert group.stop() == 0
        self._controls = [self.paths.control.read_bytes(), killed]
        self._elsewhere = folder / "elsewhere"
        self._elsewhere.write_bytes(killed)
        self._reached: set[tuple[str, ...]] = set()

    def run(self, seed: int) -> None:
        """One pair of files. Raises what breaks a rule."""
        random = Random(seed)
        self.lay(self.paths.control, self._harmed(random, random.choice(self._controls)))
        self.lay(self.paths.lock, self._harmed(random, CONTENT) if random.random() < 0.3 else _as_file(CONTENT))
        tool = random.choice(TOOLS)
        self._reached.add(tool)
        self.look(tool)

    def close(self) -> str:
        """Nothing is left to be checked."""
        return f"{len(self._reached)} of {len(TOOLS)} tools"

    def lay(self, path: Path, harm: Callable[[Path], object]) -> None:
        """Put what a harm makes in a file's place."""
        _remove(path)
        harm(path)

    def _harmed(self, random: Random, data: bytes) -> Callable[[Path], None]:
        way = random.random()
        if way < 0.6:
            return _as_file(_words_damaged(random, data))
        if way < 0.9:
            return _as_file(damage(random, data, self._controls))
        return random.choice((_remove, _as_file(b""), Path.mkdir, lambda path: path.symlink_to(self._elsewhere)))

    # What must hold

    def look(self, tool: tuple[str, ...]) -> None:
        """A tool, somebody who is told who has the store, and a start."""
        can_be_read = self._can_be_read()
        self._call(tool, can_be_read=can_be_read)
        if self._may_start():
            self._lock()
            self._make_anew()

    def _may_start(self) -> bool:
        refused = _error_of(StoreAccessError, lambda: prepare_folder(StoreIO(), self.paths))
        odd = [path for path in (self.paths.lock, self.paths.control) if path.is_dir() or path.is_symlink()]
        assert not refused or any(str(path) in refused for path in odd), refused
        assert "\n" not in refused
        return not refused

    def _can_be_read(self) -> bool:
        unreadable = (CorruptStoreError, NotRunningError)
        said = _error_of(unreadable, lambda: Control.open(StoreIO(), self.paths).close())
        assert not said or str(self.paths.control) in said, said
        return not said

    def _call(self, tool: tuple[str, ...], *, can_be_read: bool) -> None:
        told = call(*tool, "--store", self.paths.root)
        assert "Traceback" not in told.err, (tool, told)
        if told.code:
            assert told.err.count("\n") == 1, (tool, told)
        if tool in READERS and not can_be_read:
            assert told.code, (tool, told)
            assert str(self.paths.control) in told.err, (tool, told)

    def _lock(self) -> None:
        """It is free, whatever it holds; whoever asks is told who has it, as far as that can be known."""
        io = StoreIO()
        assert self.paths.lock.is_dir() or lock_holder(io, self.paths) is None
        lock = StoreLock.acquire(io, self.paths)
        try:
            assert self.paths.lock.read_bytes() == CONTENT
            holder = lock_holder(io, self.paths)
            assert holder is not None
            assert str(holder)
            refused = _error_of(StoreLockedError, lambda: StoreLock.acquire(io, self.paths, patience_s=0.0).close())
            assert "is in use by" in refused, "the lock was taken twice"
        finally:
            lock.close()

    def _make_anew(self) -> None:
        """Only the epoch and the store's id are taken over, and where they can be."""
        old = self._identity()
        control = Control.create(StoreIO(), self.paths, Clock(), PID)
        try:
            found = dict(enumerate(memoryview(self.paths.control.read_bytes()).cast("q")))
        finally:
            control.close()
        assert {index: found[index] for index in HEADER} == HEADER
        assert found[layout.SUPERVISOR_PID] == PID
        assert 0 < found[layout.EPOCH] <= 1 << 31
        assert 0 < found[layout.STORE_ID] < 1 << 62
        if old is not None:
            assert (found[layout.EPOCH], found[layout.STORE_ID]) == (old[0] + 1, old[1])
        others = {index: word for index, word in found.items() if word and index not in MADE_WITH}
        assert not others, f"words were taken over: {others}"
        Control.open(StoreIO(), self.paths).close()
        assert not list(self.paths.own.glob("*.tmp"))

    def _identity(self) -> tuple[int, int] | None:
        """Epoch and id of a file that is whole and says what can be."""
        if not self._can_be_read():
            return None
        control = Control.open(StoreIO(), self.paths)
        try:
            epoch, store_id = control.load(layout.EPOCH), control.load(layout.STORE_ID)
        finally:
            control.close()
        return (epoch, store_id) if 0 < epoch < 1 << 31 and 0 < store_id < 1 << 62 else None


def _error_of(kinds: type[Exception] | tuple[type[Exception], ...], act: Callable[[], None]) -> str:
    """What an error of these kinds says, nothing when there is none."""
    try:
        act()
    except kinds as error:
        return str(error)
    return ""


def _words_damaged(random: Random, data: bytes) -> bytes:
    """Some words say something else; magic, version and length stay, so that they are read."""
    words = memoryview(bytearray(data)).cast("q") if len(data) % layout.WORD_SIZE == 0 else None
    if words is None or len(words) < layout.FILE_SIZE // layout.WORD_SIZE:
        return damage(random, data)
    named = [word.index for word in layout.WORDS.values() if word.index not in HEADER]
    for index in random.sample(named, random.choice((1, 3, 20, len(named)))):
        words[index] = random.choice(
            (random.getrandbits(63), -random.getrandbits(63) - 1, -1, 0, 1, random.getrandbits(20))
        )
    return words.tobytes()


def _as_file(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

"""Flushers as roles: after the first failed sync none syncs again, and no mark moves."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.io.store_io import Clock
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.roles.flushers import CommitLogFlusher, DispatchFlusher, cq_flusher, index_flusher
from mqproc.roles.role import RoleContext
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.durable_marks import DurableMark
from mqproc.store.recovery.recovery import Recovery
from tests.roles.rigs import Rig

Flusher = CommitLogFlusher | DispatchFlusher
MADE: dict[str, Callable[[RoleContext], Flusher]] = {
    words_of.COMMITLOG_FLUSHER: CommitLogFlusher,
    words_of.CQ_FLUSHER: cq_flusher,
    words_of.INDEX_FLUSHER: index_flusher,
}
FOLDERS = {
    words_of.COMMITLOG_FLUSHER: "commitlog",
    words_of.CQ_FLUSHER: "consumequeue",
    words_of.INDEX_FLUSHER: "index",
}
MARKS = tuple(FOLDERS.values())
ERRNO_WORDS = {
    words_of.COMMITLOG_FLUSHER: words_of.FLUSHER_SYNC_ERRNO,
    words_of.CQ_FLUSHER: words_of.CQ_SYNC_ERRNO,
    words_of.INDEX_FLUSHER: words_of.INDEX_SYNC_ERRNO,
}


class Flushers:
    """All three roles on one store."""

    def __init__(self, root: Path) -> None:
        self.rig = Rig(root)
        self.roles = {name: self.make(name) for name in MADE}

    def make(self, name: str) -> Flusher:
        return MADE[name](self.rig.context(name))

    def dispatch(self, messages: int = 1000) -> None:
        """More than two unflushed pages for each kind of file."""
        synced = self.rig.control.load(words_of.FLUSHER_SYNCED)
        self.rig.dispatch(messages)
        self.rig.control.store(words_of.FLUSHER_SYNCED, synced)

    def turn(self) -> None:
        """Every role's forced pass."""
        self.rig.pass_seconds(61)
        for role in self.roles.values():
            role.do_work()

    def stop(self) -> None:
        for role in self.roles.values():
            for _ in range(3):
                if role.on_stop():
                    break

    @property
    def marks(self) -> list[int]:
        """The marks on disk, 0 for none."""
        io, paths = self.rig.io, self.rig.paths
        segments = LogSegments(io, paths.commit_log, self.rig.options.mapped_file_size_commit_log)
        found = [DurableMark(io, paths.mark(name), segments).mark for name in MARKS]
        return [mark.offset if mark else 0 for mark in found]


@pytest.fixture
def flushers(tmp_path: Path) -> Flushers:
    return Flushers(tmp_path)


def test_flushers_without_failed_sync_advance_all_marks(flushers: Flushers) -> None:
    flushers.dispatch()
    flushers.turn()
    assert flushers.marks == [flushers.rig.control.load(words_of.WRITTEN)] * 3


@pytest.mark.parametrize("word", words_of.SYNC_ERRNO_WORDS)
def test_flushers_after_any_failed_sync_neither_sync_nor_mark(flushers: Flushers, word: int) -> None:
    flushers.dispatch()
    flushers.turn()
    before = flushers.marks
    flushers.dispatch()
    flushers.rig.io.tried()
    flushers.rig.control.store(word, errno.EIO)
    flushers.turn()
    flushers.roles = {name: flushers.make(name) for name in MADE}  # Successors know it too.
    flushers.turn()
    flushers.stop()
    assert flushers.rig.io.tried() == []
    assert flushers.marks == before


@pytest.mark.parametrize("failing", MADE)
def test_failed_sync_of_one_flusher_ends_the_others(flushers: Flushers, failing: str) -> None:
    flushers.dispatch()
    flushers.turn()
    before = flushers.marks
    flushers.dispatch()
    rig = flushers.rig
    rig.io.failing = {f"/{FOLDERS[failing]}/": errno.EIO}
    rig.pass_seconds(61)
    flushers.roles[failing].do_work()
    assert rig.control.load(ERRNO_WORDS[failing]) == errno.EIO
    assert FOLDERS[failing] in rig.paths.read_only.read_text()
    rig.io.failing = {}
    rig.io.tried()
    flushers.turn()
    flushers.stop()
    assert rig.io.tried() == []
    assert flushers.marks == before
    assert [rig.control.load(word) for word in ERRNO_WORDS.values()].count(errno.EIO) == 1


@pytest.mark.parametrize("name", MADE)
def test_failed_sync_of_another_role_ends_the_current_pass(flushers: Flushers, name: str) -> None:
    """The other role's word is set during the first sync: no further one, the mark stays."""
    flushers.dispatch()
    flushers.turn()
    before = flushers.marks
    flushers.dispatch(3000)  # Three index files.
    rig = flushers.rig
    rig.io.tried()
    rig.io.before_sync = lambda path: rig.control.store(words_of.WRITER_SYNC_ERRNO, errno.EIO)
    rig.pass_seconds(61)
    flushers.roles[name].do_work()
    assert len(rig.io.tried()) == 1
    assert flushers.marks == before


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("at_stop", [False, True])
def test_failed_sync_of_a_mark_is_final(flushers: Flushers, name: str, at_stop: bool) -> None:
    flushers.dispatch()
    rig = flushers.rig
    rig.io.failing = {f"marks/{FOLDERS[name]}": errno.EIO}
    if at_stop:
        flushers.stop()
    else:
        flushers.turn()
    assert rig.control.load(ERRNO_WORDS[name]) == errno.EIO
    rig.io.failing = {}
    rig.io.tried()
    flushers.turn()
    assert rig.io.tried() == []


@pytest.mark.parametrize("name", MADE)
def test_sync_without_space_or_descriptors_is_not_final(flushers: Flushers, name: str) -> None:
    flushers.dispatch()
    rig = flushers.rig
    if name != words_of.COMMITLOG_FLUSHER:
        flushers.roles[words_of.COMMITLOG_FLUSHER].do_work()
    for place, number in ((f"/{FOLDERS[name]}", errno.EMFILE), (f"marks/{FOLDERS[name]}", errno.ENOSPC)):
        rig.io.refusing = {place: number}
        rig.pass_seconds(61)
        flushers.roles[name].do_work()
    assert rig.control.load(words_of.role_word(name, "errors")) == 2
    assert rig.control.sync_errno == 0
    assert not rig.paths.read_only.exists()
    rig.io.refusing = {}
    flushers.turn()
    flushers.turn()
    assert flushers.marks == [rig.control.load(words_of.WRITTEN)] * 3


@pytest.mark.parametrize("name", MADE)
def test_last_pass_without_descriptors_is_an_error(flushers: Flushers, name: str) -> None:
    """No later pass can make up for it, so this must not count as an orderly stop."""
    flushers.dispatch()
    flushers.rig.io.refusing = {f"/{FOLDERS[name]}": errno.EMFILE}
    with pytest.raises(OSError, match="open files"):
        flushers.roles[name].on_stop()


def test_failed_sync_keeps_store_read_only_in_the_next_group(flushers: Flushers) -> None:
    flushers.dispatch()
    rig = flushers.rig
    rig.io.failing = {"/consumequeue/": errno.EIO}
    flushers.turn()
    rig.io.failing = {}
    control = Control.create(rig.io, rig.paths, Clock(), 1)
    Recovery(rig.io, rig.paths, rig.options, control.words, lambda line: None, clean=False).run()
    assert control.read_only

"""Stores and options that a start meets: what it refuses in one line, and what it takes and tells."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from mqproc.errors import CorruptStoreError, OtherVersionError
from mqproc.layout import control
from mqproc.paths import StorePaths
from tests.bad_input.scene import IS_ROOT, Answer, Scene
from tests.cli.calling import call
from tests.conftest import Group
from tests.golden.fixtures import Fixture, load_fixture
from tests.nursery import run_forked
from tests.store.recovery.recovering import contents

SEGMENT_OF_THEIRS = 1 << 16
STRAYS = ("commitlog/notes.txt", "consumequeue/OrderTopic/notes.txt", "index/notes.txt", "config/notes.txt")
COMMANDS = (
    ("status",),
    ("send", "topic", "body"),
    ("message", "key", "topic", "key"),
    ("topic", "list"),
    ("group", "list"),
    ("stat",),
    ("store", "verify"),
    ("store", "info"),
    ("down",),
)
OF_STORES = (("store", "verify"), ("store", "info"), ("store", "repair"), ("store", "recover", "--dry-run"))
"""Those that need no group, so that a folder without one is no store to them."""


def _up(store: Path, *flags: str) -> Answer:
    """`mqproc up` that must end by itself: its exit code, and the one line of its errors."""
    done = run_forked(["mqproc", "up", "--store", str(store), *flags])
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    return Answer(f"exit {done.returncode}", done.stderr if len(lines) == 1 else f"{len(lines)} lines: {done.stderr}")


def second_supervisor(scene: Scene) -> Answer:
    """Another `up` on the store of the running group."""
    process = scene.group.process
    assert process is not None
    answer = _up(scene.group.store)
    assert f"is in use by pid {process.pid} since 20" in answer.text
    return answer


def commands_without_a_store(scene: Scene) -> Answer:
    """Every kind of command on a folder that is missing: one line each, and nothing is made."""
    missing = scene.folder / "missing"
    answers = {command: call(*command, "--store", missing) for command in COMMANDS}
    assert not missing.exists()
    wrong = {command: told for command, told in answers.items() if told.err.count("\n") != 1 or told.out}
    assert not wrong
    codes = {told.code for told in answers.values()}
    return Answer(f"exit {codes.pop() if len(codes) == 1 else codes}", answers["status",].err)


def a_file(path: Path) -> None:
    path.write_text("mine")


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def commands_on(make: Callable[[Path], None], commands: Sequence[tuple[str, ...]]) -> Callable[[Scene], Answer]:
    """Commands on what is no store: one line each, and nothing is made."""

    def does(scene: Scene) -> Answer:
        place = scene.folder / make.__name__
        make(place)
        answers = {command: call(*command, "--store", place) for command in commands}
        wrong = {command: told for command, told in answers.items() if told.err.count("\n") != 1 or told.out}
        assert not wrong
        assert place.is_file() or not list(place.iterdir())
        codes = {told.code for told in answers.values()}
        return Answer(f"exit {codes.pop() if len(codes) == 1 else codes}", answers["store", "verify"].err)

    return does


def starts_in_place_of_a_file(scene: Scene) -> Answer:
    """A file where the store's folder is to be; it stays what it is."""
    path = scene.folder / "file"
    path.write_text("mine")
    answer = _up(path)
    assert path.read_text() == "mine"
    return answer


def starts_where_nothing_may_be_written(scene: Scene) -> Answer:
    """A file system that is read-only, since root may write to any folder; for others a folder that is."""
    folder = scene.folder / "readonly"
    folder.mkdir(mode=0o500)
    if IS_ROOT:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=0700", "tmpfs", str(folder)], check=True)
    try:
        answer = _up(folder)
        assert not list(folder.iterdir())
    finally:
        if IS_ROOT:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    return answer


def starts_below_a_missing_folder(scene: Scene) -> Answer:
    """`up` makes the last part of a path only."""
    answer = _up(scene.folder / "missing" / "store")
    assert not (scene.folder / "missing").exists()
    return answer


def starts_in_an_open_folder(scene: Scene) -> Answer:
    """A folder that everybody may write to."""
    folder = scene.folder / "open"
    folder.mkdir()
    folder.chmod(0o777)
    answer = _up(folder)
    assert list(folder.iterdir()) == []
    return answer


def starts_in_anothers_folder(scene: Scene) -> Answer:
    """A folder that belongs to somebody else."""
    folder = scene.folder / "anothers"
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    answer = _up(folder)
    assert list(folder.iterdir()) == []
    return answer


def _theirs(scene: Scene, name: str) -> Fixture:
    """A copy of a store that RocketMQ made and stopped, as open as it makes its folders."""
    (scene.folder / name).mkdir()
    fixture = load_fixture("a_basic", scene.folder / name)
    fixture.store.chmod(0o755)
    return fixture


def starts_on_a_symlink(scene: Scene) -> Answer:
    """A segment is a symlink. Nothing of the store is changed."""
    store = _theirs(scene, "linked").store
    segment = store / "commitlog" / f"{SEGMENT_OF_THEIRS:020d}"
    segment.rename(scene.folder / "elsewhere")
    segment.symlink_to(scene.folder / "elsewhere")
    return _refused_unchanged(store, segment)


def starts_on_anothers_file(scene: Scene) -> Answer:
    """A segment belongs to somebody else. Nothing of the store is changed."""
    store = _theirs(scene, "owned").store
    segment = store / "commitlog" / f"{SEGMENT_OF_THEIRS:020d}"
    os.chown(segment, 65534, 65534)
    return _refused_unchanged(store, segment)


def _refused_unchanged(store: Path, named: Path) -> Answer:
    """Nor is it taken for one that had not been closed: no `abort` is left."""

    def theirs() -> dict[str, tuple[int, bytes]]:
        return {name: found for name, found in contents(store).items() if name.partition("/")[0] not in ours}

    ours = ("lock", "mqproc")
    before = theirs()
    answer = _up(store)
    assert str(named) in answer.text
    assert "abort" not in before
    assert theirs() == before
    return answer


def starts_with(option: str) -> Callable[[Scene], Answer]:
    """An option that cannot be. No folder is made."""

    def does(scene: Scene) -> Answer:
        store = scene.folder / "unmade"
        answer = _up(store, "--set", option)
        assert not store.exists()
        return answer

    return does


def checks(option: str) -> Callable[[Scene], Answer]:
    """The same check by the command that does nothing else."""

    def does(_scene: Scene) -> Answer:
        told = call("config", "check", "--set", option)
        return Answer(f"exit {told.code}", told.err)

    return does


class Disordered:
    """A group that has started on RocketMQ's store with disorder of many kinds in it."""

    def __init__(self, scene: Scene) -> None:
        fixture = _theirs(scene, "disordered")
        store = fixture.store
        self.messages = len(fixture.expected["records"])
        self.end = fixture.expected["maxPhyOffset"]
        for stray in STRAYS:
            (store / stray).parent.mkdir(exist_ok=True)
            (store / stray).write_text("mine")
        segment = store / "commitlog" / f"{1 << 40:020d}"
        segment.mkdir()
        (segment / "precious").write_text("kept")
        paths = StorePaths(store)
        paths.own.mkdir()
        paths.control.write_bytes(b"\xff garbage of another version \xff")
        paths.checkpoint.write_bytes(os.urandom(4096))
        paths.consumer_offsets.write_text('{"offsetTable":{"OrderTopic@billing":{0:')
        copy = paths.consumer_offsets.with_name("consumerOffset.json.bak")
        copy.write_text('{"offsetTable":{"OrderTopic@billing":{0:4}}}')
        self.group = scene.another(Group(store, max_queues=64))
        # Theirs are smaller files than ours would be.
        self.group.options |= {"mapped_file_size_commit_log": 1 << 20, "max_message_size": SEGMENT_OF_THEIRS // 2}
        self.group.start()
        self.told = self.group.output.read_text()
        self.segment = segment

    def lines(self, *words: str) -> str:
        """What the start has said with all of these words."""
        return "\n".join(line for line in self.told.splitlines() if all(word in line for word in words))


@functools.cache
def _disordered(scene: Scene) -> Disordered:
    return Disordered(scene)


def starts_on_rocketmqs_open_folder(scene: Scene) -> Answer:
    """RocketMQ leaves its store open to be read; our part of it is closed."""
    group = _disordered(scene).group
    modes = [path.stat().st_mode & 0o777 for path in (group.store, group.paths.own)]
    return Answer("", " ".join(f"{mode:04o}" for mode in modes))


def starts_on_disorder(scene: Scene) -> Answer:
    """Files of another size, strays, and a folder in the place of a segment."""
    found = _disordered(scene)
    store = found.group.store
    left_alone = [stray for stray in STRAYS if (store / stray).read_text() == "mine"]
    assert left_alone == list(STRAYS)
    for stray in STRAYS[:3]:
        assert found.lines(str(store / stray), "left alone"), stray
    aside = found.group.paths.aside / f"commitlog.{found.segment.name}"
    assert (aside / "precious").read_text() == "kept"
    assert found.lines(str(found.segment), str(aside))
    return Answer("", found.lines("mapped_file_size_commit_log"))


def starts_on_a_strange_control_file(scene: Scene) -> Answer:
    """It is made anew: the words are those of this very run."""
    group = _disordered(scene).group
    assert group.process is not None
    words = group.words()
    assert words["supervisor_pid"] == group.process.pid
    return Answer("", f"epoch {words['epoch']}")


CONTROL_FILES = {
    "of another version": "from another version of mqproc, of layout [0-9]+, and not [0-9]+: mqproc down .* reads$",
    "of another program": "magic at byte .*expected 0x[0-9a-f]+, found 0x[0-9a-f]+$",
    "that is cut": "expected [0-9,]+ bytes, found 4,096$",
    "that is empty": "expected [0-9,]+ bytes, found 0$",
    "that says what is not": "^$",
}
"""What is wrong with it, and what a tool says of it, if it can tell."""


def _control_file(what: str, data: bytes) -> bytes:
    words = memoryview(bytearray(data)).cast("q")
    if what == "of another version":
        words[control.HEADER_VERSION] += 1
    elif what == "of another program":
        words[control.HEADER_MAGIC] = 4711
    elif what == "that says what is not":
        for word in control.WORDS.values():
            if word.index not in (control.HEADER_MAGIC, control.HEADER_VERSION):
                words[word.index] = 1 << 40
    else:
        return data[:4096] if what == "that is cut" else b""
    return words.tobytes()


@functools.cache
def _killed(scene: Scene) -> tuple[Group, dict[str, int]]:
    """A group that was killed, with three messages in its log, and what its words were."""
    group = scene.another(Group(scene.folder / "controlled", max_queues=64)).start()
    with group.client() as client:
        client.send_batch("three", [b"a", b"b", b"c"], queue_id=0)
        group.wait_dispatched()
    words = group.words()
    group.kill()
    return group, words


def starts_on_a_control_file(what: str) -> Callable[[Scene], Answer]:
    """A tool says in one line what is wrong with it; a start makes it anew, and takes nothing from it."""

    def does(scene: Scene) -> Answer:
        group, before = _killed(scene)
        file = group.paths.control
        whole = file.read_bytes()
        file.write_bytes(_control_file(what, whole))
        told = call("stat", "--store", group.store)
        if told.code:
            kind = OtherVersionError if what == "of another version" else CorruptStoreError
            assert (told.code, told.err.count("\n"), str(file) in told.err) == (kind.exit_code, 1, True)
        group.start()
        words = group.words()
        assert (words["epoch"], words["written"], words["dispatched"]) == (1, before["written"], before["written"])
        with group.client() as client:
            assert [message.body for message in client.pull("three", 0, 0).messages] == [b"a", b"b", b"c"]
        group.kill()
        return Answer("", told.err.rstrip("\n"))

    return does


def second_supervisor_without_words(scene: Scene) -> Answer:
    """The lock tells that the store is in use, the words of the group only by whom: they stay as they are."""
    group, _ = _killed(scene)
    group.start()
    file = group.paths.control
    file.rename(aside := file.with_name("control.aside"))
    file.write_bytes(b"garbage")
    try:
        answer = _up(group.store)
        assert file.read_bytes() == b"garbage"
    finally:
        aside.rename(file)
    assert group.process is not None
    assert f"pid {group.process.pid}" in answer.text
    group.kill()
    return answer


def starts_without_a_checkpoint(scene: Scene) -> Answer:
    """Garbage in both slots: the whole log is gone over, and every message is in its queue."""
    found = _disordered(scene)
    with found.group.client() as client:
        messages = sum(topic.message_count for topic in client.topics())
        assert client.send("OrderTopic", b"after").physical_offset >= found.end
    assert messages == found.messages
    return Answer("", found.lines("records from the beginning 0"))


def starts_on_garbled_offsets(scene: Scene) -> Answer:
    """The copy of RocketMQ's file is taken."""
    found = _disordered(scene)
    with found.group.client() as client:
        offsets = {queue.queue_id: queue.offset for queue in client.groups.info("billing").queues}
    assert offsets[0] == 4
    return Answer("", found.lines("consumerOffset.json"))

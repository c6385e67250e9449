"""Stores and options that a start meets: what it refuses in one line, and what it takes and tells."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mqproc.paths import StorePaths
from tests.bad_input.scene import Answer, Scene
from tests.cli.calling import call
from tests.conftest import Group
from tests.golden.fixtures import Fixture, load_fixture
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


def _up(store: Path, *flags: str) -> Answer:
    """`mqproc up` that must end by itself: its exit code, and the one line of its errors."""
    command = [sys.executable, "-m", "mqproc", "up", "--store", str(store), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
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

"""Real groups of processes, started as by a user; waits; their files and transactions."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from mqproc import Client, Message
from mqproc.client import requests as core
from mqproc.client._sync.transactions import Transaction
from mqproc.client.transaction_requests import Handle
from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.control_words import Words
from mqproc.layout import control as words_of
from mqproc.layout import index_file as index_layout
from mqproc.paths import StorePaths
from mqproc.store.recovery.recovery import Recovery
from mqproc.types import StoredMessage
from tests.support.fork_server import Running, fork_server

ROOT = Path(__file__).parents[2]
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
# Limit of waits on a busy machine. It is not a limit that the product guarantees.
PATIENCE_S = 60.0
# Small files, so that tests cover every kind of roll.
SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 5_000,
    "max_index_num": 20_000,
    "max_message_size": 1 << 18,
    "metrics_port": 0,
    "disk_floor_bytes": 0,
    # Old stores written by RocketMQ must not lose files when tests run at the hour of deletion.
    "file_reserved_time": 1 << 20,
}


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = "condition") -> Any:
    """Wait until the condition is true and return its value. Fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} not reached within {timeout_s:g} s")
        time.sleep(0.002)
    return found


def assert_below(limit: float, measure: Callable[[], float], rounds: int = 10) -> None:
    """Measure until one round is below the limit; fail after `rounds` rounds.

    Other load makes a time longer, never shorter.
    """
    seen: list[float] = []
    while not seen or seen[-1] >= limit:
        if len(seen) == rounds:
            pytest.fail(f"{seen}: no round was below {limit:g}")
        seen.append(measure())


class Group:
    """A group on a store: started, observed through its control file, killed in any way."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.store = store
        self.paths = StorePaths(store)
        self.options = SMALL | options
        # Additional environment variables. LD_PRELOAD requires a new program: a forked one is loaded already.
        self.environment: dict[str, str] = {}
        self.process: Running | None = None
        self.output = store.with_name(store.name + ".log")

    def start(self) -> Group:
        flags = [part for name, value in self.options.items() for part in ("--set", f"{name}={value}")]
        self.launch(["up", "--store", str(self.store), *flags])
        wait_until(self.ready, START_TIMEOUT_S, f"group ready: {self.output.read_text()[-2000:]}")
        return self

    def launch(self, arguments: list[str]) -> None:
        """Run `mqproc` with these arguments as this group's supervisor, without waiting."""
        self.output.touch(0o600)
        environment = os.environ | self.environment
        with self.output.open("ab") as output:
            if "LD_PRELOAD" not in self.environment:
                self.process = fork_server().start(["mqproc", *arguments], environment, output.fileno())
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mqproc", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def ready(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            pytest.fail(f"the group ended with {self.process.returncode}:\n{self.output.read_text()[-4000:]}")
        return self.is_ready()

    def is_ready(self) -> bool:
        """Like `ready`, but the group may have ended."""
        words = self.words()
        if not words or words["group_state"] != words_of.GROUP_READY:
            return False
        return self.process is None or words["supervisor_pid"] == self.process.pid

    def words(self) -> dict[str, int]:
        """All control words; empty before the file exists."""
        try:
            control = Control.open(StoreIO(), self.paths)
        except (NotRunningError, CorruptStoreError):
            return {}
        try:
            return control.snapshot()
        finally:
            control.close()

    def pid(self, role: str) -> int:
        """A role's pid; waits during its restart.

        A signal to pid 0 would go to the whole process group of the tests.
        """
        word = "supervisor_pid" if role == words_of.SUPERVISOR else f"{role}.pid"
        found: int = wait_until(lambda: self.words()[word], what=f"a running {role}")
        return found

    def wait_for_step(self, role: str) -> None:
        """Wait until a role has begun and finished a whole step after this call.

        The heartbeat marks the beginning of a step: after two heartbeats one step is complete.
        """
        word, since_ns = f"{role}.heartbeat_ns", time.monotonic_ns()
        first_ns = wait_until(lambda: max(0, self.words()[word] - since_ns), what=f"a step of {role}")
        wait_until(lambda: self.words()[word] - since_ns > first_ns, what=f"the next step of {role}")

    @contextlib.contextmanager
    def stopped_role(self, role: str) -> Iterator[None]:
        """Stop a role for the duration of the block."""
        pid = self.pid(role)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def caught_up(self) -> bool:
        words = self.words()
        return words["dispatched"] >= words["written"]

    def wait_dispatched(self) -> None:
        wait_until(self.caught_up, what="dispatch at the end of the log")

    def client(self, **settings: Any) -> Any:
        from mqproc import Client

        return Client(self.store, **settings)

    def stop(self) -> int:
        """Stop cleanly; return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the supervisor; all other processes die with it."""
        assert self.process is not None
        pids = [self.pid(role) for role in words_of.ROLES]
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        for pid in pids:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), what=f"end of {pid}")

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)


def skip_unless_nobody_can_run() -> None:
    """Skip a test where starting a program as another user is not possible."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can switch users")
    command = [*AS_NOBODY, sys.executable, "-c", "import mqproc"]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"others may not read {sys.prefix} or {ROOT}")


# HeldGroup: a group of real roles whose recovery stops at named points until the test continues it. Run as a program,
# this module is `mqproc up` with such a recovery.


# In order: the log is scanned, everything is dispatched, the marks are moved.
POINTS: Final = ("recover.scanned", "recover.cq_rebuilt", "recover.marked")


class HeldIO(StoreIO):
    """A StoreIO that blocks at each of POINTS until the test continues."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def crash_point(self, name: str) -> None:
        if name in POINTS:
            (self._folder / f"at {name}").touch()
            while not (self._folder / f"go {name}").exists():
                time.sleep(0.005)


class HeldGroup(Group):
    """A group on an existing store, killed before so that recovery runs completely."""

    def begin(self) -> None:
        """Start without waiting."""
        flags = [f"{name}={value}" for name, value in self.options.items()]
        with self.output.open("ab") as output:
            command = ["tests.support.group", str(self.store), *flags]
            self.process = fork_server().start(command, os.environ, output.fileno())

    def wait_at(self, point: str) -> None:
        """Wait until recovery is at this point."""
        assert self.process is not None
        marker = self.store.parent / f"at {point}"

        def is_at_point() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            return marker.exists()

        wait_until(is_at_point, START_TIMEOUT_S, f"recovery at {point}")

    def continue_from(self, *points: str) -> None:
        """Continue recovery from these points."""
        for point in points:
            (self.store.parent / f"go {point}").touch()

    def url(self) -> str:
        """The monitor's URL."""
        port = wait_until(lambda: self.words()["monitor_port"], what="the monitor listens")
        return f"http://127.0.0.1:{port}"

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a response."""
        try:
            with urllib.request.urlopen(self.url() + path, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


# Comparison of a group's ConsumeQueues and index with a rebuild from its log


def rebuilt(group: Group) -> StorePaths:
    """A copy of the store's log and configuration, recovered."""
    copy = StorePaths(group.store.with_name(group.store.name + ".rebuilt"))
    shutil.rmtree(copy.root, ignore_errors=True)
    copy.root.mkdir()
    shutil.copytree(group.paths.commit_log, copy.commit_log, ignore=shutil.ignore_patterns(copy.guard.name))
    shutil.copytree(group.paths.config, copy.config)
    options = Options(**{name: value for name, value in group.options.items() if name != "flush_disk_type"})
    words = Words(bytearray(words_of.FILE_SIZE))
    Recovery(StoreIO(), copy, options, words, lambda line: None, clean=False).run()
    return copy


def assert_equals_rebuild(group: Group) -> None:
    """Compare ConsumeQueue files byte for byte, index files by header, slots and items.

    Index file names are compared by their order.
    """
    other = rebuilt(group)
    assert_same_files(queue_files(group.paths), queue_files(other))
    ours, theirs = index_files(group.paths), index_files(other)
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert one.name == two.name
        assert np.array_equal(used_part(one, group), used_part(two, group)), one.name


def assert_same_files(ours: dict[str, bytes], theirs: dict[str, bytes]) -> None:
    """Compare byte for byte; report a difference by file and offset, not by contents."""
    alone = {name: len((ours | theirs)[name]) for name in sorted(ours.keys() ^ theirs.keys())}
    assert not alone, f"only in {'ours' if ours.keys() - theirs.keys() else 'the rebuilt ones'}: {alone}"
    different = {name: _first_difference(ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert not different, f"different from these bytes on: {different}"


def _first_difference(one: bytes, two: bytes) -> int:
    pairs = zip(one, two, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def queue_files(paths: StorePaths) -> dict[str, bytes]:
    found = sorted(path for path in paths.consume_queue.rglob("*") if path.is_file())
    return {str(path.relative_to(paths.consume_queue)): path.read_bytes() for path in found}


def index_files(paths: StorePaths) -> list[Path]:
    return sorted(path for path in paths.index.iterdir())


def used_part(path: Path, group: Group) -> np.ndarray:
    """Header, slots and the items below the count."""
    data = np.fromfile(path, np.uint8)
    count = int.from_bytes(data[index_layout.ITEM_COUNT : index_layout.ITEM_COUNT + 4].tobytes(), "big")
    return data[: index_layout.item_offset(group.options["max_hash_slot_num"], max(1, count))]


# Transactions

GROUP = "billing"
FAST = {"transaction_timeout": 200, "transaction_check_interval": 200}


def messages_of(client: Client, topic: str) -> list[StoredMessage]:
    """All messages of a topic, after dispatch has reached the end of the log."""
    client.wait_dispatched()
    queues = [queue for queue in client.queues() if queue.topic == topic]
    return [each for queue in queues for each in client.pull(topic, queue.queue_id, 0, 4096).messages]


def bodies(client: Client, topic: str) -> list[bytes]:
    return sorted(each.body for each in messages_of(client, topic))


def handle_of(transaction: Transaction, **changes: Any) -> Handle:
    fields = {"group": GROUP, "topic": "", "transaction_id": transaction.transaction_id} | changes
    return Handle(physical_offset=transaction.sent.physical_offset, **fields)


def open_ids(client: Client) -> set[str]:
    return {each.transaction_id for each in client.transactions.open()}


def open_transaction(client: Client, group: str, message: Message, **settings: Any) -> Transaction:
    with client.transaction(group, message, **settings) as transaction:
        transaction.leave()
    return transaction


def wait_all_ended(client: Client, group: str) -> None:
    wait_until(lambda: not client.transactions.open(group), 60, f"no open transaction of {group}")


# The program of a HeldGroup


def main(store: str, *flags: str) -> int:
    from mqproc.cli.admin.engine_hooks import engine_hooks
    from mqproc.config.parse import load_options
    from mqproc.roles.registry import SPECS
    from mqproc.store.recovery.recovery import adopt_sizes
    from mqproc.supervisor import supervise

    paths = StorePaths(Path(store))
    options = adopt_sizes(StoreIO(), paths, load_options(flags=list(flags), environment={}), print)
    return supervise(paths, options, SPECS, engine_hooks(), io=HeldIO(paths.root.parent)).exit_code


# Topics to consume, and the messages that consumers return

QUIET_S = 1.0
"""When nothing has come for so long, on a busy machine too, nothing will."""


def fill(client: Client, topic: str, count: int, queues: int = 4) -> list[bytes]:
    """A topic with so many messages, round its queues."""
    client.create_topic(topic, queues)
    bodies = [b"%d" % number for number in range(count)]
    if bodies:
        client.send_batch(topic, bodies, queue_ids=[number % queues for number in range(count)])
    client.wait_dispatched()
    return bodies


@contextlib.contextmanager
def no_thread_starts() -> Iterator[None]:
    """As under a limit that leaves room for none."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def hide_from_one_pull(monkeypatch: pytest.MonkeyPatch, topic: str) -> list[int]:
    """Make the topic's next pull name a missing queue, as when the topic is deleted and created.

    Returns the offsets that its pulls ask for.
    """
    asked: list[int] = []
    made = core.pull_request

    def pull_request(name: str, queue_id: int, offset: int, *others: Any) -> Any:
        if name != topic:
            return made(name, queue_id, offset, *others)
        asked.append(offset)
        # A pull of a missing queue waits when it asks from the beginning.
        return made(name, queue_id, offset, *others) if asked[1:] else made(f"Not{name}", queue_id, 1, *others)

    monkeypatch.setattr(core, "pull_request", pull_request)
    return asked


def all_of(consumer: Any, count: int) -> list[Any]:
    """Read `count` messages of a consumer, then check for a while that no more follow."""
    return _all(lambda timeout: consumer.messages(timeout=timeout), count, lambda message: 1)


def all_batches_of(consumer: Any, columns: list[str], rows: int) -> list[Any]:
    """The same in Arrow batches, of so many rows together."""
    return _all(lambda timeout: consumer.batches(columns, timeout=timeout), rows, lambda batch: batch.num_rows)


def _all(looped: Callable[[float], Iterator[Any]], count: int, counts: Callable[[Any], int]) -> list[Any]:
    found: list[Any] = []
    for each in looped(PATIENCE_S) if count else ():
        found.append(each)
        if sum(map(counts, found)) >= count:
            break
    return found + list(looped(QUIET_S))


async def all_of_async(consumer: Any, count: int) -> list[Any]:
    """`all_of` of a consumer of asyncio's client."""
    return await _all_async(lambda timeout: consumer.messages(timeout=timeout), count, lambda message: 1)


async def all_batches_of_async(consumer: Any, columns: list[str], rows: int) -> list[Any]:
    """`all_batches_of` of a consumer of asyncio's client."""
    return await _all_async(
        lambda timeout: consumer.batches(columns, timeout=timeout), rows, lambda batch: batch.num_rows
    )


async def _all_async(
    looped: Callable[[float], AsyncGenerator[Any]], count: int, counts: Callable[[Any], int]
) -> list[Any]:
    found: list[Any] = []
    if count:
        async with contextlib.aclosing(looped(PATIENCE_S)) as loop:
            async for each in loop:
                found.append(each)
                if sum(map(counts, found)) >= count:
                    break
    return found + [each async for each in looped(QUIET_S)]


def bodies_of(messages: Any) -> list[bytes]:
    return sorted((message.body for message in messages), key=lambda body: int(body))


def offsets(client: Client, group: str, topic: str) -> list[int | None]:
    return [queue.offset for queue in client.groups.info(group).queues if queue.topic == topic]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

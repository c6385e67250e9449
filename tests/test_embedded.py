"""`mqproc.open`: a group for the duration of a block, shared with other users of the store."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mqproc
from mqproc import embedded
from mqproc.errors import (
    BadRequestError,
    MqprocError,
    NotRunningError,
    RequestTimeoutError,
    SendOutcomeUnknownError,
    StartError,
    StoreLockedError,
)
from mqproc.ipc import usage_lock as openers
from mqproc.paths import StorePaths
from tests.support.group import PATIENCE_S, POINTS, START_TIMEOUT_S, Group, HeldGroup, wait_until

AT_ONCE_S = 10.0
"""A third of a client's timeout, which is not waited for."""


def test_embedded_running_group_is_used_and_left_running(group: Group) -> None:
    with mqproc.open(group.store) as client:
        assert client.send("orders", b"x").queue_offset == 0
    with group.client() as after:
        assert after.health()


def test_embedded_start_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start on a machine compiles, which takes minutes on a busy machine."""
    waits: list[tuple[str, float | None]] = []

    class Watched(subprocess.Popen[str]):
        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            waits.append((next(word for word in ("up", "down") if word in self.args), timeout))
            return super().communicate(input, timeout)

    monkeypatch.setattr(embedded.subprocess, "Popen", Watched)
    with mqproc.open(tmp_path / "store"):
        pass
    # The start is followed as long as it reports progress.
    assert waits == [("down", embedded.STOP_TIMEOUT_S)]


def test_embedded_misspelt_variable_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning of `mqproc up` is lost: `open` reports only the cause of a failed start."""
    monkeypatch.setenv("MQPROC_FLUSH_DISK_TYP", "SYNC_FLUSH")
    for _ in range(2):
        with mqproc.open(tmp_path / "store"), mqproc.open(tmp_path / "store"):
            told = [record.getMessage() for record in caplog.records if record.name == "mqproc.open"]
        assert told == ["MQPROC_FLUSH_DISK_TYP is not an option, and ignored; did you mean MQPROC_FLUSH_DISK_TYPE?"]
        caplog.clear()


def test_embedded_stalled_start_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a stopped supervisor; a start that shows progress is awaited without a limit."""
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    told = [[3], [2], [1], [1]]

    def tells(_paths: StorePaths) -> list[int]:
        return told.pop() if told else [3]

    monkeypatch.setattr(embedded.sys, "executable", str(hanging))
    monkeypatch.setattr(embedded, "start_progress", tells)
    monkeypatch.setattr(embedded, "PROGRESS_CHECK_S", 0.01)
    monkeypatch.setattr(embedded, "STALL_TIMEOUT_S", 0.05)
    with pytest.raises(StartError, match=r"mqproc up reported no progress in 0\.05 s"):
        mqproc.open(tmp_path / "store")
    assert not told


def test_embedded_start_progress_follows_heartbeat(group: Group, tmp_path: Path) -> None:
    assert embedded.start_progress(StorePaths(tmp_path / "none")) == []
    paths = StorePaths(group.store)
    told = embedded.start_progress(paths)
    wait_until(lambda: embedded.start_progress(paths) != told, what="the supervisor's next heartbeat")


def test_embedded_concurrent_starts_share_one_group(tmp_path: Path) -> None:
    store = tmp_path / "store"
    both = threading.Barrier(2)

    def use(number: int) -> int:
        with mqproc.open(store) as client:
            stored = client.send("orders", b"%d" % number, queue_id=0).queue_offset
            both.wait(PATIENCE_S)
        return stored

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(use, range(2))) == [0, 1]
    assert not runs(store)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose groups `open` starts; none runs between tests."""
    return tmp_path_factory.mktemp("opened") / "store"


def runs(store: Path) -> bool:
    try:
        with mqproc.Client(store, timeout=AT_ONCE_S) as client:
            client.health()
    except NotRunningError:
        return False
    return True


def test_embedded_last_user_stops_group(store: Path) -> None:
    with ExitStack() as later:
        with mqproc.open(store) as first:
            second = later.enter_context(mqproc.open(store))
            first.send("orders", b"x")
        second.wait_dispatched()
        assert second.count("orders") == 1
    assert not runs(store)


def test_embedded_ended_user_is_not_counted(store: Path) -> None:
    program = f"import mqproc, os\nopened = mqproc.open({str(store)!r})\nopened.__enter__()\nos._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
    assert runs(store)
    with mqproc.open(store) as client:
        assert client.health()
    assert not runs(store)


def test_embedded_group_stops_after_all_users_killed(store: Path) -> None:
    program = f"import mqproc, time\nopened = mqproc.open({str(store)!r})\nprint(1, flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as user:
        assert user.stdout
        assert user.stdout.read(1) == b"1"
        user.kill()
    killed_s = time.monotonic()
    assert runs(store)
    wait_until(lambda: not runs(store), what="the end of an unused group")
    assert time.monotonic() - killed_s > openers.UNUSED_S / 2, "others have time to come"
    wait_until(lambda: not StorePaths(store).abort.exists(), what="the end of a stop in order")


def test_embedded_last_user_stops_group_of_killed_starter(store: Path) -> None:
    program = (
        "import os, mqproc, mqproc.embedded as embedded\n"
        "run = embedded.run_command\n"
        "embedded.run_command = lambda *given: (run(*given), os._exit(0))\n"
        f"mqproc.open({str(store)!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * PATIENCE_S)
    assert runs(store)
    with mqproc.open(store) as client:
        assert client.health()
    assert not runs(store)


@pytest.mark.parametrize("is_new", [True, False])
def test_embedded_interrupted_start_leaves_no_group(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    wanted = tmp_path / "store" if is_new else store
    wait = subprocess.Popen.wait
    interrupted: list[object] = []

    def interrupt(child: Any, *given: Any, **named: Any) -> object:
        code = wait(child, *given, **named)
        if "up" in child.args and not interrupted:
            interrupted.append(child)
            raise KeyboardInterrupt
        return code

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        mqproc.open(wanted)
    assert interrupted
    assert not runs(wanted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_embedded_interrupted_hung_start_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    children: list[subprocess.Popen[str]] = []

    class Watched(subprocess.Popen[str]):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            children.append(self)

    def interrupt(_paths: object) -> list[int]:
        raise error

    monkeypatch.setattr(embedded.sys, "executable", str(hanging))
    monkeypatch.setattr(embedded.subprocess, "Popen", Watched)
    monkeypatch.setattr(embedded, "start_progress", interrupt)
    monkeypatch.setattr(embedded, "INTERRUPTED_S", 0.01)
    with pytest.raises(error):
        mqproc.open(tmp_path / "store")
    assert children[0].wait(PATIENCE_S) == -signal.SIGKILL


def test_embedded_killed_start_is_not_awaited(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held the lock is gone at the next check."""
    run, locked = embedded.run_command, [StoreLockedError("another is starting it")]

    def refused_at_first(*given: Any) -> None:
        if locked:
            raise locked.pop()
        run(*given)

    monkeypatch.setattr(embedded, "run_command", refused_at_first)
    with mqproc.open(store, timeout=Decimal(PATIENCE_S)) as client:
        assert client.health()


def test_embedded_group_stopped_before_its_starter_joined_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the store's folder there is no lock yet: another opener may come and go during the start."""
    run, stopped = embedded.run_command, []

    def stopped_at_once(command: str, *given: Any) -> None:
        run(command, *given)
        if command == "up" and not stopped:
            stopped.append(given)
            run("down", tmp_path / "store", [], embedded.STOP_TIMEOUT_S)

    monkeypatch.setattr(embedded, "run_command", stopped_at_once)
    monkeypatch.setattr(embedded, "_make_folder", lambda paths: None)
    with mqproc.open(tmp_path / "store") as client:
        assert client.send("orders", b"x").queue_offset == 0
    assert stopped
    assert not runs(tmp_path / "store")


def test_embedded_pipe_as_usage_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mqproc").mkdir()
    os.mkfifo(StorePaths(tmp_path).usage_lock)
    with pytest.raises(StartError, match=r"/openers.lock: not a file$"):
        mqproc.open(tmp_path, timeout=PATIENCE_S)


def test_embedded_running_start_is_awaited_until_timeout(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_given: Any) -> None:
        raise StoreLockedError("another is starting it")

    monkeypatch.setattr(embedded, "run_command", refused)
    with pytest.raises(StoreLockedError, match="another is starting it"):
        mqproc.open(store, timeout=0.2)


@pytest.fixture
def recovering(tmp_path: Path) -> Iterator[HeldGroup]:
    """A group being started by another process; its recovery waits for the test."""
    group = HeldGroup(tmp_path / "store")
    group.start()
    group.kill()
    group.begin()
    group.wait_at(POINTS[0])
    yield group
    group.close()


def test_embedded_recovering_group_is_awaited(recovering: HeldGroup) -> None:
    timer = threading.Timer(1.5 * embedded.ANSWER_TIMEOUT_S, recovering.continue_from, POINTS)
    timer.start()
    with mqproc.open(recovering.store, timeout=START_TIMEOUT_S) as client:
        assert client.send("orders", b"x").queue_offset == 0
    timer.join()
    assert runs(recovering.store)


def test_embedded_recovery_past_timeout_is_not_awaited(recovering: HeldGroup) -> None:
    began_s = time.monotonic()
    with pytest.raises(RequestTimeoutError, match="the group is recovering"):
        mqproc.open(recovering.store, timeout=3.0)
    assert time.monotonic() - began_s >= 3.0


def test_embedded_group_killed_in_recovery_is_started_again(recovering: HeldGroup) -> None:
    kill = threading.Timer(1.5 * embedded.ANSWER_TIMEOUT_S, recovering.close)
    kill.start()
    with mqproc.open(recovering.store, timeout=START_TIMEOUT_S) as client:
        assert client.send("orders", b"x").queue_offset == 0
    kill.join()
    assert not runs(recovering.store)


def test_embedded_close_without_block_stops_group(store: Path) -> None:
    client = mqproc.open(store)
    other = mqproc.open(store)
    assert client.send("orders", b"x").message_id
    client.close()
    client.close()
    assert other.health()
    with copy.copy(other) as copied:
        assert copied.health()
    assert runs(store), "a copy has opened nothing"
    other.close()
    assert not runs(store)


def test_embedded_interrupted_close_is_completed_by_next(store: Path) -> None:
    """The interrupt comes just before the client leaves the group's users."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_leave":
            sys.setprofile(None)
            raise KeyboardInterrupt

    client = mqproc.open(store)
    try:
        sys.setprofile(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.close()
    finally:
        sys.setprofile(None)
    assert runs(store)
    client.close()
    assert not runs(store)


def test_embedded_program_exit_sends_all_and_stops_group(store: Path) -> None:
    program = (
        "import mqproc, sys\n"
        "client = mqproc.open(sys.argv[1])\n"
        "client.producer(linger_ms=60_000).send('left', b'x')\n"
        "mqproc.open(sys.argv[1]).send('left', b'y')\n"
    )
    arguments = [sys.executable, "-c", program, str(store)]
    done = subprocess.run(arguments, capture_output=True, timeout=2 * PATIENCE_S, check=True)
    assert done.stderr == b""
    assert not runs(store)
    with mqproc.open(store) as client:
        client.wait_dispatched()
        assert client.count("left") == 2


def test_embedded_failure_at_exit_leaves_no_group(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("cannot join thread before it is started")

    mqproc.open(store)
    mqproc.open(store)
    monkeypatch.setattr(embedded, "close_all", fail)
    with pytest.raises(RuntimeError, match="cannot join"):
        embedded.close_opened_clients()
    assert not runs(store)


def test_embedded_close_commits_consumers_progress(store: Path) -> None:
    client = mqproc.open(store)
    client.send_batch("done", [b"%d" % number for number in range(4)], queue_id=0)
    consumer = client.consumer("closed-last", "done", start="earliest")
    messages: list[mqproc.StoredMessage] = []
    while len(messages) < 2:
        messages += consumer.receive(2 - len(messages), timeout=PATIENCE_S)
    consumer.ack(*messages)
    client.close()
    assert not runs(store)
    began = time.monotonic()
    consumer.close()
    with pytest.raises(BadRequestError, match="the consumer is closed"):
        consumer.receive()
    assert time.monotonic() - began < AT_ONCE_S
    with mqproc.open(store) as after, after.consumer("closed-last", "done") as rest:
        assert [message.body for message in rest.receive(timeout=PATIENCE_S)] == [b"2", b"3"]


def test_embedded_close_sends_producers_remaining_messages(store: Path) -> None:
    with mqproc.open(store) as client:
        producer = client.producer(linger_ms=3_600_000)
        future = producer.send("buffered", b"x")
    assert future.result(0).queue_offset == 0
    with mqproc.open(store) as client:
        assert [message.body for message in client.range("buffered")] == [b"x"]


def test_embedded_client_of_stopped_group_raises_at_once(store: Path) -> None:
    client = mqproc.open(store)
    simple = client.simple_consumer("late", "kept", start="earliest")
    client.send("kept", b"x", queue_id=0)
    client.wait_dispatched()
    [message] = simple.receive(timeout=PATIENCE_S)
    transaction = client.transaction("late", mqproc.Message("kept", b"y"))
    transaction.begin()
    client.close()
    stopped = "this client is closed, and its group was stopped with it"
    began = time.monotonic()
    for call in (functools.partial(client.send, "kept", b"z"), functools.partial(simple.ack, message)):
        with pytest.raises(NotRunningError, match=stopped):
            call()
    with pytest.raises(MqprocError, match=stopped):
        transaction.commit()
    assert time.monotonic() - began < AT_ONCE_S
    with mqproc.open(store):
        assert client.send("kept", b"z").message_id, "the group is there again"
    with pytest.raises(NotRunningError, match=stopped):
        client.send("kept", b"z")
    assert time.monotonic() - began < PATIENCE_S


def test_embedded_close_reports_failed_commit(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mqproc.open(store)
    client.send_batch("lost", [b"x"], queue_id=0)
    consumer = client.consumer("lost", "lost", start="earliest")
    consumer.ack(*wait_until(lambda: consumer.receive(timeout=PATIENCE_S), what="the message"))
    run("down", store)
    asked: list[Any] = []

    def ask(call: Any) -> Any:
        asked.append(call)
        return mqproc.Client.run(client, call)

    monkeypatch.setattr(client, "run", ask)
    client.timeout_s = 2.0
    with pytest.raises((NotRunningError, SendOutcomeUnknownError)):
        client.close()
    assert len(asked) == 1, "the last user sends no request, since the group has ended"
    consumer.close()
    with pytest.raises(NotRunningError, match="this client is closed, and its group has ended since"):
        client.health()


def test_embedded_ended_fork_keeps_group(store: Path) -> None:
    program = (
        "import mqproc, os, sys\n"
        "client = mqproc.open(sys.argv[1])\n"
        "if child := os.fork():\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print(client.send('orders', b'x').message_id)\n"
    )
    arguments = [sys.executable, "-W", "ignore", "-c", program, str(store)]
    done = subprocess.run(arguments, capture_output=True, timeout=2 * PATIENCE_S, check=True)
    assert len(done.stdout) == 33
    assert not runs(store)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_embedded_fork_does_not_stop_group(store: Path) -> None:
    with ExitStack() as opened:
        client = opened.enter_context(mqproc.open(store))
        child = multiprocessing.get_context("fork").Process(target=opened.close)
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        assert client.health()
    assert not runs(store)


def test_embedded_group_already_stopped_is_not_stopped_again(store: Path) -> None:
    with mqproc.open(store):
        run("down", store)
    assert not runs(store)
    with mqproc.open(store):
        run("down", store)
        run("up", store, "--detach")
    assert runs(store), "this one was started in another way"
    run("down", store)


def run(command: str, store: Path, *flags: str) -> None:
    arguments = [sys.executable, "-m", "mqproc", command, "--store", str(store), *flags]
    subprocess.run(arguments, check=True, timeout=2 * PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True)


def test_embedded_empty_path_is_refused() -> None:
    with pytest.raises(BadRequestError, match="path is empty"), mqproc.open(""):
        pass


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", None])
def test_embedded_invalid_timeout_is_refused(tmp_path: Path, timeout: Any) -> None:
    """Otherwise a group was started and stopped again, and a string raised a TypeError."""
    with pytest.raises(BadRequestError, match=r"^timeout = .* is out of range: above 0, and finite"):
        mqproc.open(tmp_path / "store", timeout=timeout)
    assert not (tmp_path / "store").exists()


def test_embedded_failed_start_raises_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=f"^{tmp_path}/.*: its parent folder does not exist") as refused:
        mqproc.open(tmp_path / "none" / "store")
    assert type(refused.value) is StartError


def test_embedded_current_folder_is_not_on_module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "click.py").write_text("raise RuntimeError('it is taken for click')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match="its parent folder does not exist"):
        mqproc.open(tmp_path / "none" / "store")


def test_embedded_tilde_is_home_folder(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(store.parent))
    monkeypatch.chdir(store.parent)
    with mqproc.open("~/store") as client, mqproc.Client("~/store") as other:
        assert other.store == client.store == store
        assert other.health()
    assert not Path("~").exists()


@pytest.mark.parametrize("name", [b"lat\xe9in", b"store.sock", b"-a b=%d", "käse 中".encode()])
def test_embedded_folder_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    store = tmp_path / os.fsdecode(name)
    with mqproc.open(store) as client:
        client.send("orders", b"x")
        client.wait_dispatched()
        run("status", store)
        with mqproc.Client(store) as other:
            assert other.count("orders") == 1


def test_embedded_start_works_in_ascii_locale(tmp_path: Path) -> None:
    program = (
        "import sys, mqproc\nwith mqproc.open(sys.argv[1]) as client: print(client.send('orders', b'x').queue_offset)"
    )
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    arguments = [sys.executable, "-c", program, str(tmp_path / "käse 中")]
    done = subprocess.run(arguments, capture_output=True, timeout=2 * PATIENCE_S, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, b"0\n"), done.stderr


OPENER = """
import sys, time, mqproc
time.sleep(float(sys.argv[2]))
with mqproc.open(sys.argv[1], options={"metrics_port": 0}) as client:
    client.send("orders", b"x")
"""
OFFSETS_S = (0.0, 0.0, 0.4, 0.9, 1.3)
"""Start of each opener in seconds: at once, and within the time of a start or a stop."""


@pytest.mark.parametrize("state", ["missing", "empty", "lost+found", "mqproc.toml", "existing"])
def test_embedded_openers_at_any_moment_all_send(tmp_path: Path, state: str) -> None:
    folder = tmp_path / "store"
    if state != "missing":
        folder.mkdir(mode=0o700)
    if state == "lost+found":  # A new file system.
        (folder / state).mkdir()
    if state == "mqproc.toml":
        (folder / state).write_text("metrics_port = 0\n")
    if state == "existing":
        with mqproc.open(folder, options={"metrics_port": 0}):
            pass
    programs = [
        subprocess.Popen([sys.executable, "-c", OPENER, str(folder), str(offset_s)], stderr=subprocess.PIPE, text=True)
        for offset_s in OFFSETS_S
    ]
    errors = [program.communicate(timeout=START_TIMEOUT_S)[1] for program in programs]
    assert [program.returncode for program in programs] == [0] * len(programs), errors
    with mqproc.open(folder, options={"metrics_port": 0}) as client:
        client.wait_dispatched(PATIENCE_S)
        assert client.count("orders") == len(OFFSETS_S)


def test_embedded_threads_at_any_moment_all_send(tmp_path: Path) -> None:
    def send(offset_s: float) -> None:
        time.sleep(offset_s)
        with mqproc.open(tmp_path / "store", options={"metrics_port": 0}) as client:
            client.send("orders", b"x")

    with ThreadPoolExecutor(len(OFFSETS_S)) as pool:
        assert list(pool.map(send, OFFSETS_S)) == [None] * len(OFFSETS_S)


VENDORED = """
import sys
sys.path.insert(0, sys.argv[1])
import mqproc
with mqproc.open(sys.argv[2], options={"metrics_port": 0}) as client:
    print(client.send("orders", b"x").queue_offset)
"""


def test_embedded_import_path_is_that_of_the_program(tmp_path: Path) -> None:
    """As in a PEX, or with `pip install --target`: only this program knows where mqproc lies."""
    vendored = tmp_path / "vendored"
    vendored.mkdir()
    for folder in map(Path, {path for path in sys.path if path.endswith("site-packages")}):
        for each in folder.iterdir():
            if not each.name.endswith(".pth") and "mqproc" not in each.name:
                (vendored / each.name).symlink_to(each)
    (vendored / "mqproc").symlink_to(Path(mqproc.__file__).parent)
    script = tmp_path / "script" / "program.py"
    script.parent.mkdir()
    script.write_text(VENDORED)
    script.with_name("click.py").write_text("raise SystemExit('the script folder replaces modules of the command')")
    command = [sys.executable, "-S", str(script), str(vendored), str(tmp_path / "store")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


DELETED_FOLDER = """
import os, sys, mqproc
os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])
for make in (mqproc.open, mqproc.Client, mqproc.AsyncClient, mqproc.StoreReader):
    try:
        make("store")
    except mqproc.MqprocError as error:
        print(error)
with mqproc.open(sys.argv[2], options={"metrics_port": 0}) as client:
    print(client.send("orders", b"x").queue_offset)
"""


def test_embedded_deleted_current_folder_is_named(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "deleted"), str(tmp_path / "store")]
    command = [sys.executable, "-c", DELETED_FOLDER, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    *errors, last = done.stdout.splitlines()
    assert last == "0", done.stderr
    assert len(errors) == 4
    assert all("relative to the current folder, which was deleted" in error for error in errors)

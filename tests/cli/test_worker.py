"""`mqproc worker` and `run(signals=True)` as processes that get real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import Client
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, fill, offsets, wait_until

TASKS = """
import asyncio, pathlib, time

FOLDER = pathlib.Path(__file__).parent

def note(message):
    (FOLDER / f"begun-{message.body.decode()}").touch()

def handle(message):
    note(message)
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    (FOLDER / f"done-{message.body.decode()}").touch()

async def handle_async(message):
    note(message)
    while not (FOLDER / "go").exists():
        await asyncio.sleep(0.01)
    (FOLDER / f"done-{message.body.decode()}").touch()

class Callable:
    async def __call__(self, message):
        await handle_async(message)

instance = Callable()

def fail(message):
    with (FOLDER / "tries").open("a") as file:
        file.write(f"{message.reconsume_times} {message.body.decode()}\\n")
    if not message.reconsume_times:
        raise ValueError("the first time")

number = 3
"""
RUN = """
import asyncio, sys, threading
import mqproc, tasks

store, topic = sys.argv[1:]

async def main():
    async with mqproc.AsyncClient(store) as client, client.consumer(topic, topic, start="earliest") as consumer:
        print("begun", flush=True)
        await consumer.run(tasks.handle_async, workers=2, signals=True)

if "Async" in topic:
    asyncio.run(main())
else:
    with mqproc.Client(store) as client, client.consumer(topic, topic, start="earliest") as consumer:
        print("begun", flush=True)
        consumer.run(tasks.handle, workers=2, signals=True)
print("ended in order")
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("worker") / "store").start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def worker(folder: Path, group: Group, function: str, topic: str, *flags: str) -> subprocess.Popen[str]:
    """A worker of the group that is named as its topic."""
    command = ["worker", function, "--topic", topic, "--group", topic, "--store", str(group.store), *flags]
    return start(folder, "-m", "mqproc", *command)


def said_until(process: subprocess.Popen[str], text: str) -> str:
    """The standard error of a worker up to a line with a text."""
    assert process.stderr is not None
    said = ""
    while text not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def found(folder: Path, kind: str) -> set[str]:
    return {path.name.partition("-")[2] for path in folder.glob(f"{kind}-*")}


def is_caught(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; the first signal takes the worker's away."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> number - 1 & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("function", ["handle", "handle_async", "instance"])
def test_first_signal_finishes_the_work_in_hand(
    tasks: Path, shared: Group, client: Client, function: str, number: signal.Signals
) -> None:
    topic = f"First-{function}-{number.name}"
    fill(client, topic, 8, queues=1)
    with worker(tasks, shared, f"tasks:{function}", topic, "--workers", "2", "--from", "earliest") as process:
        wait_until(lambda: len(found(tasks, "begun")) == 2, what="two messages in hand")
        process.send_signal(number)
        wait_until(lambda: not is_caught(process.pid, number), what="the first signal")
        assert process.poll() is None
        (tasks / "go").touch()
        errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0, errors
    assert f"tasks:{function} handles {topic} for group {topic}, 2 workers" in errors
    assert found(tasks, "done") == found(tasks, "begun") == {"0", "1"}
    assert offsets(client, topic, topic) == [2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_at_once(tasks: Path, shared: Group, client: Client, number: signal.Signals) -> None:
    topic = f"Second-{number.name}"
    fill(client, topic, 2, queues=1)
    with worker(tasks, shared, "tasks:handle", topic, "--from", "earliest") as process:
        wait_until(lambda: found(tasks, "begun"), what="a message in hand")
        process.send_signal(number)
        wait_until(lambda: not is_caught(process.pid, number), what="the first signal")
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == -number
    assert found(tasks, "done") == set()
    (tasks / "go").touch()
    with worker(tasks, shared, "tasks:handle", topic) as process:
        wait_until(lambda: found(tasks, "done") == {"0", "1"}, what="redelivery")
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@pytest.mark.parametrize("topic", ["RunSync", "RunAsync"])
def test_run_with_signals_returns_at_the_first_one(tasks: Path, shared: Group, client: Client, topic: str) -> None:
    fill(client, topic, 8, queues=1)
    (tasks / "program.py").write_text(RUN)
    with start(tasks, "program.py", shared.store, topic) as process:
        wait_until(lambda: len(found(tasks, "begun")) == 2, what="two messages in hand")
        process.terminate()
        wait_until(lambda: not is_caught(process.pid, signal.SIGTERM), what="the first signal")
        (tasks / "go").touch()
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output.splitlines()[-1]) == (0, "ended in order"), errors
    assert offsets(client, topic, topic) == [2]


def test_failed_message_is_redelivered(tasks: Path, shared: Group, client: Client) -> None:
    sent = fill(client, "Failed", 1, queues=1)
    with worker(tasks, shared, "tasks:fail", "Failed", "--from", "earliest") as process:
        wait_until(lambda: (tasks / "tries").exists(), what="the first try")
        wait_until(lambda: client.groups.info("Failed").waiting_retries, what="the redelivery to wait")
        process.terminate()
        errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0
    assert "ValueError: the first time" in errors
    assert (tasks / "tries").read_text() == f"0 {sent[0].decode()}\n"


def test_ordered_worker_handles_a_queue_in_order(tasks: Path, shared: Group, client: Client) -> None:
    fill(client, "Ordered", 20, queues=1)
    (tasks / "go").touch()
    with worker(
        tasks, shared, "tasks:handle", "Ordered", "--workers", "4", "--ordered", "--from", "earliest"
    ) as process:
        wait_until(lambda: len(found(tasks, "done")) == 20, what="all handled")
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    times = [(tasks / f"begun-{number}").stat().st_mtime_ns for number in range(20)]
    assert times == sorted(times)


def test_watch_starts_again_with_changed_source(tasks: Path, shared: Group, client: Client) -> None:
    fill(client, "Watched", 1, queues=1)
    (tasks / "go").touch()
    with worker(tasks, shared, "tasks:handle", "Watched", "--from", "earliest", "--watch") as process:
        wait_until(lambda: found(tasks, "done") == {"0"}, what="the first message")
        (tasks / "tasks.py").write_text("def handle(message)\n")
        said = said_until(process, "the worker ended with exit code 2; waiting for a change")
        (tasks / "tasks.py").write_text(TASKS.replace("done-", "changed-"))
        client.send("Watched", b"next")
        wait_until(lambda: found(tasks, "changed") == {"next"}, what="the changed function")
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0, errors
    assert "1 file changed: starting again" in said
    assert found(tasks, "done") == {"0"}


def test_wrong_input_is_one_line(
    tasks: Path, shared: Group, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client.create_topic("Wrong", 1)
    monkeypatch.chdir(tasks)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tasks / "broken.py").write_text("import not_there\n")
    for function, flags, code, text in (
        ("tasks", (), 2, "'tasks' is not MODULE:FUNCTION"),
        ("taskz:handle", (), 2, f"no module 'taskz' in {tasks}"),
        ("broken:handle", (), 2, "importing broken failed: ModuleNotFoundError: No module named 'not_there'"),
        ("tasks:handel", (), 2, "module tasks has no 'handel'"),
        ("tasks:number", (), 2, "tasks:number is int, which cannot be called"),
        ("tasks:handle", (), 5, "no group 'wrong': --from earliest or --from latest creates it"),
        ("tasks:handle", ("--topic", "Wrongg"), 5, "no topic 'Wrongg'"),
        ("tasks:handle", ("--from", "begin"), 2, "or earliest, latest"),
        ("tasks:handle", ("--store", str(tmp_path)), 9, str(tmp_path)),
    ):
        command = ("worker", function, "--store", shared.store, "--topic", "Wrong", "--group", "wrong", *flags)
        outcome = call(*command)
        assert (outcome.code, outcome.out) == (code, ""), (function, flags, outcome)
        assert text in outcome.err
        assert len(outcome.err.splitlines()) == 1


def test_watch_without_watchfiles_names_the_installation(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    outcome = call("worker", "tasks:handle", "--topic", "T", "--group", "g", "--watch", "--store", tasks)
    assert (outcome.code, "pip install 'mqproc[watch]'" in outcome.err) == (2, True)

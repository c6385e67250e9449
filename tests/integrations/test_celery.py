"""Celery's real worker on the transport: 10,000 tasks and a kill, acknowledgements, queue operations."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Consumer, Producer, Queue

from mqproc.errors import ConfigurationError
from mqproc.integrations.celery import topic_of
from tests.support.group import PATIENCE_S, ROOT, Group, wait_until

APP = """
import os, time
from celery import Celery
import mqproc.integrations.celery

app = Celery("app", broker="mqproc://{store}", broker_transport_options={{"visibility_timeout": 3}})
app.conf.update(task_acks_late=True, task_ignore_result=True, broker_connection_retry_on_startup=True)

@app.task
def work(number):
    while number >= {held} and not os.path.exists("continue"):
        time.sleep(0.05)
    fd = os.open("done", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\\n" % number)
    os.close(fd)

@app.task
def sleep(number, seconds):
    time.sleep(seconds)
    work(number)
"""
TASKS = 10_000
HELD = TASKS // 2
"""The first task that waits for the file `continue`, so that no worker ends before it is killed."""
POLL_S = 0.2
"""Pause between looks at a file that the workers need the processors for."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("celery") / "store").start()
    yield group
    group.close()


@pytest.fixture
def workers(tmp_path: Path, shared: Group) -> Iterator[Any]:
    """Starts Celery workers in process groups of their own, which are killed after the test."""
    (tmp_path / "app.py").write_text(APP.format(store=shared.store, held=HELD))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    started: list[subprocess.Popen[bytes]] = []

    def start(queue: str, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "celery", "-A", "app", "worker", "-Q", queue, "-l", "WARNING", *flags]
        with (tmp_path / "log").open("ab") as log:
            started.append(
                subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
        return started[-1]

    yield start
    for process in started:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and its pool."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)


def application(group: Group) -> Celery:
    return Celery("app", broker=f"mqproc://{group.store}")


def done(folder: Path) -> list[int]:
    path = folder / "done"
    return list(map(int, path.read_text().split())) if path.exists() else []


def send_all(app: Celery, queue: str, name: str, arguments: Iterator[Any]) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for each in arguments:
            app.send_task(name, each, queue=queue, producer=producer, ignore_result=True)


@pytest.mark.timeout(300)
def test_no_task_is_lost_when_a_worker_is_killed(tmp_path: Path, shared: Group, workers: Any) -> None:
    first = workers("many", "-c", "2")
    send_all(application(shared), "many", "app.work", ((number,) for number in range(TASKS)))
    wait_until(lambda: time.sleep(POLL_S) or len(done(tmp_path)) >= TASKS // 4, 120, what=log_of(tmp_path))
    kill(first)
    assert len(done(tmp_path)) < TASKS
    (tmp_path / "continue").touch()
    second = workers("many", "-c", "2")
    wait_until(lambda: time.sleep(POLL_S) or len(set(done(tmp_path))) == TASKS, 240, what=log_of(tmp_path))
    second.terminate()
    assert second.wait(PATIENCE_S) == 0, log_of(tmp_path)
    # Only the tasks that the killed worker held are run again.
    again = [number for number, count in Counter(done(tmp_path)).items() if count > 1]
    assert len(again) <= 64


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()[-3000:]


def test_task_longer_than_the_invisible_time_runs_once(tmp_path: Path, shared: Group, workers: Any) -> None:
    workers("long", "-c", "1")
    workers("long", "-c", "1")
    send_all(application(shared), "long", "app.sleep", iter([(1, 7.0)]))
    wait_until(lambda: done(tmp_path), what="the long task")
    send_all(application(shared), "long", "app.work", iter([(2,)]))
    wait_until(lambda: 2 in done(tmp_path), what="the next task")
    assert done(tmp_path) == [1, 2]


def test_worker_ended_in_order_returns_its_messages(tmp_path: Path, shared: Group, workers: Any) -> None:
    send_all(application(shared), "ended", "app.sleep", ((number, 0.2) for number in range(10)))
    first = workers("ended", "-c", "1")
    wait_until(lambda: done(tmp_path), what="the first task")
    first.terminate()
    assert first.wait(PATIENCE_S) == 0
    workers("ended", "-c", "1")
    wait_until(lambda: len(done(tmp_path)) >= 10, what="the other tasks")
    assert sorted(done(tmp_path)) == list(range(10))


@pytest.fixture
def connection(shared: Group) -> Iterator[Connection]:
    with Connection(f"mqproc://{shared.store}", transport_options={"visibility_timeout": 2}) as connection:
        yield connection


def received(connection: Connection, queue: Queue, timeout: float, **settings: Any) -> list[Any]:
    """The messages that arrive until none does for so long."""
    found: list[Any] = []
    with Consumer(connection, queue, callbacks=[lambda body, message: found.append(message)], **settings):
        try:
            while True:
                connection.drain_events(timeout=timeout)
        except socket.timeout:  # noqa: UP041
            return found


def test_queue_operations(connection: Connection, shared: Group) -> None:
    queue = Queue("a.b@c", routing_key="a.b@c")
    channel = connection.channel()
    Producer(channel).publish({"n": 1}, routing_key="a.b@c", declare=[queue])
    bound = queue(channel)
    with shared.client() as client:
        client.wait_dispatched()
        assert [each.queue_id for each in client.queues(topic_of("a.b@c"))] == [0]
    assert bound.queue_declare(passive=True).message_count == 1
    message = bound.get()
    assert message.payload == {"n": 1}
    message.requeue()
    (again,) = received(connection, queue, 2)
    assert again.delivery_tag != message.delivery_tag
    again.ack()
    Producer(channel).publish({"n": 2}, routing_key="a.b@c")
    with shared.client() as client:
        client.wait_dispatched()
    assert bound.purge() == 1
    assert bound.get() is None
    bound.delete()
    with shared.client() as client:
        assert client.queues(topic_of("a.b@c")) == []


def test_unacknowledged_messages_are_delivered_again(connection: Connection, shared: Group) -> None:
    queue = Queue("held", routing_key="held")
    for number in range(3):
        Producer(connection).publish(number, routing_key="held", declare=[queue])
    with Connection(f"mqproc://{shared.store}") as other:
        held = received(other, queue, 1)
        assert [message.payload for message in held] == [0, 1, 2]
        held[1].ack()
        assert received(connection, queue, 1) == []
    found = received(connection, queue, 3)
    assert sorted(message.payload for message in found) == [0, 2]
    assert {message.headers is not None and message.delivery_info["exchange"] for message in found} == {""}


def test_messages_without_acknowledgement_are_done(connection: Connection, shared: Group) -> None:
    queue = Queue("noack", routing_key="noack")
    Producer(connection).publish(7, routing_key="noack", declare=[queue])
    assert [message.payload for message in received(connection, queue, 1, no_ack=True)] == [7]
    assert received(connection, queue, 4) == []


def test_messages_after_a_failed_callback_are_given_back(shared: Group) -> None:
    queue = Queue("raising", routing_key="raising")
    with Connection(f"mqproc://{shared.store}") as failing, Connection(f"mqproc://{shared.store}") as other:
        for number in range(3):
            Producer(failing).publish(number, routing_key="raising", declare=[queue])
        with shared.client() as client:
            client.wait_dispatched()
        begun: list[int] = []

        def fail(body: int, message: Any) -> None:
            begun.append(body)
            raise ValueError(body)

        with Consumer(failing, queue, callbacks=[fail]):
            with pytest.raises(ValueError, match="0"):
                failing.drain_events(timeout=PATIENCE_S)
            found: list[Any] = []
            wait_until(lambda: found.extend(received(other, queue, 0.1)) or len(found) >= 2, what="the other messages")
        assert begun == [0]
        assert sorted(message.payload for message in found) == [1, 2]


def test_messages_of_other_programs_become_dead_letters(tmp_path: Path, shared: Group, workers: Any) -> None:
    foreign = [b"hello", b"{}", b'{"properties": {"body_encoding": "base64"}, "body": "a"}']
    with shared.client() as client:
        client.create_topic("foreign", 1)
        ids = [client.send("foreign", body).message_id for body in foreign]
        send_all(application(shared), "foreign", "app.work", iter([(1,), (2,)]))
        client.wait_dispatched()
        workers("foreign", "-c", "1")
        wait_until(lambda: len(done(tmp_path)) >= 2, what="the tasks after the other messages")
        client.wait_dispatched()
        assert [letter.body for letter in client.groups.dead_letters("celery")] == foreign
    assert sorted(done(tmp_path)) == [1, 2]
    log = (tmp_path / "log").read_text()
    assert [log.count(f"message {each} of topic foreign is no task") for each in ids] == [1, 1, 1]


def test_url_without_store_is_refused() -> None:
    for url in ("mqproc://", "mqproc://store"):
        with pytest.raises(ConfigurationError, match="mqproc:///path/to/store"), Connection(url) as connection:
            connection.connect()


def test_stopped_store_is_a_connection_error(tmp_path: Path) -> None:
    with Connection(f"mqproc://{tmp_path}") as connection, pytest.raises(connection.connection_errors):
        connection.connect()


def test_installed_entry_point_registers_the_transport(tmp_path: Path) -> None:
    """As in an environment where mqproc is installed, without an import of the integration."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["kombu.serializers"]
    folder = tmp_path / "installed-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (folder / "entry_points.txt").write_text(f"[kombu.serializers]\n{lines}\n")
    program = "from celery import Celery; print(Celery(broker='mqproc:///none').connection().transport.driver_type)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.stdout == "mqproc\n", result.stderr

"""Handlers against a real group: the end of a run, and invalid handlers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from mqproc import AsyncClient, AsyncConsumer, BadRequestError, Client, ResetTo, StoredMessage
from mqproc.client._sync import handler_threads as handling
from tests.support.group import (
    PATIENCE_S,
    Group,
    all_of,
    all_of_async,
    bodies_of,
    fill,
    no_thread_starts,
    offsets,
    wait_until,
)


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


class Ended(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


@pytest.mark.parametrize("ordered", [False, True])
def test_run_calls_no_handler_after_the_stop(client: Client, ordered: bool) -> None:
    topic = f"Stopped{ordered}"
    sent = fill(client, topic, 20, queues=1)
    handled: list[bytes] = []
    stop = threading.Event()

    def handle(message: StoredMessage) -> None:
        handled.append(message.body)
        if message.body in (b"2", sent[-1]):
            stop.set()

    with client.consumer(f"stopped{ordered}", topic, start="earliest") as consumer:
        consumer.run(handle, ordered=ordered, stop=stop)
        assert handled == sent[:3]
        consumer.commit()
        assert offsets(client, f"stopped{ordered}", topic) == [3]
        # The same consumer can start another run.
        stop.clear()
        handled.remove(b"2")
        consumer.run(handle, ordered=ordered, stop=stop)
        assert handled == [b"0", b"1", *sent[3:]]
    assert offsets(client, f"stopped{ordered}", topic) == [20]


def test_ordered_run_stopped_during_pause_gives_messages_back(client: Client) -> None:
    sent = fill(client, "Paused", 5, queues=1)
    stop = threading.Event()

    def fail(message: StoredMessage) -> None:
        if message.body == b"1":
            threading.Timer(0.1, stop.set).start()
            raise ValueError("not yet")

    with client.consumer("paused", "Paused", start="earliest") as consumer:
        began_s = time.monotonic()
        consumer.run(fail, ordered=True, stop=stop, pause_s=10 * PATIENCE_S)
        assert time.monotonic() - began_s < PATIENCE_S
        assert bodies_of(all_of(consumer, 4)) == sent[1:]
    assert offsets(client, "paused", "Paused") == [5]


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ends after its pool took a message; the pool's thread ends later."""

    class Pool(ThreadPoolExecutor):
        taken: Future[None] | None = None
        why = "interpreter shutdown"

        def submit(self, *work: Any) -> Any:  # type: ignore[override]
            if self.taken is not None:
                self.taken.result()
                why, self.why = self.why, "shutdown"
                raise RuntimeError(f"cannot schedule new futures after {why}")
            self.taken = super().submit(*work)
            return self.taken

    monkeypatch.setattr(handling, "ThreadPoolExecutor", Pool)


DAEMON = """
import sys, threading
from concurrent.futures import thread
from mqproc import Client
from mqproc.client._sync import handler_threads as handling

begun, refused = threading.Event(), threading.Event()

class Pool(thread.ThreadPoolExecutor):
    def submit(self, *arguments):
        try:
            return super().submit(*arguments)
        except RuntimeError:
            refused.set()
            raise

def handle(message):
    if begun.is_set():
        refused.wait(10)
    begun.set()
    while not thread._shutdown:
        refused.wait(0.01)

handling.ThreadPoolExecutor = Pool
consumer = Client(sys.argv[1]).consumer("real", "Real", start="earliest")
runner = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 1}, daemon=True)
runner.start()
threading.Thread(target=runner.join).start()
begun.wait()
"""


def test_program_end_during_handler_of_daemon_thread_is_silent(shared: Group, client: Client) -> None:
    fill(client, "Real", 20, queues=1)
    done = subprocess.run([sys.executable, "-c", DAEMON, str(shared.store)], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.usefixtures("ending")
def test_the_end_of_the_program_is_a_stop_for_a_daemon_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = fill(client, "Daemon", 20, queues=1)
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with client.consumer("daemon", "Daemon", start="earliest") as consumer:
        thread = threading.Thread(target=consumer.run, args=(lambda message: None,), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not [each for each in raised if each.thread is thread]
        assert bodies_of(all_of(consumer, 19)) == sent[1:]
    assert offsets(client, "daemon", "Daemon") == [20]


@pytest.mark.usefixtures("ending")
@pytest.mark.parametrize("ordered", [False, True])
def test_handler_thread_continues_after_main_thread_ended(
    client: Client, ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent = fill(client, f"Undead{ordered}", 20, queues=2)
    handled: list[bytes] = []
    stop = threading.Event()

    def handle(message: StoredMessage) -> None:
        handled.append(message.body)
        if len(handled) == 20:
            stop.set()

    with client.consumer(f"undead{ordered}", f"Undead{ordered}", start="earliest") as consumer:
        consumer.run(handle, ordered=ordered, stop=stop)
        assert sorted(handled) == sorted(sent)
        consumer.commit()
        assert offsets(client, f"undead{ordered}", f"Undead{ordered}") == [10, 10]
    assert [each.message.partition(":")[0] for each in caplog.records] == ["the program's main thread has ended"]


@pytest.mark.usefixtures("ending")
def test_run_at_program_end_raises_error_of_handler(client: Client) -> None:
    sent = fill(client, "Raised", 20, queues=1)
    handled: list[bytes] = []

    def handle(message: StoredMessage) -> None:
        handled.append(message.body)
        if message.body == b"3":
            raise Ended

    with client.consumer("raised", "Raised", start="earliest") as consumer:
        with pytest.raises(Ended):
            consumer.run(handle, workers=4)
        assert handled == sent[:4]
        assert bodies_of(all_of(consumer, 17)) == sent[3:]


REAL = """
import sys, threading
from concurrent.futures import thread
from mqproc import Client

handled, stop = [], threading.Event()

def handle(message):
    while not thread._shutdown:
        stop.wait(0.01)
    handled.append(int(message.body))
    if len(handled) == 20:
        print(sorted(handled) == [*range(20)])
        stop.set()

consumer = Client(sys.argv[1]).consumer("undead", "Living", start="earliest")
threading.Thread(target=consumer.run, args=(handle,), kwargs={"stop": stop}).start()
"""


def test_run_in_thread_continues_after_the_main_thread_ends(shared: Group, client: Client) -> None:
    fill(client, "Living", 20, queues=1)
    done = subprocess.run([sys.executable, "-c", REAL, str(shared.store)], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"True\n"), done.stderr
    assert b"Traceback" not in done.stderr


def test_consumer_at_program_end_notes_the_missing_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(client, "Late", 1)
    monkeypatch.setattr(threading, "main_thread", threading.Thread)
    with no_thread_starts(), pytest.raises(RuntimeError, match="can't start new thread") as failed:
        client.consumer("late", "Late")
    assert failed.value.__notes__ == [
        "mqproc-consumer needs a thread, and none starts in functions of atexit: begin before"
    ]


@pytest.mark.parametrize("ordered", [False, True])
def test_run_base_exception_ends_it_at_once(client: Client, ordered: bool) -> None:
    topic = f"Ended{ordered}"
    sent = fill(client, topic, 40, queues=4)
    handled: list[bytes] = []
    raised = threading.Event()

    def handle(message: StoredMessage) -> None:
        handled.append(message.body)
        if message.body == b"1":
            raised.set()
            raise Ended
        if not raised.wait(0.05):
            return
        time.sleep(0.5)  # Work that continues while the run ends, also on a busy machine.

    with client.consumer(f"ended{ordered}", topic, start="earliest") as consumer:
        with pytest.raises(Ended):
            consumer.run(handle, workers=2, ordered=ordered, pause_s=10 * PATIENCE_S)
        assert len(handled) < 20
        handled.remove(b"1")
        again = bodies_of(all_of(consumer, 40 - len(handled)))
    assert set(again) >= set(sent) - set(handled)
    assert offsets(client, f"ended{ordered}", topic) == [10] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_an_ordered_run_gives_a_queue_back_before_another_member_has_it(client: Client, fails: bool) -> None:
    """The other member gets the rest of the queue, in order, and nothing is handled twice."""
    topic, group = f"Handover{fails}", f"handover{fails}"
    sent = fill(client, topic, 100, queues=2)
    handled: list[tuple[str, bytes]] = []
    stop, shared = threading.Event(), threading.Event()

    def handle_as(name: str) -> Callable[[StoredMessage], None]:
        def handle(message: StoredMessage) -> None:
            if fails and name == "first" and message.queue_id == 1:
                raise ValueError("never here")
            if name == "second":
                shared.set()
            elif len(handled) >= 3:
                shared.wait(0.5)  # However long the other one takes to come, there is something left for it.
            time.sleep(0.005)
            handled.append((name, message.body))
            if len(handled) >= (50 if fails else 100):
                stop.set()

        return handle

    def run(name: str) -> None:
        with client.consumer(group, topic, start="earliest", session_timeout=PATIENCE_S) as consumer:
            consumer.run(handle_as(name), workers=2, ordered=True, stop=stop, pause_s=0.01 if name == "second" else 1)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, "first")
        wait_until(lambda: len(handled) >= 3)
        began_s = time.monotonic()
        second = pool.submit(run, "second")
        wait_until(lambda: any(name == "second" for name, _ in handled), PATIENCE_S / 2)
        assert time.monotonic() - began_s < PATIENCE_S / 2, "it was given back, and not taken at the session's end"
        for running in (first, second):
            running.result()
    bodies = [body for _, body in handled]
    assert len(set(bodies)) == len(bodies)
    for queue in (sent[::2], sent[1::2]):
        assert [body for body in bodies if body in queue] == queue[: sum(body in queue for body in bodies)]


def test_ordered_run_handles_reset_queue_after_its_current_message(client: Client) -> None:
    """The queue was lost and returned: a message is received while its handler still runs."""
    sent = fill(client, "Again", 20, queues=2)
    begun: list[bytes] = []
    stop, others_came_again = threading.Event(), threading.Event()

    def handle(message: StoredMessage) -> None:
        begun.append(message.body)
        if begun.count(sent[19]) == 2:
            others_came_again.set()
        if message.body == sent[18]:
            stop.set()
        if message.body == sent[2] and begun.count(sent[2]) == 1:
            wait_until(lambda: sent[19] in begun)
            consumer.seek(ResetTo(earliest=True))
            assert others_came_again.wait(PATIENCE_S)
            begun.append(b"end")

    with client.consumer("again", "Again", start="earliest") as consumer:
        consumer.run(handle, workers=4, ordered=True, stop=stop)
    even = [body for body in begun if body in sent[::2] or body == b"end"]
    assert even == [sent[0], sent[2], b"end", *sent[::2]]


def test_holds_follows_ack_seek_and_take_back(client: Client) -> None:
    sent = fill(client, "Held", 4, queues=1)
    with client.consumer("held", "Held", start="earliest") as consumer:
        first, *others = consumer.receive(4, timeout=PATIENCE_S)
        assert all(map(consumer.holds, (first, *others)))
        consumer.ack(first)
        assert not consumer.holds(first)
        consumer.take_back(others[1:])
        assert not any(map(consumer.holds, others))
        assert bodies_of(consumer.receive(4, timeout=PATIENCE_S)) == sent[1:]
        consumer.seek(ResetTo(earliest=True))
        assert not any(map(consumer.holds, others))
        consumer.take_back(others)
        assert bodies_of(all_of(consumer, 4)) == sent


def test_a_handler_to_be_awaited_is_refused_and_acknowledges_nothing(client: Client) -> None:
    fill(client, "Sync", 3, queues=1)

    async def handle(_message: StoredMessage) -> None:
        raise AssertionError("the coroutine is never awaited")

    with client.consumer("sync", "Sync", start="earliest") as consumer:
        with pytest.raises(BadRequestError, match="returned an awaitable, for consumers of AsyncClient"):
            consumer.run(handle)
        assert consumer.positions()["Sync", 0] == 0


# asyncio


def in_loop(group: Group, program: Callable[[AsyncConsumer], Any], name: str, topic: str) -> None:
    """Run a program with a consumer in an event loop of its own."""

    async def main() -> None:
        async with (
            asyncio.timeout(200),
            AsyncClient(group.store) as client,
            client.consumer(name, topic, start="earliest") as consumer,
        ):
            await program(consumer)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_async_run_calls_no_handler_after_the_stop(shared: Group, client: Client, how: str) -> None:
    topic = f"Async{how}"
    sent = fill(client, topic, 20, queues=1)
    handled: list[bytes] = []
    stop = asyncio.Event()

    async def program(consumer: AsyncConsumer) -> None:
        async def handle(message: StoredMessage) -> None:
            handled.append(message.body)
            if message.body == b"2":
                running.cancel() if how == "cancel" else stop.set()
            await asyncio.sleep(0.001)

        running = asyncio.ensure_future(consumer.run(handle, ordered=True, stop=stop))
        await asyncio.wait([running])
        assert running.cancelled() is (how == "cancel")
        assert handled == sent[:3]
        assert [message.body for message in await all_of_async(consumer, 17)] == sent[3:]

    in_loop(shared, program, f"async{how}", topic)
    assert offsets(client, f"async{how}", topic) == [20]


def test_messages_of_cancelled_handlers_are_redelivered(shared: Group, client: Client) -> None:
    """The first cancellation of a run leaves handlers their end, a second one does not."""
    sent = fill(client, "Both", 5, queues=1)

    async def program(consumer: AsyncConsumer) -> None:
        began = asyncio.Event()

        async def handle(_message: StoredMessage) -> None:
            began.set()
            await asyncio.sleep(PATIENCE_S)

        running = asyncio.ensure_future(consumer.run(handle, workers=2))
        await began.wait()
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0.01)
        await asyncio.wait([running])
        assert running.cancelled()
        assert [message.body for message in await all_of_async(consumer, 5)] == sent

    in_loop(shared, program, "both", "Both")


def test_async_handler_may_await_a_cancelled_task(shared: Group, client: Client) -> None:
    """That fails the message, and is no end of the run."""
    fill(client, "Inner", 3, queues=1)
    client.groups.change("inner", retry_max_times=0)
    stop = asyncio.Event()

    async def handle(message: StoredMessage) -> None:
        if message.body == b"1":
            other = asyncio.ensure_future(asyncio.sleep(PATIENCE_S))
            other.cancel()
            await other
        if message.body == b"2":
            stop.set()

    async def program(consumer: AsyncConsumer) -> None:
        await consumer.run(handle, stop=stop)

    in_loop(shared, program, "inner", "Inner")
    client.wait_dispatched()
    assert [letter.body for letter in client.groups.dead_letters("inner")] == [b"1"]
    assert offsets(client, "inner", "Inner") == [3]


def test_a_handler_that_gives_nothing_to_await_is_refused(shared: Group, client: Client) -> None:
    """It would have handled each message, and had it delivered again."""
    fill(client, "Plain", 3, queues=1)

    def handle(_message: StoredMessage) -> Any:
        return None

    async def program(consumer: AsyncConsumer) -> None:
        with pytest.raises(BadRequestError, match="returned no awaitable: give an async function"):
            await consumer.run(handle)
        assert consumer.positions()["Plain", 0] == 0

    in_loop(shared, program, "plain", "Plain")


def test_ordered_async_run_releases_queue_before_reassignment(shared: Group, client: Client) -> None:
    sent = fill(client, "AsyncHandover", 100, queues=2)
    handled: list[tuple[str, bytes]] = []

    async def main() -> None:
        stop, began = asyncio.Event(), asyncio.Event()

        async def run(name: str) -> None:
            async def handle(message: StoredMessage) -> None:
                if name == "first" and message.queue_id == 1:
                    raise ValueError("never here")
                await asyncio.sleep(0.005)
                handled.append((name, message.body))
                if len(handled) == 3:
                    began.set()
                if len(handled) == len(sent):
                    stop.set()

            async with made.consumer(
                "ahand", "AsyncHandover", start="earliest", session_timeout=PATIENCE_S
            ) as consumer:
                await consumer.run(handle, workers=2, ordered=True, stop=stop)

        async with asyncio.timeout(PATIENCE_S / 2), AsyncClient(shared.store) as made, asyncio.TaskGroup() as tasks:
            tasks.create_task(run("first"))
            await began.wait()
            tasks.create_task(run("second"))

    asyncio.run(main())
    assert sorted((body for _, body in handled), key=int) == sent
    assert [body for name, body in handled if name == "second"] == sent[1::2]


def test_ordered_async_run_handles_reset_queue_after_current_message(shared: Group, client: Client) -> None:
    sent = fill(client, "AsyncAgain", 20, queues=2)
    begun: list[bytes] = []
    stop, others_came, others_came_again = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def program(consumer: AsyncConsumer) -> None:
        async def handle(message: StoredMessage) -> None:
            begun.append(message.body)
            if message.body == sent[19]:
                (others_came_again if others_came.is_set() else others_came).set()
            if message.body == sent[18]:
                stop.set()
            if message.body == sent[2] and begun.count(sent[2]) == 1:
                await others_came.wait()
                await consumer.seek(ResetTo(earliest=True))
                await others_came_again.wait()
                begun.append(b"end")

        await consumer.run(handle, workers=4, ordered=True, stop=stop)

    in_loop(shared, program, "asyncagain", "AsyncAgain")
    even = [body for body in begun if body in sent[::2] or body == b"end"]
    assert even == [sent[0], sent[2], b"end", *sent[::2]]

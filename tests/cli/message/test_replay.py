"""`mqproc replay` copies every message once despite crashes; `message trace` follows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.client._sync.client import Client
from mqproc.client.replay import IN_FLIGHT, PAGE_MESSAGES, REPLAYED, ReplayPosition, ReplayProgress
from mqproc.errors import BadRequestError, TopicNotFoundError
from mqproc.types import Message, SqlFilter
from mqproc.util.units import format_time
from tests.support.command_line import Outcome, PseudoTerminal, call
from tests.support.group import PATIENCE_S, Group, wait_until

TOPIC = "orders"
COUNT = 8_000


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Messages n with key k(n mod 100), tag t(n mod 3) and a price, in four queues in turn."""
    started = Group(tmp_path_factory.mktemp("group") / "store", mapped_file_size_commit_log=16 << 20).start()
    with started.client() as client:
        client.create_topic(TOPIC, 4)
        numbers = range(COUNT)
        client.send_batch(
            TOPIC,
            [b"%d" % number for number in numbers],
            keys=[f"k{number % 100}" for number in numbers],
            tags=[f"t{number % 3}" for number in numbers],
            properties=[{"price": f"{number}.5"} for number in numbers],
            born_timestamps_ms=[1_600_000_000_000 + number for number in numbers],
        )
    started.wait_dispatched()
    yield started
    started.close()


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with group.client() as client:
        yield client


def bodies(group: Group, topic: str) -> Counter[int]:
    group.wait_dispatched()
    with group.client() as client:
        return Counter(int(message.body) for message in client.range(topic))


def ask(group: Group, *arguments: str | int) -> Outcome:
    return call("replay", "--topic", TOPIC, *arguments, "--store", group.store)


def test_replay_copies_keep_properties_and_body(group: Group, client: Client) -> None:
    outcome = ask(group, "--to", "copies", "--json")
    assert outcome.code == 0, outcome.err
    (row,) = outcome.json["replays"]
    assert (row["messages"], row["already_stored"]) == (COUNT, 0)
    assert bodies(group, "copies") == Counter(range(COUNT))
    for queue_id in range(4):
        sources = client.pull(TOPIC, queue_id, 0, 200).messages
        copies = client.pull("copies", queue_id, 0, 200).messages
        for source, copy in zip(sources, copies, strict=True):
            assert (copy.body, copy.tag, copy.keys) == (source.body, source.tag, source.keys)
            assert (copy.born_timestamp_ms, copy.queue_offset) == (source.born_timestamp_ms, source.queue_offset)
            assert copy.properties["price"] == source.properties["price"]
            assert copy.properties[REPLAYED] == source.message_id
            assert copy.unique_id != source.unique_id
    # It is finished; only --restart repeats it.
    outcome = ask(group, "--to", "copies")
    assert (outcome.code, f"all {COUNT:,} messages were sent" in outcome.err) == (0, True)
    assert ask(group, "--to", "copies", "--restart").code == 0
    assert bodies(group, "copies") == Counter(dict.fromkeys(range(COUNT), 2))


def test_replay_selects_by_key_filter_and_time(group: Group, client: Client) -> None:
    assert ask(group, "--to", "by-key", "--key", "k42").code == 0
    assert bodies(group, "by-key") == Counter(range(42, COUNT, 100))
    assert ask(group, "--to", "by-tag", "--tag", "t1").code == 0
    assert bodies(group, "by-tag") == Counter(range(1, COUNT, 3))
    assert ask(group, "--to", "by-price", "--sql", "price BETWEEN 99.0 AND 110.0", "--queues", 2).code == 0
    assert bodies(group, "by-price") == Counter(range(99, 110))
    assert {info.queue_id for info in client.queues("by-price")} == {0, 1}
    assert ask(group, "--to", "none", "--end", "2001-01-01").code == 0
    assert bodies(group, "none") == Counter()
    assert ask(group, "--to", "x", "--key", "k1", "--tag", "t1").code == 2
    assert call("replay", "--topic", "nothing", "--to", "x", "--store", group.store).code == 5


def test_replay_time_range_within_queues(group: Group, client: Client) -> None:
    """Three batches of distinct times in every queue; the times select the middle one."""
    client.create_topic("timed", 2)
    times: list[int] = []
    for part in range(3):
        sent = client.send_batch("timed", [b"%d" % (10 * part + n) for n in range(10)], queue_ids=[0, 1] * 5)
        times.append(sent.store_timestamp_ms)
        wait_until(lambda: time.time_ns() // 1_000_000 > times[-1] + 1, what="a later millisecond")
    group.wait_dispatched()
    arguments = ("--topic", "timed", "--to", "middle", "--begin", str(times[1]), "--end", str(times[1] + 1))
    assert call("replay", *arguments, "--store", group.store).code == 0
    assert bodies(group, "middle") == Counter(range(10, 20))
    for queue_id in range(2):
        copies = client.pull("middle", queue_id, 0).messages
        assert [int(copy.body) for copy in copies] == list(range(10 + queue_id, 20, 2))
        sources = client.pull("timed", queue_id, 5, 5).messages
        assert [copy.properties[REPLAYED] for copy in copies] == [source.message_id for source in sources]


def _replaying(group: Group, to: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mqproc", "replay", "--topic", TOPIC, "--to", to, "--store", str(group.store)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen([*command, *arguments], env=environment, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_replay_terminated_continues_without_duplicates(group: Group, number: signal.Signals) -> None:
    to = f"after-{number.name}"
    before = group.words()["appended_messages"]
    child = _replaying(
        group, to, "--rate", "400"
    )  # All messages take 20 s, so it is still running when it is terminated.
    wait_until(lambda: group.words()["appended_messages"] > before + 200)
    child.send_signal(number)
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == (130 if number is signal.SIGINT else -number)
    assert number is not signal.SIGINT or b"the same command continues" in err
    outcome = ask(group, "--to", to)
    assert outcome.code == 0
    assert "continuing at queue" in outcome.err
    assert bodies(group, to) == Counter(range(COUNT))


def test_replay_reports_messages_deleted_by_retention(tmp_path: Path) -> None:
    count = 6_000
    group = Group(tmp_path / "store", mapped_file_size_commit_log=1 << 18).start()
    try:
        with group.client() as client:
            client.create_topic(TOPIC, 1)
            client.send_batch(TOPIC, [b"%d" % number for number in range(count)])
        group.wait_dispatched()
        # Records that are not durable in the queues are kept.
        wait_until(lambda: group.words()["cq_synced"] > 2 << 18, what="durable units of the first two segments")
        before = group.words()["appended_messages"]
        child = _replaying(group, "late", "--rate", "500")
        wait_until(lambda: group.words()["appended_messages"] > before + 200)
        assert call("store", "retention", "--execute", "--older-than", "0s", "--store", group.store).code == 0
        _, err = child.communicate(timeout=60)
        with group.client() as client:
            sent = client.max_offset("late", 0)
        assert 0 < sent < count
        assert child.returncode == 1
        assert f"{count - sent:,} messages of {TOPIC} could not be sent: retention or damage" in err.decode()
        again = call("replay", "--topic", TOPIC, "--to", "late", "--store", group.store)
        assert (again.code, f"all {sent:,} messages were sent" in again.err) == (0, True), again.err
    finally:
        group.close()


def test_replay_relative_time_is_fixed_at_the_first_start(group: Group) -> None:
    began = time.time_ns() // 1_000_000
    command = ("--to", "of-late", "--begin", "1h", "--end", "now")
    assert f"{COUNT:,} messages" in ask(group, *command).err
    wait_until(lambda: time.time_ns() // 1_000_000 > began + 1, what="a later millisecond")
    again = ask(group, *command)
    assert (again.code, f"all {COUNT:,} messages were sent" in again.err) == (0, True)
    assert bodies(group, "of-late") == Counter(range(COUNT))
    refused = ask(group, "--to", "x", "--begin", "1h", "--end", "2h")
    assert refused.code == 2
    assert re.search(r"the end 20\S+T\S+ is before the begin 20\S+T", refused.err)


def test_replay_progress_bar_continues_after_a_stop(group: Group) -> None:
    command = ("replay", "--topic", TOPIC, "--to", "barred", "--store", group.store, "--rate")
    # Slow enough to see progress even if the test stalls.
    with PseudoTerminal(*command, "800") as terminal:
        terminal.until("orders → barred", "messages")
        shares = [shown_share(terminal.text())]
        while shares[-1] < 40:
            shares.append(shown_share(terminal.until("%")))
        assert shares == sorted(shares)
        assert len(set(shares)) > 2, shares
        terminal.send("\x03")
        terminal.until("the same command continues")
        assert terminal.end() == 130
    with PseudoTerminal(*command, "1600") as terminal:
        terminal.until("continuing at queue", "orders → barred")
        wait_until(lambda: shown_share(terminal.text()) > 0, what="a bar with something in it")
        assert shown_share(terminal.text()) >= shares[-1] - 1, "messages sent before count"
        shown = terminal.until("100%", "messages to barred in")
        assert terminal.end() == 0
        assert re.search(r"orders → barred +━+ 100% +[\d,]+ messages +[\d,]+/s", shown), shown
    assert bodies(group, "barred") == Counter(range(COUNT))


def shown_share(shown: str) -> int:
    """Last percentage on a screen, −1 without one."""
    return int(([-1, *re.findall(r"(\d+)%", shown)])[-1])


def test_replay_progress_in_a_pipe_is_lines(group: Group) -> None:
    child = _replaying(group, "piped", "--rate", "1000")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert b"\x1b" not in err
    assert b"\r" not in err
    *lines, last = err.decode().splitlines()
    assert lines, "a line after 5 s"
    found = [re.fullmatch(r"orders → piped: ([\d,]+) messages, (\d+)%, ([\d,]+)/s", line) for line in lines]
    told = [tuple(int(text.replace(",", "")) for text in line.groups()) for line in found if line]
    assert len(told) == len(lines), err
    for count, share, rate in told:
        assert 0 < count < COUNT
        assert abs(share - 100 * count / COUNT) <= 1
        assert rate <= 1100, "throttled"
    assert re.match(rf"{COUNT:,} messages to piped in ", last)


def test_replay_survives_a_killed_writer(group: Group) -> None:
    before = group.words()["written"]
    child = _replaying(group, "killed")
    wait_until(lambda: group.words()["written"] > before + 100_000 or child.poll() is not None)
    os.kill(group.pid("writer"), signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert bodies(group, "killed") == Counter(range(COUNT))


def test_client_replay_with_name_and_rate_continues(group: Group, client: Client) -> None:
    told: list[ReplayProgress] = []

    def stop_soon(progress: ReplayProgress) -> None:
        told.append(progress)
        if len(told) == 2:
            raise InterruptedError

    chosen = SqlFilter("TAGS = 't0'")
    with pytest.raises(InterruptedError):
        client.replay(TOPIC, "named", filter=chosen, name="nightly", told=stop_soon)
    done = client.replay(TOPIC, "named", filter=chosen, name="nightly", position=told[0].position)
    assert 0 < done.found <= IN_FLIGHT * PAGE_MESSAGES
    assert bodies(group, "named") == Counter(range(0, COUNT, 3))
    # Without its position, existing copies are looked up.
    assert client.replay(TOPIC, "named", filter=chosen, name="nightly").sent == 0
    began = time.monotonic()
    assert client.replay(TOPIC, "slow", key="k1", rate=200).sent == COUNT // 100
    assert time.monotonic() - began >= (COUNT // 100 - 10) / 200
    # Without a name each replay is separate.
    assert client.replay(TOPIC, "slow", key="k1").sent == COUNT // 100
    assert bodies(group, "slow").most_common(1)[0][1] == 2


def test_replay_finds_copies_of_an_earlier_replay(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many newer or filtered messages may precede the first copy."""
    monkeypatch.setattr("mqproc.client.replay._WINDOW", 5)
    client.create_topic("Grows", 2)
    for tag in ("first", "second"):
        client.send_batch("Grows", [b"%d" % number for number in range(40)], tags=tag, queue_ids=[0, 1] * 20)
        client.wait_dispatched()
        assert client.replay("Grows", "Grown", name="daily").sent == 40
    assert client.replay("Grows", "Widened", name="daily", filter=SqlFilter("TAGS = 'second'")).sent == 40
    client.wait_dispatched()
    assert client.replay("Grows", "Widened", name="daily").sent == 40


def test_replay_within_an_asyncio_task(group: Group) -> None:
    told: list[ReplayProgress] = []

    async def go() -> ReplayProgress:
        async with AsyncClient(group.store) as client:
            begun = asyncio.Event()
            replay = client.replay(TOPIC, "cancelled", rate=1000, name="task", told=lambda progress: begun.set())
            waiting = asyncio.create_task(replay)
            await begun.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return await client.replay(TOPIC, "by-task", key="k9", told=told.append)

    done = asyncio.run(go())
    assert (done.sent, told[-1]) == (COUNT // 100, done)
    assert bodies(group, "by-task") == Counter(range(9, COUNT, 100))
    assert len(bodies(group, "cancelled")) < COUNT


def test_replay_invalid_options_are_refused(client: Client) -> None:
    with pytest.raises(TopicNotFoundError):
        client.replay("nothing", "x")
    with pytest.raises(BadRequestError, match="rate = -1 is out of range: 0 at least"):
        client.replay(TOPIC, "x", rate=-1)
    with pytest.raises(BadRequestError, match="by key or by filter"):
        client.replay(TOPIC, "x", key="a", filter=SqlFilter("a = 1"))
    assert tuple(ReplayPosition()) == (0, 0)


def test_replay_into_the_same_topic_is_refused(group: Group, client: Client) -> None:
    """With an end in the future it would copy its own copies forever."""
    before, journals = client.count(TOPIC), journals_of(group)
    outcome = ask(group, "--to", TOPIC, "--end", "2100-01-01")
    assert outcome.code == 2
    assert f"--topic {TOPIC} and --to {TOPIC} are one topic" in outcome.err
    with pytest.raises(BadRequestError, match=f"'{TOPIC}' to '{TOPIC}' would double the topic"):
        client.replay(TOPIC, TOPIC, key="k1")

    async def go() -> None:
        async with AsyncClient(group.store) as asking:
            await asking.replay(TOPIC, TOPIC, end="2100-01-01")

    with pytest.raises(BadRequestError, match="would double the topic"):
        asyncio.run(go())
    assert (client.count(TOPIC), journals_of(group)) == (before, journals)


def journals_of(group: Group) -> set[Path]:
    return set((group.paths.own / "replays").glob("*"))


# Trace


def trace(group: Group, *arguments: Any) -> Outcome:
    return call("message", "trace", *arguments, "--store", group.store)


def test_trace_shows_the_message(group: Group, client: Client) -> None:
    with client.consumer("billing", TOPIC, start="earliest") as consumer:
        for _ in range(100):
            next(iter(consumer))
    passed = [queue for queue in client.groups.info("billing").queues if queue.topic == TOPIC and queue.offset]
    assert passed
    queue = passed[0]
    assert queue.offset is not None
    last, following = client.pull(TOPIC, queue.queue_id, queue.offset - 1, 2).messages
    found = trace(group, last.unique_id, "--topic", TOPIC, "--json").json
    assert found["message"]["message_id"] == last.message_id
    assert found["unit"] == "FOUND"
    assert {(key["key"], key["unique"], key["indexed"]) for key in found["keys"]} == {
        (last.keys[0], False, True),
        (last.unique_id, True, True),
    }
    assert [(each["group"], each["passed"]) for each in found["progress"]] == [("billing", True)]
    (waiting,) = trace(group, following.message_id, "--json").json["progress"]
    assert (waiting["passed"], waiting["messages_before"]) == (False, 0)
    shown = trace(group, last.message_id)
    assert shown.code == 0
    assert f"{TOPIC} queue {queue.queue_id} offset {last.queue_offset}: FOUND" in shown.out
    assert "billing" in shown.out


def test_trace_shows_the_delivery_time_of_a_delayed_message(group: Group, client: Client) -> None:
    client.create_topic("later", 1)
    timed = client.send("later", b"x", delay=3600)
    level = client.send("later", b"x", delay_level=18)
    group.wait_dispatched()
    due_ms = int(client.get(timed.message_id).properties["TIMER_DELIVER_MS"])
    assert f"delivery    to later queue 0, at {format_time(due_ms)}\n" in trace(group, timed.message_id).out
    assert "delivery    to later queue 0, by delay level 18\n" in trace(group, level.message_id).out


def test_trace_of_delayed_message_shows_its_delivery(group: Group, client: Client) -> None:
    client.create_topic("soon", 1)
    with client.consumer("early", "soon", start="earliest") as consumer:
        sent = client.send("soon", b"x", delay_level=1)
        (delivered,) = consumer.receive(1, timeout=30)
    group.wait_dispatched()
    (copy,) = client.trace(sent.message_id).copies
    assert (copy.kind, copy.topic, copy.message_id) == ("delivered", "soon", delivered.message_id)
    (before,) = client.trace(delivered.message_id).copies
    assert (before.kind, before.message_id) == ("delayed", sent.message_id)


def test_trace_follows_a_message_to_the_dead_letters(group: Group, client: Client) -> None:
    sent = client.send("doomed", b"x", keys="case-1")
    group.wait_dispatched()
    with client.consumer("clinic", "doomed", start="earliest") as consumer:
        message = next(iter(consumer))
        consumer.nack(message, delay_level=-1)
    group.wait_dispatched()
    (copy,) = trace(group, sent.message_id, "--json").json["copies"]
    assert (copy["kind"], copy["topic"]) == ("dead letter", "%DLQ%clinic")
    # From the copy back to the original.
    (original,) = client.trace(copy["message_id"]).copies
    assert (original.kind, original.message_id) == ("original", sent.message_id)


def test_replay_by_key_excludes_the_end(client: Client) -> None:
    times = [message.store_timestamp_ms for message in client.by_key(TOPIC, "k2", max_messages=COUNT)]
    last_ms = max(times)
    assert client.replay(TOPIC, "key-whole", key="k2", end=last_ms + 1).sent == len(times)
    assert client.replay(TOPIC, "key-part", key="k2", end=last_ms).sent == len([one for one in times if one < last_ms])


def test_trace_of_retry_shows_original_and_dead_letter(group: Group, client: Client) -> None:
    sent = client.send("patients", b"x", keys="case-2")
    group.wait_dispatched()
    with client.consumer("ward", "patients", start="earliest") as consumer:
        consumer.nack(*consumer.receive(1, timeout=PATIENCE_S), delay_level=1)
        (retry,) = consumer.receive(1, timeout=PATIENCE_S)
        assert (retry.topic, retry.stored_topic, retry.reconsume_times) == ("patients", "%RETRY%ward", 1)
        kinds = {copy["kind"]: copy for copy in trace(group, sent.message_id, "--json").json["copies"]}
        assert kinds["retry"]["message_id"] == retry.message_id
        consumer.nack(retry, delay_level=-1)
    group.wait_dispatched()
    (dead,) = client.groups.dead_letters("ward")
    for start in (sent.message_id, retry.message_id, dead.message_id):
        found = trace(group, start, "--json").json
        places = {(copy["kind"], copy["message_id"]) for copy in found["copies"]}
        expected = {
            ("original", sent.message_id),
            ("retry", retry.message_id),
            ("dead letter", dead.message_id),
        }
        assert places >= {place for place in expected if place[1] != start}, start
        assert found["message"]["message_id"] == start
    shown = trace(group, retry.message_id).out
    assert all(place.message_id in shown for place in (sent, retry, dead))


def test_trace_shows_the_outcome_of_a_transaction(group: Group, client: Client) -> None:
    client.create_topic("bills", 1)
    kept, lost, undecided = [
        client.transaction("billing", Message("bills", body)).begin() for body in (b"kept", b"lost", b"undecided")
    ]
    wait_until(lambda: len(client.transactions.open("billing")) == 3, what="the half messages known")
    halves = {each.transaction_id: each.message_id for each in client.transactions.open("billing")}
    kept.commit()
    lost.rollback()
    group.wait_dispatched()
    wait_until(lambda: len(client.transactions.open("billing")) == 1, what="the ends known")
    states = {kept: "committed", lost: "rolled back", undecided: "open"}
    for transaction, state in states.items():
        assert f"\ntransaction {state}\n" in trace(group, halves[transaction.transaction_id]).out
    (sent,) = client.pull("bills", 0, 0).messages
    assert trace(group, sent.message_id, "--json").json["transaction"] == "committed"
    (delivered,) = client.trace(halves[kept.transaction_id]).copies
    assert (delivered.kind, delivered.message_id) == ("delivered", sent.message_id)
    assert client.trace(halves[lost.transaction_id]).copies == ()
    plain = client.send("bills", b"plain")
    group.wait_dispatched()
    assert client.trace(plain.message_id).transaction == ""


def test_trace_of_ended_transaction_may_be_unknown(group: Group, client: Client) -> None:
    client.create_topic("receipts", 1)
    kept, lost = [client.transaction("till", Message("receipts", body)).begin() for body in (b"kept", b"lost")]
    wait_until(lambda: len(client.transactions.open("till")) == 2, what="the half messages known")
    halves = {each.transaction_id: each.message_id for each in client.transactions.open("till")}
    # Another message with the same unique id was not stored by a commit.
    client.send(Message("receipts", b"another", unique_id=lost.transaction_id))
    kept.commit()
    lost.rollback()
    group.wait_dispatched()
    wait_until(lambda: not client.transactions.open("till"), what="the ends known")
    assert client.trace(halves[kept.transaction_id]).transaction == "committed"
    assert client.trace(halves[lost.transaction_id]).transaction == "rolled back"
    client.delete_topic("receipts")
    assert "\ntransaction ended; outcome unknown" in trace(group, halves[kept.transaction_id]).out
    client.create_topic("receipts", 1)
    assert client.trace(halves[kept.transaction_id]).transaction == "ended"


def test_trace_of_undispatched_commit_is_not_rolled_back(tmp_path: Path) -> None:
    with contextlib.closing(Group(tmp_path / "store").start()) as group, group.client() as client:
        client.create_topic("notes", 1)
        begun = client.transaction("desk", Message("notes", b"x")).begin()
        wait_until(lambda: len(client.transactions.open("desk")) == 1, what="the half message known")
        (half,) = client.transactions.open("desk")
        os.kill(group.pid("dispatcher"), signal.SIGSTOP)
        try:
            begun.commit()
            assert client.trace(half.message_id).transaction == "ended"
        finally:
            os.kill(group.pid("dispatcher"), signal.SIGCONT)
        group.wait_dispatched()
        assert client.trace(half.message_id).transaction == "committed"


def test_trace_shows_a_discarded_transaction(tmp_path: Path) -> None:
    options = {"transaction_timeout": 100, "transaction_check_interval": 100, "transaction_check_max": 1}
    with contextlib.closing(Group(tmp_path / "store", **options).start()) as group, group.client() as client:
        client.create_topic("cheques", 1)
        begun = client.transaction("bank", Message("cheques", b"x")).begin()
        wait_until(lambda: len(client.transactions.open("bank")) == 1, what="the half message known")
        (half,) = client.transactions.open("bank")
        with client.transaction_producer("bank", lambda _: None):
            wait_until(lambda: not client.transactions.open("bank"), what="the transaction given up")
        group.wait_dispatched()
        assert half.transaction_id == begun.transaction_id
        assert client.trace(half.message_id).transaction == "given up"


def test_trace_of_missing_message_exits_5(group: Group) -> None:
    assert trace(group, "F" * 32).code == 5

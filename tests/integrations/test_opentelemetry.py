"""Spans of sends and handlers, with the OpenTelemetry SDK; a killed worker loses no message and no trace."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mqproc import AsyncClient, BadRequestError, Client, Message, StoredMessage
from mqproc.integrations import opentelemetry
from tests.support.group import PATIENCE_S, ROOT, Group, wait_until

TASKS = """
import os, time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from mqproc.integrations import opentelemetry

provider = TracerProvider()
exporter = ConsoleSpanExporter(out=open("spans", "a"), formatter=lambda span: span.to_json(None) + "\\n")
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
opentelemetry.instrument()

def handle(message):
    while int(message.body) >= 5_000 and not os.path.exists("continue"):
        time.sleep(0.05)
"""
MESSAGES = 10_000
POLL_S = 0.5
"""Pause between looks at a file that the workers need the processors for."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("opentelemetry") / "store").start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    opentelemetry.instrument(provider)
    yield exporter
    opentelemetry.uninstrument()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def parents(spans: list[ReadableSpan]) -> list[int]:
    return [span.parent.span_id for span in spans if span.parent is not None]


def run_once(client: Client, topic: str, handle: Any = lambda message: None, count: int = 1) -> None:
    """Handle so many messages with `run`."""
    stop, handled = threading.Event(), []

    def counted(message: StoredMessage) -> None:
        handled.append(message)
        if len(handled) >= count:
            stop.set()
        handle(message)

    with client.consumer(topic, topic, start="earliest") as consumer:
        consumer.run(counted, stop=stop)


def test_handler_span_is_child_of_the_send(client: Client, spans: InMemorySpanExporter) -> None:
    client.create_topic("Sent", 1)
    sent = client.send("Sent", b"body", properties={"region": "north"})
    client.send(Message("Sent", b"body"))
    run_once(client, "Sent", count=2)
    sends, handled = named(spans, "send Sent"), named(spans, "process Sent")
    assert parents(handled) == [span.context.span_id for span in sends]
    assert [span.kind for span in (*sends, *handled)] == [SpanKind.PRODUCER] * 2 + [SpanKind.CONSUMER] * 2
    assert dict(sends[0].attributes or {}) == {
        "messaging.system": "mqproc",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "Sent",
        "messaging.message.id": sent.unique_id,
    }
    assert dict(handled[0].attributes or {}) == {
        "messaging.system": "mqproc",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "Sent",
        "messaging.message.id": sent.unique_id,
        "messaging.destination.partition.id": "0",
        "messaging.message.body.size": 4,
    }
    stored = client.pull("Sent", 0, 0).messages[0].properties
    assert stored["region"] == "north"
    assert stored["traceparent"].split("-")[2] == f"{sends[0].context.span_id:016x}"


def test_each_way_of_sending_carries_its_context(client: Client, spans: InMemorySpanExporter) -> None:
    client.create_topic("Ways", 1)
    client.send_many(Message("Ways", b"%d" % number) for number in range(2))
    client.send_batch("Ways", [b"2", b"3"], properties={"a": "b"})
    client.send_batch("Ways", [b"4", b"5"], properties=[{"n": "4"}, {"n": "5"}])
    with client.producer() as producer:
        producer.send("Ways", b"6")
    client.send_oneway("Ways", b"7")
    run_once(client, "Ways", count=8)
    many, first, second, created, oneway = (
        span for span in spans.get_finished_spans() if span.kind is SpanKind.PRODUCER
    )
    assert [span.name for span in (many, first, created, oneway)] == ["send", "send Ways", "create Ways", "send Ways"]
    wanted = [many, many, first, first, second, second, created, oneway]
    assert parents(named(spans, "process Ways")) == [span.context.span_id for span in wanted]
    assert (many.attributes or {})["messaging.batch.message_count"] == 2
    assert [each.properties.get("n") for each in client.pull("Ways", 0, 4).messages[:2]] == ["4", "5"]


def test_errors_are_recorded_and_raised(client: Client, spans: InMemorySpanExporter) -> None:
    client.create_topic("Errors", 1)
    with pytest.raises(BadRequestError):
        client.send("no topic", b"")
    client.send("Errors", b"")

    def fail(message: StoredMessage) -> None:
        raise ValueError("not handled")

    run_once(client, "Errors", fail)
    (refused,), (failed,) = named(spans, "send no topic"), named(spans, "process Errors")
    assert [span.status.status_code for span in (refused, failed)] == [StatusCode.ERROR] * 2
    assert failed.events[0].name == "exception"


def test_async_clients_are_traced(shared: Group, client: Client, spans: InMemorySpanExporter) -> None:
    client.create_topic("Async", 1)

    async def main() -> None:
        stop = asyncio.Event()

        async def handle(message: StoredMessage) -> None:
            stop.set()

        async with AsyncClient(shared.store) as own:
            await own.send("Async", b"x")
            async with own.consumer("async", "Async", start="earliest") as consumer:
                await consumer.run(handle, stop=stop)

    asyncio.run(main())
    (sent,), (handled,) = named(spans, "send Async"), named(spans, "process Async")
    assert parents([handled]) == [sent.context.span_id]


def test_loop_is_traced_by_process(client: Client, spans: InMemorySpanExporter) -> None:
    client.create_topic("Loop", 1)
    client.send("Loop", b"x")
    with client.consumer("loop", "Loop", start="earliest") as consumer:
        for message in consumer.messages(timeout=0.5):
            with opentelemetry.process(message) as span:
                span.set_attribute("own", 1)
    (sent,), (handled,) = named(spans, "send Loop"), named(spans, "process Loop")
    assert (parents([handled]), (handled.attributes or {})["own"]) == ([sent.context.span_id], 1)


def test_uninstrumented_clients_are_as_before(client: Client) -> None:
    methods = [Client.send, Client.send_many, AsyncClient.send_batch]
    opentelemetry.instrument(TracerProvider())
    opentelemetry.instrument(TracerProvider())
    opentelemetry.uninstrument()
    assert [Client.send, Client.send_many, AsyncClient.send_batch] == methods


@pytest.mark.timeout(300)
def test_killed_worker_loses_no_message_and_no_trace(
    tmp_path: Path, shared: Group, client: Client, spans: InMemorySpanExporter
) -> None:
    client.create_topic("Killed", 2)
    (tmp_path / "tasks.py").write_text(TASKS)
    for begin in range(0, MESSAGES, 100):
        client.send_batch("Killed", [b"%d" % number for number in range(begin, begin + 100)])
    sends = {f"0x{span.context.span_id:016x}" for span in named(spans, "send Killed")}
    wanted = {each.unique_id for queue in (0, 1) for each in _all_of(client, "Killed", queue)}
    assert (len(sends), len(wanted)) == (100, MESSAGES)
    command = [sys.executable, "-m", "mqproc", "worker", "tasks:handle", "--topic", "Killed", "--group", "killed"]
    command += ["--workers", "2", "--from", "earliest", "--store", str(shared.store)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as first:
        wait_until(lambda: time.sleep(POLL_S) or len(_ended(tmp_path)) > MESSAGES // 4, 120, "a part handled")
        first.kill()
    assert len(_ended(tmp_path)) < MESSAGES
    (tmp_path / "continue").touch()
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as second:
        wait_until(lambda: time.sleep(POLL_S) or len(_ended(tmp_path)) == MESSAGES, 120, "all handled")
        second.terminate()
        assert second.wait(PATIENCE_S) == 0
    assert {each["attributes"]["messaging.message.id"] for each in _ended(tmp_path).values()} == wanted
    assert {each["parent_id"] for each in _ended(tmp_path).values()} == sends


def _all_of(client: Client, topic: str, queue: int) -> Iterator[StoredMessage]:
    client.wait_dispatched()
    begin = 0
    while found := client.pull(topic, queue, begin, 4096).messages:
        yield from found
        begin += len(found)


def _ended(folder: Path) -> dict[str, dict[str, Any]]:
    """Spans of the workers by message; the killed one may have left a part of a line."""
    found = {}
    path = folder / "spans"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            span = json.loads(line)
        except ValueError:
            continue
        found[span["attributes"]["messaging.message.id"]] = span
    return found

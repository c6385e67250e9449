"""OpenTelemetry: spans of sends and handlers; `traceparent` is a property of messages.

    opentelemetry.instrument()      # once in a program, also in the module of a `mqproc worker`
    client.send("orders", b"paid")  # span "send orders"; the message carries its context
    consumer.run(handle)            # span "process orders" around each call, child of the span that sent the message

Loops over messages use `with process(message):`. Names and attributes are those of OpenTelemetry's conventions for
messaging. Transactions are not traced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final

import msgspec
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Tracer, TracerProvider

from mqproc import AsyncClient, AsyncConsumer, AsyncProducer, Client, Consumer, Producer
from mqproc.types import Message, SendResult, StoredMessage
from mqproc.util.version import installed_version

MESSAGE_ID: Final = "messaging.message.id"
Prepared = tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], None]]
"""Arguments of a call, and what to do with its result."""
_originals: dict[tuple[type, str], Any] = {}
_provider: TracerProvider | None = None


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Trace all clients of this program, with the given or the global provider."""
    global _provider
    _provider = tracer_provider
    if _originals:
        return
    for client in (Client, AsyncClient):
        _patch(client, "send", _prepare_send("send"))
        _patch(client, "send_oneway", _prepare_send("send"))
        _patch(client, "send_many", _prepare_send_many)
        _patch(client, "send_batch", _prepare_send_batch)
    for producer in (Producer, AsyncProducer):
        _patch(producer, "send", _prepare_send("create"))
    for consumer in (Consumer, AsyncConsumer):
        _patch(consumer, "run", _prepare_run)


def uninstrument() -> None:
    """Undo `instrument`."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


@contextlib.contextmanager
def process(message: StoredMessage) -> Iterator[Span]:
    """A span for the handling of a message, child of the span that sent it."""
    attributes = _attributes("process", "process", message.topic) | {
        MESSAGE_ID: message.unique_id or message.message_id,
        "messaging.destination.partition.id": str(message.queue_id),
        "messaging.message.body.size": len(message.body),
    }
    context = propagate.extract(message.properties)
    with _tracer().start_as_current_span(f"process {message.topic}", context, SpanKind.CONSUMER, attributes) as span:
        yield span


def traced(handler: Any) -> Any:
    """Make a handler, async or not, whose calls are spans; `consumer.run` does it itself."""
    if not callable(handler):
        return handler  # `run` reports it.
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):

        async def handle_async(message: StoredMessage) -> Any:
            with process(message):
                return await handler(message)

        return _as(handler, handle_async)

    def handle(message: StoredMessage) -> Any:
        with process(message):
            return handler(message)

    return _as(handler, handle)


def _as(original: Any, replacement: Any) -> Any:
    return functools.update_wrapper(replacement, original)


def _tracer() -> Tracer:
    return trace.get_tracer("mqproc", installed_version(), _provider)


def _attributes(name: str, kind: str, topic: str) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "messaging.system": "mqproc",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }
    return found | ({"messaging.destination.name": topic} if topic else {})


def _patch(owner: type, name: str, prepare: Callable[..., Prepared]) -> None:
    """Replace a method by one that calls it with prepared arguments."""
    original = _originals[owner, name] = getattr(owner, name)

    def method(self: Any, *given: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as stack:
            arguments, settings, done = prepare(stack, *given, **named)
            result = original(self, *arguments, **settings)
            done(result)
            return result

    async def async_method(self: Any, *given: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as stack:
            arguments, settings, done = prepare(stack, *given, **named)
            result = await original(self, *arguments, **settings)
            done(result)
            return result

    setattr(owner, name, _as(original, async_method if inspect.iscoroutinefunction(original) else method))


def _prepare_send(operation: str) -> Callable[..., Prepared]:
    def prepare(stack: contextlib.ExitStack, topic: Any, *given: Any, **named: Any) -> Prepared:
        span, carrier = stack.enter_context(_sending(operation, topic))
        if isinstance(topic, Message):
            topic = _carrying(topic, carrier)
        else:
            named["properties"] = _with(named.get("properties"), carrier)
        return (topic, *given), named, functools.partial(_note_result, span)

    return prepare


def _prepare_send_many(stack: contextlib.ExitStack, messages: Iterable[Any], **named: Any) -> Prepared:
    span, carrier = stack.enter_context(_sending("send", ""))
    return (((_carrying(message, carrier) for message in messages),), named, functools.partial(_note_result, span))


def _prepare_send_batch(stack: contextlib.ExitStack, topic: Any, bodies: Any, **named: Any) -> Prepared:
    span, carrier = stack.enter_context(_sending("send", topic))
    given = named.get("properties")
    if isinstance(given, Sequence) and not isinstance(given, str):
        named["properties"] = [_with(each, carrier) for each in given]
    else:
        named["properties"] = _with(given, carrier)
    return (topic, bodies), named, functools.partial(_note_result, span)


def _prepare_run(stack: contextlib.ExitStack, handler: Any, **named: Any) -> Prepared:
    return (traced(handler),), named, lambda result: None


@contextlib.contextmanager
def _sending(operation: str, topic: Any) -> Iterator[tuple[Span, dict[str, str]]]:
    """A span for a send, and the properties that carry its context."""
    to = str(topic.topic if isinstance(topic, Message) else topic)
    attributes = _attributes(operation, operation, to)
    with _tracer().start_as_current_span(f"{operation} {to}".strip(), None, SpanKind.PRODUCER, attributes) as span:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        yield span, carrier


def _carrying(message: Any, carrier: Mapping[str, str]) -> Any:
    """A message with the context; another object is for the client to report."""
    if not isinstance(message, Message):
        return message
    return msgspec.structs.replace(message, properties=_with(message.properties, carrier))


def _with(properties: Any, carrier: Mapping[str, str]) -> Any:
    return {**(properties or {}), **carrier} if properties is None or isinstance(properties, Mapping) else properties


def _note_result(span: Span, result: Any) -> None:
    if isinstance(result, SendResult):
        span.set_attribute(MESSAGE_ID, result.unique_id or result.message_id)
    elif isinstance(result, Sized):
        span.set_attribute("messaging.batch.message_count", len(result))

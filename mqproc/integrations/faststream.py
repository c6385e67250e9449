"""FastStream: a broker on a store.

    broker = MqprocBroker("/var/lib/store")
    app = FastStream(broker)

    @broker.subscriber("orders", group="billing")
    async def handle(order: Order) -> None: ...

A subscriber is a member of its consumer group. By default (`AckPolicy.NACK_ON_ERROR`) a message is done when its
handlers have returned; after an error it is redelivered after 10 s, 30 s, 1 m, …, and `reject` makes it a dead letter.
Headers are properties. Batches, `request` and in-memory test brokers are not supported: tests use a real store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from fast_depends import dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import BrokerRouter
from faststream._internal.configs import (
    BrokerConfig,
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.subscriber.mixins import TasksMixin
from faststream._internal.endpoint.utils import ParserComposition, process_msg
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException
from faststream.message import StreamMessage, decode_message
from faststream.middlewares import AckPolicy
from faststream.response import PublishCommand
from faststream.response.publish_type import PublishType
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import BrokerSpec, Operation, PublisherSpec, SubscriberSpec
from faststream.specification.schema import Message as MessageSpec

from mqproc.client._async.client import AsyncClient
from mqproc.client._async.consumer import AsyncConsumer
from mqproc.errors import NotRunningError
from mqproc.types import Filter, SendResult, StoredMessage
from mqproc.util.arguments import Time, at_least_one

_CONTENT_TYPE: Final = "content-type"
_CORRELATION_ID: Final = "correlation_id"
_REPLY_TO: Final = "reply_to"
_IDLE_S: Final = 1.0
_PAUSE_S: Final = 1.0
"""Pause before a failed consumer is replaced; it doubles with each failure in a row."""
_PAUSE_MAX_S: Final = 30.0
_LOG_FORMAT: Final = "%(asctime)s %(levelname)-8s - %(topic)s | %(group)s | %(message_id)-32s - %(message)s"


class MqprocStreamMessage(StreamMessage[StoredMessage]):
    """A received message."""

    consumer: AsyncConsumer

    async def ack(self) -> None:
        """Mark it as done."""
        if self.committed is None:
            await self.consumer.ack(self.raw_message)
        await super().ack()

    async def nack(self, delay_level: int = 0) -> None:
        """Have it redelivered, after the pause of level 1…18 or, with 0, increasing pauses."""
        if self.committed is None:
            await self.consumer.nack(self.raw_message, delay_level=delay_level)
        await super().nack()

    async def reject(self) -> None:
        """Make it a dead letter of its group."""
        if self.committed is None:
            await self.consumer.nack(self.raw_message, delay_level=-1)
        await super().reject()


async def parse_message(message: StoredMessage, consumer: AsyncConsumer | None = None) -> MqprocStreamMessage:
    """FastStream's form of a message."""
    found = MqprocStreamMessage(
        message,
        message.body,
        headers=dict(message.properties),
        reply_to=message.properties.get(_REPLY_TO, ""),
        content_type=message.properties.get(_CONTENT_TYPE),
        correlation_id=message.properties.get(_CORRELATION_ID),
        message_id=message.unique_id or message.message_id,
    )
    if consumer is not None:
        found.consumer = consumer
    return found


async def _decode(message: StreamMessage[Any]) -> Any:
    return decode_message(message)


class MqprocPublishCommand(PublishCommand):
    """A message to publish; `options` are arguments of `Client.send`, such as tag and keys."""

    def __init__(self, message: Any, *, options: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(message, **settings)
        self.options = options or {}

    @classmethod
    def from_cmd(cls, cmd: PublishCommand) -> MqprocPublishCommand:
        """The command of a handler's result."""
        if isinstance(cmd, MqprocPublishCommand):
            return cmd
        return cls(
            cmd.body,
            destination=cmd.destination,
            correlation_id=cmd.correlation_id,
            headers=cmd.headers,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
        )


class MqprocProducer(ProducerProto[MqprocPublishCommand]):
    """Sends messages of the broker and its publishers."""

    def __init__(self, parser: Any, decoder: Any) -> None:
        self._parser = ParserComposition(parser, parse_message)
        self._decoder = ParserComposition(decoder, _decode)
        self.codec: Any = DefaultCodec()
        self.serializer: Any = None
        self.client: AsyncClient | None = None

    async def publish(self, cmd: MqprocPublishCommand) -> SendResult:
        """Send a message."""
        if self.client is None:
            raise NotRunningError("the broker is not connected: start its application, or await broker.connect()")
        body, content_type = await self.codec.encode(cmd.body, self.serializer)
        properties = {name: str(value) for name, value in (cmd.headers or {}).items()}
        for name, value in (
            (_CONTENT_TYPE, content_type),
            (_CORRELATION_ID, cmd.correlation_id),
            (_REPLY_TO, cmd.reply_to),
        ):
            if value:
                properties[name] = value
        return await self.client.send(cmd.destination, body, properties=properties, **cmd.options)

    async def request(self, cmd: MqprocPublishCommand) -> Any:
        """Not supported."""
        raise FeatureNotSupportedException("mqproc has no requests: publish with reply_to, and subscribe to that topic")

    async def publish_batch(self, cmd: MqprocPublishCommand) -> Any:
        """Not supported."""
        raise FeatureNotSupportedException("MqprocBroker does not publish batches")


# Configuration


class _LoggerStorage(DefaultLoggerStorage):
    def register_subscriber(self, params: dict[str, Any]) -> None:
        pass

    def get_logger(self, *, context: ContextRepo) -> Any:
        logger = self._get_logger_ref()
        if logger is None:
            names = {"topic": "", "group": ""}
            logger = get_broker_logger("mqproc", names, 32, _LOG_FORMAT, context, self.logger_log_level)
            self._logger_ref.add(logger)
        return logger


@dataclass(kw_only=True)
class MqprocBrokerConfig(BrokerConfig):
    """Shared state of a broker's endpoints."""

    producer: Any = field(default_factory=lambda: MqprocProducer(None, None))
    client: AsyncClient | None = None


@dataclass(kw_only=True)
class MqprocSubscriberConfig(SubscriberUsecaseConfig):
    """Arguments of a subscriber."""

    topic: str
    group: str
    max_workers: int
    consumer_options: dict[str, Any]

    @property
    def ack_policy(self) -> AckPolicy:
        """The subscriber's own policy, the broker's, or NACK_ON_ERROR."""
        for policy in (self._ack_policy, self._outer_config.ack_policy):
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR


@dataclass(kw_only=True)
class MqprocPublisherConfig(PublisherUsecaseConfig):
    """Arguments of a publisher."""

    topic: str
    headers: dict[str, str]
    options: dict[str, Any]


@dataclass(kw_only=True)
class _SubscriberSpecConfig(SubscriberSpecificationConfig):
    topic: str


@dataclass(kw_only=True)
class _PublisherSpecConfig(PublisherSpecificationConfig):
    topic: str


class _SubscriberSpec(SubscriberSpecification[Any, _SubscriberSpecConfig]):
    @property
    def channel_labels(self) -> list[str]:
        return [f"{self._outer_config.prefix}{self.config.topic}"]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        message = MessageSpec(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads()))
        operation = Operation(message=message, bindings=None)
        address, name = self.channel_labels[0], self.name
        return {name: SubscriberSpec(address=address, description=self.description, operation=operation, bindings=None)}


class _PublisherSpec(PublisherSpecification[Any, _PublisherSpecConfig]):
    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        payload = resolve_payloads(self.get_payloads(), "Publisher")
        operation = Operation(message=MessageSpec(title=f"{self.name}:Message", payload=payload), bindings=None)
        about = self.config.description_
        return {self.name: PublisherSpec(address=self.topic, description=about, operation=operation, bindings=None)}


# Endpoints


class _ReplyPublisher(FakePublisher):
    def __init__(self, producer: Any, topic: str) -> None:
        super().__init__(producer=producer)
        self._topic = topic

    def patch_command(self, cmd: PublishCommand) -> MqprocPublishCommand:
        found = MqprocPublishCommand.from_cmd(super().patch_command(cmd))
        found.destination = self._topic
        return found


class MqprocSubscriber(TasksMixin, SubscriberUsecase[StoredMessage]):
    """A member of a consumer group, with up to `max_workers` messages in its handlers at a time."""

    def __init__(self, config: MqprocSubscriberConfig, specification: Any, calls: Any) -> None:
        config.parser, config.decoder = self.parse, _decode
        super().__init__(config, specification, calls)
        self._config = config
        self._consumer: AsyncConsumer | None = None
        self.is_failing = False
        """Whether its consumer failed, and no new one has received yet."""

    @property
    def topic(self) -> str:
        """The topic, with the prefix of its router."""
        return f"{self._outer_config.prefix}{self._config.topic}"

    async def parse(self, message: StoredMessage) -> MqprocStreamMessage:
        """The default parser."""
        return await parse_message(message, self._consumer)

    async def start(self) -> None:
        """Join the group, and handle its messages."""
        await super().start()
        await self._join()
        if self.calls:
            self.add_task(self._consume_all, restart_on_failure=False)
        self._post_start()

    async def stop(self) -> None:
        """Finish the messages in the handlers, commit them, and leave the group."""
        tasks = list(self.tasks)
        await super().stop()
        if tasks:  # A cancelled task may still join the group, or leave it.
            await asyncio.wait(tasks)
        self.is_failing = False
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()

    async def _join(self) -> AsyncConsumer:
        if self._consumer is None:
            client: AsyncClient | None = self._outer_config.client  # type: ignore[attr-defined]
            if client is None:
                raise NotRunningError("the broker is not connected: start its application, or await broker.connect()")
            self._consumer = await client.consumer(self._config.group, self.topic, **self._config.consumer_options)
        return self._consumer

    async def _consume_all(self) -> None:
        in_flight, pause_s = set[asyncio.Task[Any]](), _PAUSE_S
        while self.running:
            try:
                await self._handle_next(in_flight)
                self.is_failing, pause_s = False, _PAUSE_S
            except Exception as error:  # FastStream would end the subscriber, and the application would run without it.
                self.is_failing = True
                self._report(logging.ERROR, f"the consumer failed, and is replaced after {pause_s:g} s", error)
                await self._leave(in_flight)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _handle_next(self, in_flight: set[asyncio.Task[Any]]) -> None:
        """Receive messages, and start their handlers."""
        consumer = await self._join()
        if len(in_flight) >= self._config.max_workers:
            await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
        for message in await consumer.receive(self._config.max_workers - len(in_flight), _IDLE_S):
            task = asyncio.create_task(self.consume(message))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)

    async def _leave(self, in_flight: set[asyncio.Task[Any]]) -> None:
        """Close a failed consumer."""
        if in_flight:  # Their messages can be acknowledged only before.
            await asyncio.wait(in_flight)
        if self._consumer is not None:
            try:
                await self._consumer.close()
            except Exception as error:
                self._report(logging.WARNING, "messages that are done may be redelivered", error)
            self._consumer = None

    def _report(self, level: int, text: str, error: Exception) -> None:
        self._log(level, f"{text}: {error!r}", extra=self.get_log_context(None), exc_info=error)

    async def get_one(self, *, timeout: float = 5.0) -> MqprocStreamMessage | None:
        """The next message, in a subscriber without handlers; None if none arrives in time."""
        for message in await (await self._join()).receive(1, timeout):
            parser, decoder = self._get_parser_and_decoder()
            context = self._outer_config.context
            middlewares = (each(message, context=context) for each in self._broker_middlewares)
            found: Any = await process_msg(msg=message, middlewares=middlewares, parser=parser, decoder=decoder)
            return found  # type: ignore[no-any-return]
        return None

    async def __aiter__(self) -> AsyncIterator[MqprocStreamMessage]:
        while True:
            if (message := await self.get_one(timeout=_IDLE_S)) is not None:
                yield message

    def _make_response_publisher(self, message: StreamMessage[Any]) -> Sequence[FakePublisher]:
        return (_ReplyPublisher(self._outer_config.producer, message.reply_to),)

    def get_log_context(self, message: StreamMessage[StoredMessage] | None) -> dict[str, str]:
        """Fields of the log lines."""
        return {"topic": self.topic, "group": self._config.group, **super().get_log_context(message)}


class MqprocPublisher(PublisherUsecase):
    """Sends to one topic; as a decorator, the results of a handler."""

    def __init__(self, config: MqprocPublisherConfig, specification: Any) -> None:
        super().__init__(config, specification)
        self._config = config

    @property
    def topic(self) -> str:
        """The topic, with the prefix of its router."""
        return f"{self._outer_config.prefix}{self._config.topic}"

    async def publish(
        self,
        message: Any,
        topic: str = "",
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        **options: Any,
    ) -> SendResult:
        """Send a message; `options` are arguments of `Client.send`."""
        cmd = MqprocPublishCommand(
            message,
            destination=topic or self.topic,
            headers=self._config.headers | (headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            reply_to=reply_to,
            options=self._config.options | options,
            _publish_type=PublishType.PUBLISH,
        )
        sent: SendResult = await self._basic_publish(cmd, producer=self._outer_config.producer, _extra_middlewares=())
        return sent

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> None:
        found = MqprocPublishCommand.from_cmd(cmd)
        found.destination = found.destination or self.topic
        found.add_headers(self._config.headers, override=False)
        found.options = self._config.options | found.options
        producer = self._outer_config.producer
        await self._basic_publish(found, producer=producer, _extra_middlewares=_extra_middlewares)

    async def request(self, message: Any, *arguments: Any, **settings: Any) -> Any:
        """Not supported."""
        raise FeatureNotSupportedException("mqproc has no requests: publish with reply_to, and subscribe to that topic")


# Broker


class MqprocRegistrator(Registrator[StoredMessage, MqprocBrokerConfig]):
    """What brokers and routers have in common."""

    def subscriber(  # type: ignore[override]
        self,
        topic: str,
        *,
        group: str,
        filter: Filter | str | None = None,
        start: Time = "latest",
        max_workers: int = 1,
        session_timeout: float = 10.0,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> MqprocSubscriber:
        """Handle a topic's messages as a member of `group`.

        `filter`, `start` and `session_timeout` are as for `Client.consumer`.
        """
        config: Any = self.config
        options = {"filter": filter, "start": start, "session_timeout": session_timeout}
        calls = CallsCollection[Any]()
        about = _SubscriberSpecConfig(
            topic=topic, title_=title, description_=description, include_in_schema=include_in_schema
        )
        own = MqprocSubscriberConfig(
            topic=topic,
            group=group,
            max_workers=at_least_one("max_workers", max_workers),
            consumer_options=options,
            no_reply=no_reply,
            _outer_config=config,
            _ack_policy=ack_policy,
        )
        made = MqprocSubscriber(own, _SubscriberSpec(config, about, calls), calls)
        super().subscriber(made, persistent=persistent)
        return made.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        headers: dict[str, str] | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any = None,
        include_in_schema: bool = True,
        **options: Any,
    ) -> MqprocPublisher:
        """A publisher to `topic`; `options` are arguments of `Client.send`, such as tag and keys."""
        config: Any = self.config
        about = _PublisherSpecConfig(
            topic=topic, schema_=schema, title_=title, description_=description, include_in_schema=include_in_schema
        )
        own = MqprocPublisherConfig(topic=topic, headers=headers or {}, options=options, _outer_config=config)
        made = MqprocPublisher(own, _PublisherSpec(config, about))
        super().publisher(made, persistent=persistent)
        return made


class MqprocRouter(MqprocRegistrator, BrokerRouter[StoredMessage, MqprocBrokerConfig]):
    """Endpoints that a broker includes; their topics begin with `prefix`."""

    def __init__(self, prefix: str = "", *, routers: Iterable[Any] = (), **settings: Any) -> None:
        super().__init__(handlers=(), config=MqprocBrokerConfig(prefix=prefix, **settings), routers=routers)


class MqprocBroker(MqprocRegistrator, BrokerUsecase[StoredMessage, AsyncClient, MqprocBrokerConfig]):
    """A broker on the running group of a store."""

    def __init__(
        self,
        store: str | Path,
        *,
        timeout: float = 10.0,
        ack_policy: AckPolicy = EMPTY,
        graceful_timeout: float | None = 15.0,
        middlewares: Sequence[Any] = (),
        dependencies: Sequence[Any] = (),
        routers: Iterable[Any] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: Any = None,
        description: str | None = None,
        tags: Iterable[Any] = (),
        logger: Any = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: Any = EMPTY,
    ) -> None:
        """`timeout` in seconds is the client's; other arguments are those of FastStream's brokers."""
        config = MqprocBrokerConfig(
            producer=MqprocProducer(parser, decoder),
            broker_middlewares=middlewares,
            broker_dependencies=dependencies,
            broker_parser=parser,
            broker_decoder=decoder,
            broker_codec=codec,
            ack_policy=ack_policy,
            graceful_timeout=graceful_timeout,
            logger=make_logger_state(logger, log_level, _LoggerStorage),
            fd_config=FastDependsConfig(
                use_fastdepends=apply_types, serializer=serializer, provider=dependency_provider, context=ContextRepo()
            ),
            extra_context={"broker": self},
        )
        about = BrokerSpec(
            url=[f"mqproc://{store}"],
            protocol="mqproc",
            protocol_version=None,
            description=description,
            tags=tags,
            security=None,
        )
        super().__init__(routers=routers, config=config, specification=about)
        self._new_client = partial(AsyncClient, store, timeout=timeout)

    async def _connect(self) -> AsyncClient:
        client = self._new_client()
        await client.health()
        producer: Any = self.config.producer
        producer.client = self.config.broker_config.client = client
        producer.serializer = self.config.fd_config._serializer
        producer.codec = self.config.broker_codec or DefaultCodec()
        return client

    async def start(self) -> None:
        """Connect, and start the subscribers."""
        await self.connect()
        await super().start()

    async def stop(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Stop the subscribers, and disconnect."""
        await super().stop(exc_type, exc_val, exc_tb)
        client, self._connection = self._connection, None
        producer: Any = self.config.producer
        producer.client = self.config.broker_config.client = None
        if client is not None:
            await client.close()

    async def ping(self, timeout: float | None = None) -> bool:
        """Whether the group answers in time, and no subscriber's consumer has failed."""
        if any(isinstance(each, MqprocSubscriber) and each.is_failing for each in self.subscribers):
            return False
        try:
            async with asyncio.timeout(timeout):
                await (await self.connect()).health()
        except Exception:
            return False
        return True

    async def publish(
        self,
        message: Any,
        topic: str,
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        **options: Any,
    ) -> SendResult:
        """Send a message; `options` are arguments of `Client.send`, such as tag and keys."""
        cmd = MqprocPublishCommand(
            message,
            destination=topic,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            reply_to=reply_to,
            options=options,
            _publish_type=PublishType.PUBLISH,
        )
        sent: SendResult = await self._basic_publish(cmd, producer=self.config.producer)
        return sent

    async def request(self, message: Any, topic: str, /, timeout: float = 0.5) -> Any:
        """Not supported."""
        raise FeatureNotSupportedException("mqproc has no requests: publish with reply_to, and subscribe to that topic")

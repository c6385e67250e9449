"""Celery and kombu: the transport of `mqproc:///path/to/store`.

    app = Celery("tasks", broker="mqproc:///var/lib/store")

A kombu queue is a topic with one queue. All workers read it as simple consumers of one group, so that any number of
them share it. A message that a worker holds stays invisible to the others while the worker's process lives: a thread
renews the invisible time. The messages of a killed worker are delivered again after it.

Options of `broker_transport_options`: `group` (default "celery"), `visibility_timeout` in seconds (default 30), the
invisible time after which the messages of a killed worker are delivered again, and `timeout` of a request (10).

Fanout exchanges are not supported: Celery turns off remote control, and events have no reader.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from queue import Empty
from typing import Any, Final
from urllib.parse import quote

from kombu.transport import virtual
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid

from mqproc.client import Client, ResetTo
from mqproc.client._sync.consumer import SimpleConsumer
from mqproc.client.subscription import SIMPLE_RECEIVE_MESSAGES
from mqproc.errors import (
    BadRequestError,
    ConfigurationError,
    GroupNotFoundError,
    MqprocError,
    NotRunningError,
    RequestTimeoutError,
    SendOutcomeUnknownError,
    StoreBusyError,
)
from mqproc.integrations import kombu_entry  # noqa: F401  # It registers the transport's name.
from mqproc.types import StoredMessage
from mqproc.util.version import installed_version

VISIBILITY_TIMEOUT_S: Final = 30.0
_RENEWALS: Final = 3
"""Renewals in an invisible time."""
_WAIT_S: Final = 1.0
_BUSY_WAIT_S: Final = 0.01
"""How long to wait for messages while a channel that reads none may become free."""
_KEY: Final = re.compile(r"[\w.:-]{1,100}")
_log = logging.getLogger("mqproc.celery")


def topic_of(queue: str) -> str:
    """The topic of a kombu queue: characters that topics lack are escaped as in a URL."""
    return quote(queue, safe="").replace(".", "%2E").replace("~", "%7E")


class QoS(virtual.QoS):
    """Acknowledgements: at once, since they may come from any thread."""

    def ack(self, delivery_tag: str) -> None:
        self.channel.connection.leases.ack(delivery_tag)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not requeue:
            self.channel.connection.leases.ack(delivery_tag)
        super().reject(delivery_tag, requeue)


class Channel(virtual.Channel):
    """A channel whose queues are topics of the store."""

    QoS = QoS

    def __init__(self, connection: Any, **settings: Any) -> None:
        super().__init__(connection, **settings)
        self._without_ack: set[str] = set()

    def basic_consume(self, queue: str, no_ack: bool, *arguments: Any, **settings: Any) -> Any:
        if no_ack:
            self._without_ack.add(queue)
        return super().basic_consume(queue, no_ack, *arguments, **settings)

    def basic_get(self, queue: str, no_ack: bool = False, **settings: Any) -> Any:
        message = super().basic_get(queue, no_ack, **settings)
        if message is not None and no_ack:
            self.connection.leases.ack(message.delivery_tag)
        return message

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any) -> None:
        if not (if_empty and self._size(queue)):
            self._delete(queue)
            self.state.queue_bindings_delete(queue)

    def wanted(self) -> tuple[list[str], int]:
        """The queues that it reads, and how many messages it may get; none at its prefetch limit."""
        if not self._active_queues or not self.qos.can_consume():
            return [], 0
        return self._active_queues, self.qos.can_consume_max_estimate() or SIMPLE_RECEIVE_MESSAGES

    def deliver(self, payload: dict[str, Any], queue: str) -> None:
        """Call the callback of a queue's consumer."""
        self.connection._deliver(payload, queue)
        if queue in self._without_ack:
            self.connection.leases.ack(payload["properties"]["delivery_tag"])

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        for _, payload in self.connection.receive([queue], 1, timeout or 0.0):
            return dict(payload)
        raise Empty

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        task_id = str((message.get("headers") or {}).get("id", ""))
        keys = task_id if _KEY.fullmatch(task_id) else ""
        self.connection.store.send(topic_of(queue), dumps(message).encode(), keys=keys)

    def _restore(self, message: Any) -> None:
        self.connection.leases.give_back(message.delivery_tag)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return bool(self.connection.store.queues(topic_of(queue)))

    def _new_queue(self, queue: str, **_: Any) -> None:
        if not self._has_queue(queue):
            self.connection.store.create_topic(topic_of(queue), 1)

    def _size(self, queue: str) -> int:
        topic = topic_of(queue)
        with contextlib.suppress(GroupNotFoundError):
            if read := [
                each for each in self.connection.store.groups.info(self.connection.group).queues if each.topic == topic
            ]:
                return sum(each.lag for each in read)
        return sum(each.max_offset - each.min_offset for each in self.connection.store.queues(topic))

    def _purge(self, queue: str) -> int:
        size, groups, group = self._size(queue), self.connection.store.groups, self.connection.group
        with contextlib.suppress(GroupNotFoundError):
            groups.execute(group, groups.plan_reset(group, ResetTo(latest=True), topic_of(queue)))
        return size

    def _delete(self, queue: str, *_: Any, **__: Any) -> None:
        if self._has_queue(queue):
            self.connection.store.delete_topic(topic_of(queue))


class Leases:
    """Messages that this process holds, invisible to others until it ends each."""

    def __init__(self, invisible_s: float) -> None:
        self.invisible_s = invisible_s
        self._held: dict[str, tuple[SimpleConsumer, StoredMessage]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, consumer: SimpleConsumer, message: StoredMessage) -> str:
        """Hold a message; returns its delivery tag."""
        tag: str = uuid()
        with self._lock:
            self._held[tag] = consumer, message
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_all, name="mqproc-celery-leases", daemon=True)
            self._thread.start()
        return tag

    def ack(self, tag: str) -> None:
        """Acknowledge a message."""
        with self._lock:
            if held := self._held.pop(tag, None):
                held[0].ack(held[1])

    def give_back(self, tag: str) -> None:
        """Make a message visible to all workers again, in a second."""
        with self._lock:
            if held := self._held.pop(tag, None):
                with contextlib.suppress(BadRequestError):  # Its invisible time is over already.
                    held[0].change_invisible_duration(held[1], 1)

    def close(self) -> None:
        """End the renewals."""
        self._over.set()

    def _renew_all(self) -> None:
        while not self._over.wait(self.invisible_s / _RENEWALS):
            for tag in list(self._held):
                self._renew(tag)

    def _renew(self, tag: str) -> None:
        with self._lock:  # An acknowledgement needs the handle of the last renewal.
            if (held := self._held.get(tag)) is None:
                return
            consumer, message = held
            try:
                self._held[tag] = consumer, consumer.change_invisible_duration(message, self.invisible_s)
            except BadRequestError as error:
                del self._held[tag]
                _log.warning(
                    "message %s is delivered again, since its renewal came too late: %s", message.message_id, error
                )
            except MqprocError as error:
                _log.warning("the invisible time of message %s was not renewed: %s", message.message_id, error)


class Transport(virtual.Transport):
    """Connects kombu to a store."""

    Channel = Channel
    driver_type = driver_name = "mqproc"
    default_connection_params: Mapping[str, Any] = {}
    connection_errors: Any = (
        *virtual.Transport.connection_errors,
        NotRunningError,
        RequestTimeoutError,
        SendOutcomeUnknownError,
        StoreBusyError,
        OSError,
    )

    def __init__(self, client: Any, **settings: Any) -> None:
        super().__init__(client, **settings)
        if client.hostname not in (None, "", "localhost") or not (client.virtual_host or "").strip("/"):
            raise ConfigurationError("the broker's URL names no store: give mqproc:///path/to/store")
        options = client.transport_options
        self.group: str = options.get("group", "celery")
        self.store = Client(f"/{client.virtual_host.lstrip('/')}", timeout=options.get("timeout", 10.0))
        self.leases = Leases(float(options.get("visibility_timeout", VISIBILITY_TIMEOUT_S)))
        self._readers: dict[tuple[str, ...], SimpleConsumer] = {}

    def driver_version(self) -> str:
        return installed_version()

    def establish_connection(self) -> Any:
        self.store.health()
        return super().establish_connection()

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        self.leases.close()
        self.store.close()

    def drain_events(self, connection: Any, timeout: float | None = None, **_: Any) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = _WAIT_S if deadline is None else deadline - time.monotonic()
            if self._deliver_some(min(_WAIT_S, max(0.0, left_s))):
                return
            if left_s <= 0:
                raise socket.timeout  # noqa: UP041  # kombu's name for it.

    def _deliver_some(self, wait_s: float) -> bool:
        places: dict[str, Channel] = {}
        most = SIMPLE_RECEIVE_MESSAGES
        for channel in self.channels:
            queues, count = channel.wanted()
            places.update(dict.fromkeys(queues, channel))
            most = min(most, count) if count else most
            wait_s = wait_s if queues else min(wait_s, _BUSY_WAIT_S)
        if not places:
            time.sleep(wait_s)
            return False
        found = False
        for queue, payload in self.receive(list(places), most, wait_s):
            places[queue].deliver(payload, queue)
            found = True
        return found

    def receive(self, queues: list[str], most: int, timeout_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Receive messages of one of the queues; each is held until it is acknowledged."""
        topics = {topic_of(queue): queue for queue in queues}
        key = tuple(sorted(topics))
        if (reader := self._readers.get(key)) is None:
            reader = self._readers[key] = self.store.simple_consumer(self.group, key, start="earliest")
        received = reader.receive(most, self.leases.invisible_s, timeout=timeout_s)
        tags = [self.leases.add(reader, message) for message in received]  # All are held before one is handled.
        for message, tag in zip(received, tags, strict=True):
            payload: dict[str, Any] = loads(message.body)
            payload["properties"]["delivery_tag"] = tag
            payload["redelivered"] = message.reconsume_times > 0
            yield topics[message.topic], payload

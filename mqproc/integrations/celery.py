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
from collections.abc import Generator, Iterable, Mapping
from queue import Empty
from typing import Any, Final
from urllib.parse import quote

from kombu.transport import virtual
from kombu.utils.json import dumps, loads
from kombu.utils.uuid import uuid

from mqproc.client import Client, ResetTo
from mqproc.client._sync.consumer import SimpleConsumer
from mqproc.client.group_requests import Nacking
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
        try:
            self.connection._deliver(payload, queue)
        finally:  # Kombu keeps no record of a message without acknowledgement: only its lease would remain.
            if queue in self._without_ack:
                self.connection.leases.ack(payload["properties"]["delivery_tag"])

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        with contextlib.closing(self.connection.receive({queue: self}, 1, timeout or 0.0)) as received:
            for _, payload in received:
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

    def give_back_all(self, tags: Iterable[str]) -> None:
        """Make messages that were not delivered visible to all workers again, at once."""
        with self._lock:
            returned = [held for tag in tags if (held := self._held.pop(tag, None))]
        try:
            for consumer, message in returned:
                with contextlib.suppress(BadRequestError):  # Its invisible time is over already.
                    consumer.change_invisible_duration(message, 0)
        except (MqprocError, OSError) as error:  # The caller handles another error already.
            _log.warning(
                "%d messages that were not delivered stay invisible for up to %g s: %s",
                len(returned),
                self.invisible_s,
                error,
            )

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
        # The traceback of a callback's error would keep the generator, and so the rest of its messages, alive.
        with contextlib.closing(self.receive(places, most, wait_s)) as received:
            for queue, payload in received:
                places[queue].deliver(payload, queue)
                found = True
        return found

    def receive(
        self, places: Mapping[str, virtual.Channel], most: int, timeout_s: float
    ) -> Generator[tuple[str, dict[str, Any]]]:
        """Receive messages of one of the queues; each is held until it is acknowledged.

        Those that the caller has not taken when it closes the generator are given back.
        """
        topics = {topic_of(queue): queue for queue in places}
        key = tuple(sorted(topics))
        if (reader := self._readers.get(key)) is None:
            reader = self._readers[key] = self.store.simple_consumer(self.group, key, start="earliest")
        found = False
        # A receive that got only messages of other programs is repeated: its queue is not empty.
        while not found and (received := reader.receive(most, self.leases.invisible_s, timeout=timeout_s)):
            left = {self.leases.add(reader, message): message for message in received}  # All, before one is handled.
            try:
                for tag, message in list(left.items()):
                    queue = topics[message.topic]
                    payload = self._payload(message, tag, places[queue])
                    del left[tag]
                    if payload is not None:
                        found = True
                        yield queue, payload
            finally:
                self.leases.give_back_all(left)

    def _payload(self, message: StoredMessage, tag: str, channel: virtual.Channel) -> dict[str, Any] | None:
        """Kombu's form of a message.

        None for one that kombu did not send: it is made a dead letter.
        """
        try:
            payload: dict[str, Any] = loads(message.body)
            payload["properties"]["delivery_tag"] = tag
            payload["redelivered"] = message.reconsume_times > 0
            channel.Message(payload, channel=channel)  # The callback does the same, where an error ends the worker.
        except Exception as error:
            self._bury(message, tag, error)
            return None
        return payload

    def _bury(self, message: StoredMessage, tag: str, reason: Exception) -> None:
        """Make a message a dead letter of the group: every worker would fail to read it."""
        place = f"message {message.message_id} of topic {message.topic}"
        try:
            nacking = Nacking(self.group, [message], -1)
            nacking.answered(self.store.run(nacking.call()))
            if nacking.left:
                raise nacking.busy()
            self.leases.ack(tag)
        except (MqprocError, OSError) as error:
            _log.error("%s is no task (%r), and is received again, as no dead letter yet: %s", place, reason, error)
            self.leases.give_back(tag)
            return
        _log.error("%s is no task (%r): it is a dead letter of group %s now", place, reason, self.group)

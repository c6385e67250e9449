"""A stream of messages of any topics, sent in frames of one topic each with several under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mqproc.client import sending
from mqproc.client.amounts import at_least_one
from mqproc.client.core import WRITER
from mqproc.errors import MqprocError
from mqproc.message import Message, SendResult

if TYPE_CHECKING:
    from mqproc.client.sync import Client


def send_many(client: Client, messages: Iterable[Message], *, in_flight: int, wait: bool) -> list[SendResult]:
    """The results in the order of the messages.

    At an error, one of the messages' own too, the frames under way are finished first; its notes tell how many messages
    were stored.
    """
    in_flight = at_least_one("in_flight", in_flight)
    results: dict[int, SendResult] = {}
    indices: deque[list[int]] = deque()
    pipeline = client.pipeline(WRITER)
    failure: Exception | None = None

    def finish() -> None:
        nonlocal failure
        finished = indices.popleft()
        try:
            results.update(zip(finished, pipeline.finish(), strict=True))
        except MqprocError as error:
            failure = failure or sending.at_its_place(error, finished)

    try:
        try:
            for group in sending.groups_of(messages):
                places = [index for index, _ in group]
                call = sending.send_group([message for _, message in group], wait=wait, places=places)
                if len(pipeline) >= in_flight:
                    finish()
                if failure is not None:
                    break
                indices.append(places)
                pipeline.start(call)
        except Exception as error:  # Of whoever makes the messages, or of one that cannot be sent.
            failure = error
        while indices:
            finish()
    finally:
        pipeline.close()
    if failure is not None:
        failure.add_note(f"{len(results):,} messages were stored")
        raise failure
    return [results[index] for index in range(len(results))]

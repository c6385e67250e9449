"""Members of a group in processes of their own, which do what they are told."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mqproc import Client

SESSION_S = 1.0
PATIENCE_S = 60.0
"""A call outlasts the next start of whatever was killed."""
Place = tuple[str, int, int]
"""Topic, queue id, queue offset."""


def serve(store: Path, group: str, topic: str, ordered: bool, pipe: Connection) -> None:
    """A member in a process of its own, which does what it is told: (what, argument) → answer."""
    held: dict[Place, Any] = {}
    with (
        Client(store, timeout=PATIENCE_S) as client,
        client.consumer(group, topic, start="earliest", session_timeout=SESSION_S, pull_messages=8) as consumer,
    ):
        pipe.send(consumer.member_id)
        while True:
            what, argument = pipe.recv()
            if what == "receive":
                found = {
                    (each.topic, each.queue_id, each.queue_offset): each
                    for each in consumer.receive(argument, 0.05, ordered=ordered)
                }
                held |= found
                pipe.send([(place, message.body) for place, message in found.items()])
            elif what == "leave":
                break
            else:
                messages = [held.pop(place) for place in argument]
                if what == "ack":
                    consumer.ack(*messages)
                elif what == "nack":
                    consumer.nack(*messages, delay_level=1)
                else:
                    consumer.commit()
                pipe.send(None)
    pipe.send(None)


class Member:
    """The test's end of one."""

    def __init__(self, store: Path, group: str, topic: str, *, ordered: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(store, group, topic, ordered, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.held: list[tuple[Place, bytes]] = []
        self.member_id = self._answer()

    def ask(self, what: str, argument: Any = ()) -> Any:
        self._pipe.send((what, argument))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(2 * PATIENCE_S), "a member does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._pipe.close()

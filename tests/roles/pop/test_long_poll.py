"""Held receives: served in order, grouped by request, ended by timeout."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mqproc.errors import BadRequestError
from mqproc.roles.pop.receivers import PopLongPolls
from tests.support.fakes import ManualClock

FOREVER_NS = 1 << 62


@dataclass
class Receive:
    """A request of one client."""

    name: str
    options: Any
    connection: Any = field(default_factory=lambda: SimpleNamespace(closed=False))


def receive(name: str, *topics: str, group: str = "billing") -> Receive:
    return Receive(name, SimpleNamespace(group=group, topics=list(topics), tags=[], sql=""))


class Store:
    """Number of messages per topic, and the outcome of each receive."""

    def __init__(self) -> None:
        self.messages: dict[str, int] = {}
        self.tried: list[str] = []
        self.given: list[str] = []
        self.answers: list[str] = []
        self.fails_with: Exception | None = None
        self.clock = ManualClock()
        self.held = PopLongPolls(
            self.clock, self.give, lambda asked: self.answers.append(f"{asked.name}: nothing"), self.refuse
        )

    def give(self, asked: Any) -> bool:
        self.tried.append(asked.name)
        self.clock.advance(1)
        if self.fails_with is not None:
            raise self.fails_with
        for topic in asked.options.topics:
            if self.messages.get(topic):
                self.messages[topic] -= 1
                self.given.append(asked.name)
                return True
        return False

    def refuse(self, asked: Any, error: Exception) -> None:
        self.answers.append(f"{asked.name}: {error}")


@pytest.fixture
def store() -> Store:
    made = Store()
    for name, topics in (("a", "T"), ("b", "T"), ("c", "U"), ("d", "T"), ("e", "TU")):
        made.held.hold(receive(name, *topics), 1000)
    return made


def test_pop_long_poll_serves_the_longest_waiting_first(store: Store) -> None:
    store.messages = {"T": 2, "U": 1}
    assert store.held.retry(0, FOREVER_NS) == 3
    assert store.given == ["a", "b", "c"]
    assert len(store.held) == 2


def test_pop_long_poll_empty_result_skips_equal_receives(store: Store) -> None:
    """A step costs as much as the topics do, however many receives wait."""
    store.messages = {"T": 1}
    assert store.held.retry(0, FOREVER_NS) == 1
    assert store.tried == ["a", "b", "c", "e"]
    store.held.hold(receive("f", "T", group="audit"), 1000)
    store.tried.clear()
    store.held.retry(0, FOREVER_NS)
    assert store.tried == ["b", "c", "e", "f"], "another group's progress is another"


def test_pop_long_poll_different_filters_are_tried_separately(store: Store) -> None:
    for name, tag, sql in (("x", "red", ""), ("y", "blue", ""), ("z", "", "a > 1"), ("x2", "red", "")):
        wanting = receive(name, "T")
        wanting.options.tags, wanting.options.sql = [tag] if tag else [], sql
        store.held.hold(wanting, 1000)
    store.held.retry(0, FOREVER_NS)
    assert store.tried == ["a", "c", "e", "x", "y", "z"]


def test_pop_long_poll_step_is_time_limited_and_resumes(store: Store) -> None:
    """A costly filter must not delay the others: here each try costs a millisecond."""
    now_ns = store.clock.monotonic_ns()
    assert store.held.retry(0, now_ns + 1_500_000) == 0
    assert (store.tried, store.held.skipped, len(store.held)) == (["a", "c"], 2, 5)
    assert store.held.retry(0, FOREVER_NS) == 0
    assert (store.tried[2:], store.held.skipped) == (["d", "e", "c"], 0)


def test_pop_long_poll_ends_at_timeout_or_disconnect(store: Store) -> None:
    gone = receive("gone", "T")
    store.held.hold(gone, 2000)
    store.held.hold(receive("soon", "T"), 10)
    assert store.held.due_ns == 10
    gone.connection.closed = True
    assert store.held.retry(10, FOREVER_NS) == 2
    assert store.answers == ["soon: nothing"]
    assert store.held.due_ns == 1000
    store.held.release_all()
    assert [text[0] for text in store.answers[1:]] == list("abcde")
    assert (len(store.held), store.held.due_ns > 1 << 60) == (0, True)


def test_pop_long_poll_error_refuses_only_that_receive(store: Store) -> None:
    store.fails_with = BadRequestError("no")
    assert store.held.retry(0, FOREVER_NS) == 5
    store.held.hold(receive("g", "T"), 1000)
    store.fails_with = OSError(errno.EIO, "broken")
    assert store.held.retry(0, FOREVER_NS) == 1
    store.held.hold(receive("h", "T"), 1000)
    store.fails_with = RecursionError("deep")
    assert store.held.retry(0, FOREVER_NS) == 1
    assert store.answers == [*(f"{name}: no" for name in "abcde"), "g: [Errno 5] broken", "h: deep"]

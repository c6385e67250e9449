"""Topics deleted in a story, and which records must have their place in a queue since, or must not."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mqproc.client import requests as core
from mqproc.paths import StorePaths
from tests.crash.copies import is_copy, is_note, sent_of
from tests.crash.parties import Party
from tests.crash.placed import Placed
from tests.crash.schedule import Schedule
from tests.crash.senders import TOPICS, Fate, Senders, Sent
from tests.crash.tasks import Caller

PAUSES = (20, 400)


class Place(enum.Enum):
    """What a record is to its queue."""

    MUST = "it is there"
    MAY = "it may be there"
    MUST_NOT = "it went with its topic"


@dataclass(slots=True)
class Deletions:
    """What was deleted, over all lives of a store."""

    rng: random.Random
    senders: Senders
    others: Sequence[Party] = ()
    """Those who forget what is deleted."""
    topics: set[str] = field(default_factory=set)
    """Topics that somebody has asked to delete."""
    _asked: str = ""
    """The topic whose deletion has no answer yet."""
    _gone: set[int] = field(default_factory=set)
    _unsure: set[int] = field(default_factory=set)

    def run(self, paths: StorePaths, schedule: Schedule) -> None:
        """Somebody who deletes topics: a task of the schedule."""
        caller = Caller(paths.socket("writer"), schedule)
        try:
            while True:
                for _ in range(self.rng.randint(*PAUSES)):
                    schedule.pause()
                self._delete(caller, self.rng.choice(TOPICS))
        finally:
            self._end()
            caller.close()

    def _delete(self, caller: Caller, topic: str) -> None:
        stored = {sent.number for sent in self._of(topic) if sent.fate is Fate.STORED}
        self._asked = topic
        self.topics.add(topic)
        for other in self.others:
            other.forget(topic)
        error = caller.call(core.delete_topic(topic)).error
        self._end()
        if error is None:
            self._gone |= stored

    def _end(self) -> None:
        """Of what was sent before the answer came nobody knows on which side of the deletion it lies."""
        self._unsure.update(sent.number for sent in self._of(self._asked))
        self._asked = ""

    def _of(self, topic: str) -> list[Sent]:
        return [sent for sent in self.senders.sent if sent.topic == topic]

    def place(self, placed: Placed) -> Place:
        """What a record must be."""
        topic = placed.message.topic
        if topic not in self.topics or is_note(placed):
            return Place.MUST
        number = sent_of(placed, self.senders).number
        if is_copy(placed):
            return Place.MAY
        if number in self._gone:
            return Place.MUST_NOT
        return Place.MAY if topic == self._asked or number in self._unsure else Place.MUST

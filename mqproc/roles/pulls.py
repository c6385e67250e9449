"""Pulls: answered at once, or held until their queue has something for them.

pull ──▶ records, or a status                     ──▶ answer
     └─▶ nothing yet: held ──dispatcher's bell──▶ the lone record that has come ──▶ answer
                                              └─▶ all else: pulled again        ──▶ answer, or held further on
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from mqproc.layout import control as words_of
from mqproc.roles.groups import Asked
from mqproc.roles.held_pulls import (
    GO_ON,
    HeldPull,
    HeldPulls,
    chosen_by_tags,
    finds_nothing_yet,
    has_no_queue,
    has_passed,
)
from mqproc.roles.loop import RoleContext
from mqproc.roles.request_times import RequestTimes
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.lone_record import LoneRecords
from mqproc.store.reads.pull import Pulled
from mqproc.store.reads.read_ahead import ReadAhead
from mqproc.store.reads.reading import StoreReading
from mqproc.store.reads.unit_walk import Counts
from mqproc.wire.connection import Connection
from mqproc.wire.operations import Operation, PullAnswer, PullRequest

HOLD_MS_MAX: Final = 60_000


class Pulls:
    """The pulls of one store. `guarded` calls a function for a request, which is refused if that fails."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreReading,
        table: QueueTable,
        times: RequestTimes,
        guarded: Callable[..., None],
    ) -> None:
        self._words = context.control.words
        self._cells = self._words.cells
        self._clock = context.clock
        self._reading = reading
        self._times = times
        self._guarded = guarded
        self._counts = Counts(context.control.cells, table.cells)
        self._lone = LoneRecords(table, reading.files, reading.records, self._counts)
        self._read_ahead = ReadAhead(context.io, reading.files, reading.segments)
        self.held = HeldPulls(table, context.options.max_queues)
        self._dispatched = -1

    def take(self, request: Asked) -> None:
        """Answer a pull, or hold it."""
        options: PullRequest = request.options
        bounds = self._reading.queues.bounds(options.topic, options.queue_id)
        if bounds is not None:
            self._read_ahead.before_pull(options.topic, options.queue_id, bounds, options.offset)
        pulled = self._pull_from(options, options.offset)
        tells = options.progress_ms == 0 and has_passed(pulled, options)
        may_wait = options.timeout_ms > 0 and not tells and finds_nothing_yet(pulled, options.offset)
        if not may_wait or self.held.is_full:
            request.answered = True
            self._answer(request.connection, request.request_id, pulled)
            return
        offset = pulled.next_offset if pulled.status in GO_ON else options.offset
        now_ns = self._clock.monotonic_ns()
        deadline_ns = now_ns + min(options.timeout_ms, HOLD_MS_MAX) * 1_000_000
        pull = HeldPull(request.connection, request.request_id, options, offset, deadline_ns, pulled)
        pull.chosen = chosen_by_tags(options)
        if options.progress_ms >= 0:
            pull.progress_ns = now_ns + options.progress_ms * 1_000_000
        self.held.hold(pull)
        self._go_on(pull)
        # What came since the pull looked has rung already: look at held queues in this very step.
        self._dispatched = -1

    def look(self, end_ns: int) -> int:
        """Answer held pulls whose queue has something for them, or whose time is over; how many were looked at."""
        held = self.held
        if not held.count:
            return 0
        done = 0
        dispatched = self._cells[words_of.DISPATCHED]
        if dispatched != self._dispatched or held.queues_changed:
            self._dispatched = dispatched
            moved = held.moved()
            if len(moved) == 1 and not held.due:
                self._guarded(moved[0], self._try_again, moved[0])
                done = 1
            else:
                for pull in moved:
                    held.set_due(pull)
        if held.due and not done:
            done = self._try_due(end_ns)
        for pull in held.expired(self._clock.monotonic_ns()):
            self._let_go(pull)
            done += 1
        return done

    def let_go(self) -> None:
        """Answer all that are held with what they have."""
        for pull in self.held.all():
            self._let_go(pull)

    def _try_due(self, end_ns: int) -> int:
        """Try held pulls again in turn, as far as the time goes: one with a costly filter keeps nobody waiting."""
        done = 0
        for _ in range(len(self.held.due)):
            if done and self._clock.monotonic_ns() >= end_ns:
                break
            pull = self.held.take_due()
            if pull is None:
                break
            self._guarded(pull, self._try_again, pull)
            done += 1
        return done

    def _try_again(self, pull: HeldPull) -> None:
        """Look at what a held pull's queue has now; answer it, or hold it further on."""
        options = pull.options
        try:
            lone = None
            if pull.chosen is not None:
                lone = self._lone.pull(options.topic, options.queue_id, pull.offset, pull.chosen)
            if lone is not None:
                pull.last = lone
                self._found(pull)
                return
            first = self._reading.first_candidate(
                options.topic, options.queue_id, pull.offset, options.tags, options.sql
            )
            pulled = self._pull_from(options, first)
        except BaseException:
            self.held.release(pull)
            raise
        is_deleted = has_no_queue(pulled) and not has_no_queue(pull.last)
        pull.last, pull.offset = pulled, first
        if is_deleted or not finds_nothing_yet(pulled, first):
            self._found(pull)
        else:
            if pulled.status in GO_ON:
                pull.offset = pulled.next_offset
            self._go_on(pull)

    def _go_on(self, pull: HeldPull) -> None:
        """Have a pull tried again soon when more units wait than one pull looks at; what it has passed is told."""
        if has_passed(pull.last, pull.options):
            self.held.hasten(pull)
        if pull.last.status in GO_ON and pull.offset < pull.last.max_offset:
            self.held.set_due(pull)

    def _found(self, pull: HeldPull) -> None:
        """Answer what a held pull has found; behind the last one have its client run, which often is to be here."""
        try:
            self._answer(pull.connection, pull.request_id, pull.last)
            if not self.held.due:
                # What is left of the step can wait.
                os.sched_yield()
        finally:
            # Who could not be answered is refused, and would be answered again.
            self._forget(pull)

    def _let_go(self, pull: HeldPull) -> None:
        """Answer what a held pull has found the last time: nothing."""
        self._answer(pull.connection, pull.request_id, pull.last)
        self._forget(pull)

    def _forget(self, pull: HeldPull) -> None:
        self.held.release(pull)
        self._times.held_pulls += 1

    def _pull_from(self, options: PullRequest, offset: int) -> Pulled:
        return self._reading.pull(
            options.topic,
            options.queue_id,
            offset,
            options.max_messages,
            options.max_bytes,
            options.tags,
            sql=options.sql,
            rocketmq_limits=options.rocketmq_limits,
            counts=self._counts,
        )

    def _answer(self, connection: Connection, request_id: int, pulled: Pulled) -> None:
        if not pulled.count:
            # The others were counted when their records were gathered.
            self._words.add(words_of.PULLS, 1)
            self._words.add(words_of.EMPTY_PULLS, 1)
            self._words.add(words_of.QUERY_REQUESTS, 1)
        answer = PullAnswer(
            pulled.status,
            pulled.next_offset,
            pulled.min_offset,
            pulled.max_offset,
            pulled.count,
            pulled.detail,
        )
        payload = (pulled.records.data,) if pulled.count else ()
        connection.answer(request_id, Operation.PULL, answer, payload, owned=True)

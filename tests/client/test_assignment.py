"""Cursors of a consumer: answers without messages, and queues that it has lost."""

from __future__ import annotations

from mqproc.client.assignment import HANDED_MIN, PROGRESS_S, Assignment, Cursor, Piece
from mqproc.wire.operations import GroupAssignment


def fetched(cursor: Cursor[list[int]], first: int, end: int, *, moved: bool = False) -> None:
    cursor.fetched(Piece(list(range(first, end)), end), moved, 5.0)


def empty(cursor: Cursor[list[int]], end: int, *, moved: bool = False) -> None:
    cursor.fetched(Piece([], end), moved, 5.0)


def test_pull_without_match_reports_progress_at_intervals() -> None:
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    assert cursor.progress_s(5.0) == 0.0
    fetched(cursor, 10, 12)
    assert cursor.progress_s(5.0) == 0.0
    empty(cursor, 20)
    assert (cursor.next_offset, cursor.progress_s(5.25)) == (20, PROGRESS_S - 0.25)
    assert cursor.progress_s(7.0) == 0.0


def test_answers_without_messages_take_no_places() -> None:
    """Later messages are fetched and handed out while an earlier one is unacknowledged."""
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    cursor.hand_out([10, 11], 12)
    for end in (20, 30, 40):
        empty(cursor, end)
    assert len(cursor.pieces) == 1
    cursor.skip_empty()
    assert (len(cursor.pieces), cursor.done, cursor.position) == (0, 40, 10)
    fetched(cursor, 40, 42)
    empty(cursor, 50)
    assert [(piece.messages, piece.end) for piece in cursor.pieces] == [([40, 41], 50)]
    cursor.skip_empty()
    assert (len(cursor.pieces), cursor.done) == (1, 40)


def test_done_messages_after_an_open_one_take_no_room() -> None:
    """One message may stay unacknowledged for days while millions pass."""
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 0)
    cursor.hand_out([0, 1], 2)
    for offset in range(2, 4 * HANDED_MIN):
        cursor.hand_out([offset], offset + 1)
        cursor.ack(offset)
        assert len(cursor._handed) <= HANDED_MIN + 8
    assert cursor.position == 0
    cursor.ack(0)
    assert cursor.position == 1
    cursor.ack(1)
    assert cursor.position == 4 * HANDED_MIN


def test_a_loop_moves_the_position_by_itself() -> None:
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    cursor.in_loop = True
    empty(cursor, 20)
    cursor.skip_empty()
    assert cursor.position == 10
    fetched(cursor, 20, 22)
    assert [(piece.messages, piece.end) for piece in cursor.pieces] == [([20, 21], 22)]
    empty(cursor, 30)
    cursor.in_loop = False
    cursor.skip_empty()
    assert (cursor.position, cursor.pieces[0].end) == (10, 30)


def test_a_queue_that_ends_earlier_now_is_gone_on_from_there() -> None:
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    fetched(cursor, 10, 12)
    empty(cursor, 5, moved=True)
    assert (cursor.next_offset, cursor.position) == (5, 5)
    assert [piece.end for piece in cursor.pieces] == [12, 5]
    cursor.hand_out(cursor.pieces.popleft().messages, 12)
    cursor.skip_empty()
    assert (cursor.position, len(cursor.pieces)) == (10, 1), "those in hands are done first"


QUEUE = "Orders", 0


def assigned(assignment: Assignment[list[int]], generation: int, *queues: tuple[str, int, int, int]) -> None:
    assignment.apply(GroupAssignment("one", generation, True, list(queues)))


def test_messages_of_before_a_reset_hold_no_queue_back() -> None:
    """Messages of lost queues cannot be acknowledged; other queues are still released."""
    assignment: Assignment[list[int]] = Assignment()
    assigned(assignment, 1, ("Orders", 0, 1, 10), ("Orders", 1, 2, 10))
    assert assignment.to_release() is not None
    assignment.cursors[QUEUE].hand_out([10, 11], 12)
    assignment.cursors["Orders", 1].hand_out([10], 11)
    assigned(assignment, 2, ("Orders", 0, 3, 0))
    assert assignment.to_release() is None, "queue 1 is in hands"
    assert assignment.ack([(("Orders", 1), 10)])
    found = assignment.to_release()
    assert found is not None
    generation, left = found
    assert (generation, [(each.queue_id, each.position, each.lost) for each in left]) == (
        2,
        [(0, 10, True), (1, 11, False)],
    )


def test_returned_queue_does_not_wait_for_earlier_messages() -> None:
    """The queue was lost and returned; messages of both assignments are unacknowledged."""
    assignment: Assignment[list[int]] = Assignment()
    assigned(assignment, 1, (*QUEUE, 1, 10))
    old = assignment.cursors[QUEUE]
    old.hand_out([10, 11], 12)
    assigned(assignment, 2)
    assigned(assignment, 3, (*QUEUE, 2, 20))
    new = assignment.cursors[QUEUE]
    new.hand_out([20], 21)
    assert old.lost, "the queue was taken from it in the end"
    assert assignment.to_release() is not None, "so nothing waits for its messages"
    assert not assignment.ack([(QUEUE, 11)])
    assert (old.in_progress, new.in_progress) == (True, True)
    assert not assignment.ack([(QUEUE, 20)])
    assert new.position == 21
    assert not assignment.ack([(QUEUE, 20)])


def test_a_message_is_acknowledged_in_a_queue_that_is_to_be_given_back() -> None:
    assignment: Assignment[list[int]] = Assignment()
    assigned(assignment, 1, (*QUEUE, 1, 10))
    assert assignment.to_release() is not None
    old = assignment.cursors[QUEUE]
    old.hand_out([10, 11], 12)
    assigned(assignment, 2)
    assert assignment.ack([(QUEUE, 10)])
    assert assignment.to_release() is None, "11 is in hands"
    assert assignment.ack([(QUEUE, 11)])
    found = assignment.to_release()
    assert found is not None
    assert [(each.position, each.lost) for each in found[1]] == [(12, False)]
    assert not assignment.ack([(QUEUE, 11)])


def test_queue_reset_many_times_has_one_turn() -> None:
    assignment: Assignment[list[int]] = Assignment()
    for epoch in range(1, 5):
        assigned(assignment, epoch, ("Orders", 0, epoch, 0), ("Orders", 1, 9, 0))
    for queue_id, cursor in enumerate(assignment.cursors.values()):
        fetched(cursor, 0, 4 + queue_id)
    given = [assignment.next_ready(exclusive=False) for _ in range(4)]
    assert [cursor.queue_id for cursor in given if cursor is not None] in ([0, 1, 0, 1], [1, 0, 1, 0])

"""What a consumer keeps of a queue when answers come that have no messages."""

from __future__ import annotations

from mqproc.client.assignment import PROGRESS_S, Cursor, Piece


def fetched(cursor: Cursor[list[int]], first: int, end: int, *, moved: bool = False) -> None:
    cursor.fetched(Piece(list(range(first, end)), end), moved, 5.0)


def empty(cursor: Cursor[list[int]], end: int, *, moved: bool = False) -> None:
    cursor.fetched(Piece([], end), moved, 5.0)


def test_a_pull_tells_at_once_and_then_once_a_while() -> None:
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    assert cursor.progress_s(5.0) == 0.0
    fetched(cursor, 10, 12)
    assert cursor.progress_s(5.0) == 0.0
    empty(cursor, 20)
    assert (cursor.next_offset, cursor.progress_s(5.25)) == (20, PROGRESS_S - 0.25)
    assert cursor.progress_s(7.0) == 0.0


def test_answers_without_messages_take_no_places() -> None:
    """However many come while a message is in somebody's hands: the next ones are fetched, and can be handed out."""
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    cursor.hand_out([10, 11], 12)
    for end in (20, 30, 40):
        empty(cursor, end)
    assert len(cursor.pieces) == 1
    cursor.take_empty()
    assert (len(cursor.pieces), cursor.done, cursor.position) == (0, 40, 10)
    fetched(cursor, 40, 42)
    empty(cursor, 50)
    assert [(piece.messages, piece.end) for piece in cursor.pieces] == [([40, 41], 50)]
    cursor.take_empty()
    assert (len(cursor.pieces), cursor.done) == (1, 40)


def test_a_loop_moves_the_position_by_itself() -> None:
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    cursor.in_loop = True
    empty(cursor, 20)
    cursor.take_empty()
    assert cursor.position == 10
    fetched(cursor, 20, 22)
    assert [(piece.messages, piece.end) for piece in cursor.pieces] == [([20, 21], 22)]
    empty(cursor, 30)
    cursor.in_loop = False
    cursor.take_empty()
    assert (cursor.position, cursor.pieces[0].end) == (10, 30)


def test_a_queue_that_ends_earlier_now_is_gone_on_from_there() -> None:
    cursor: Cursor[list[int]] = Cursor("Orders", 0, 1, 10)
    fetched(cursor, 10, 12)
    empty(cursor, 5, moved=True)
    assert (cursor.next_offset, cursor.position) == (5, 5)
    assert [piece.end for piece in cursor.pieces] == [12, 5]
    cursor.hand_out(cursor.pieces.popleft().messages, 12)
    cursor.take_empty()
    assert (cursor.position, len(cursor.pieces)) == (10, 1), "those in hands are done first"

"""What a replay of one client does with large messages, with full ones, and with answers that are lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqproc.client.replay import frames_of
from mqproc.client.sync import Client
from tests.conftest import Group


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with group.client() as client:
        yield client


def test_frames_have_so_many_messages_and_bytes() -> None:
    frames = frames_of([1, 1, 1, 1 << 20, 1, 2 << 20, (1 << 20) - 1, 1, 1], 2, int)
    assert list(frames) == [[1, 1], [1], [1 << 20], [1], [2 << 20], [(1 << 20) - 1, 1], [1]]
    assert list(frames_of([], 2, int)) == []


def test_messages_that_no_frame_holds_together_are_sent_in_several(client: Client) -> None:
    """Of one queue with 67 MB in its next thousand messages none was ever sent."""
    client.create_topic("large", 1)
    for number in range(280):
        client.send("large", b"%03d" % number + bytes(250_000))
    client.wait_dispatched()
    assert client.replay("large", "large-again", name="again").sent == 280
    client.wait_dispatched()
    assert [bytes(message.body[:3]) for message in client.range("large-again")] == [b"%03d" % n for n in range(280)]
    assert client.replay("large", "large-again", name="again").found == 280

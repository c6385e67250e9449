"""How requests about consumer groups are cut."""

from __future__ import annotations

import pytest

from mqproc.client import group_requests as group_calls
from mqproc.layout.record_codec import decode_records
from tests.support.records import small_log


@pytest.mark.parametrize("room", [0, 500, 1 << 20])
def test_copied_at_once_is_limited_by_count_and_bytes(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    log = small_log()
    messages = decode_records(log.segment[: log.end])
    monkeypatch.setattr(group_calls, "COPIED_BYTES_MAX", room)
    found, left = [], messages
    while left:
        asked, left = group_calls.copied_at_once(left, 9)
        found += asked
        assert len(asked) == 1 or sum(message.size for message in asked) <= room
        # As many as there is room for.
        assert not left or len(asked) == 9 or sum(message.size for message in [*asked, left[0]]) > room
    assert found == messages

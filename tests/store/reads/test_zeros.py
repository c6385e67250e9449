"""Zeros in a record, as those that stand for a page which cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.errors import CorruptStoreError
from mqproc.types import PullStatus
from tests.store.stopped_store import StoppedStore


@pytest.mark.parametrize("lost", [17, 24], ids=["the CRC", "the CRC and more"])
def test_zeros_from_amid_the_properties_on_are_damage(lost: int, tmp_path: Path) -> None:
    """With the CRC of the whole record they took the only one that covers these, and the message was served without."""
    store = StoppedStore(tmp_path / "store")
    at, following = store.offsets[20:22]
    with StoreReader(store.root) as reader:
        message = reader.look(at)
    assert message is not None
    store.overwrite(following - lost, bytes(lost))
    with StoreReader(store.root) as reader:
        with pytest.raises(CorruptStoreError, match="bad property CRC"):
            reader.look(at)
        pulled = reader.pull(message.topic, message.queue_id, message.queue_offset, 1)
        assert pulled.status is PullStatus.CORRUPT

"""RocketMQ's checkpoint file, whose words have several owners."""

from __future__ import annotations

from pathlib import Path

from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint as layout
from mqproc.layout.checkpoint import Checkpoint
from mqproc.store.durable_marks import ensure_checkpoint, read_checkpoint, store_checkpoint


def test_checkpoint_words_of_several_owners_are_read_back(tmp_path: Path) -> None:
    """Two owners store the physic and the logics time at RocketMQ's offsets."""
    path, io = tmp_path / "checkpoint", StoreIO()
    ensure_checkpoint(io, path)
    store_checkpoint(io, path, {layout.PHYSIC_TIMESTAMP: 0xAABB}, io)
    store_checkpoint(io, path, {layout.LOGICS_TIMESTAMP: 0xCCDD}, io)
    assert path.read_bytes() == bytes.fromhex("000000000000aabb 000000000000ccdd").ljust(4096, b"\0")
    assert read_checkpoint(StoreIO(), path) == Checkpoint(physic_timestamp_ms=0xAABB, logics_timestamp_ms=0xCCDD)
    ensure_checkpoint(io, path)
    assert read_checkpoint(io, path).physic_timestamp_ms == 0xAABB


def test_checkpoint_missing_or_short_file_reads_as_zeros(tmp_path: Path) -> None:
    path, io = tmp_path / "checkpoint", StoreIO()
    assert read_checkpoint(io, path) == Checkpoint()
    path.write_bytes(bytes.fromhex("000000000000aabb"))
    ensure_checkpoint(io, path)
    assert path.stat().st_size == layout.FILE_SIZE
    assert read_checkpoint(io, path) == Checkpoint(physic_timestamp_ms=0xAABB)

"""Opening the golden stores: a copy of the files, the manifest of what was put, RocketMQ's own answers."""

from __future__ import annotations

import gzip
import ipaddress
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Fixture:
    """One golden store. `store` is a private copy, free to be changed."""

    name: str
    store: Path
    expected: dict[str, Any]
    manifest: list[dict[str, Any]]

    def segment_starts(self, segment_size: int, end: int) -> range:
        return range(0, end, segment_size)

    def body_at(self, physical_offset: int) -> bytes:
        """A record's body, read from the store's log by RocketMQ's layout."""
        size = int(self.expected["config"]["mappedFileSizeCommitLog"])
        start = physical_offset - physical_offset % size
        data = (self.store / "commitlog" / f"{start:020d}").read_bytes()[physical_offset - start :]
        sys_flag = int.from_bytes(data[36:40], "big")
        at = 84 + (12 if sys_flag & 0x10 else 0) + (12 if sys_flag & 0x20 else 0)
        length = int.from_bytes(data[at : at + 4], "big")
        return data[at + 4 : at + 4 + length]


def load_fixture(name: str, folder: Path, golden: Path = GOLDEN) -> Fixture:
    """Unpack a fixture below `folder` and read what RocketMQ said of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(golden / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    expected = json.loads(gzip.decompress((golden / f"{name}.expected.json.gz").read_bytes()))
    manifest_file = golden / f"{name}.manifest.jsonl.gz"
    lines = gzip.decompress(manifest_file.read_bytes()).splitlines() if manifest_file.exists() else []
    return Fixture(name, folder / "store", expected, [json.loads(line) for line in lines if line.strip()])


def host_bytes(text: str) -> bytes:
    """A host as a record has it: 4 or 16 address bytes, then the port as i32."""
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]/")).packed + int(port).to_bytes(4, "big")

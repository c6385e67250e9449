"""Golden stores: private copies, the manifests of their puts, RocketMQ's answers.

A folder of fixtures contains for each NAME

NAME.expected.json.gz     settings, and RocketMQ's description of the store
NAME.tar.gz               its directories: store/; or before/ and after/ of a kill; one of them has clean/ too
NAME.manifest.jsonl.gz    the puts

A damaged store has no tarball: its expected file lists the changes to a directory of the one with clean/. A subfolder
has the stores of another release of RocketMQ.
"""

from __future__ import annotations

import base64
import functools
import gzip
import ipaddress
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqproc.config.options import Options, rocketmq_name

GOLDEN = Path(__file__).parent
FOLDER_VARIABLE = "MQPROC_FIXTURES"
KEPT: dict[str, Any] = {"metrics_port": 0, "file_reserved_time": 1 << 20}
"""Options of groups on these stores, which are older than files are kept: tests may run at the hour of deletion."""
_EXPECTED = ".expected.json.gz"
_ARCHIVE = ".tar.gz"
_SIZES = (
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
    "max_message_size",
)


class FixturesError(Exception):
    """The folder is not a folder of fixtures."""


@dataclass(frozen=True, slots=True)
class Fixture:
    """One golden store. `store` is a private copy that may be modified."""

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


@dataclass(frozen=True, slots=True)
class Directory:
    """One store: `name` is its fixture's, `directory` its folder in `archive`'s tarball."""

    golden: Path
    name: str
    archive: str
    directory: str

    def __str__(self) -> str:
        release = f"{self.golden.name}/" if self.golden.parent == GOLDEN else ""
        return f"{release}{self.name}/{self.directory}"

    @property
    def expected(self) -> dict[str, Any]:
        """RocketMQ's description of the store."""
        return read_expected(self.name, self.golden)

    @property
    def undamaged(self) -> dict[str, Any]:
        """RocketMQ's description of the store before the damage."""
        return read_expected(self.archive, self.golden)

    @property
    def damaged(self) -> bool:
        return self.name != self.archive

    @property
    def closed(self) -> bool:
        """True if RocketMQ closed it cleanly."""
        return self.directory != "before"

    def unpack(self, folder: Path) -> Path:
        """A private copy below `folder`, damaged as its fixture specifies."""
        store = self.unpack_undamaged(folder)
        if self.damaged:
            for change in self.expected["changes"]:
                _change(store, change)
        return store

    def unpack_undamaged(self, folder: Path) -> Path:
        with tarfile.open(self.golden / f"{self.archive}{_ARCHIVE}") as archive:
            inside = [each for each in archive if each.name.split("/")[0] == self.directory]
            unpack(archive, folder, inside)
        return folder / self.directory


def fixtures_folder() -> Path:
    """The folder in MQPROC_FIXTURES, else the golden one."""
    return Path(os.environ.get(FOLDER_VARIABLE) or GOLDEN).absolute()


def all_directories(golden: Path) -> tuple[Directory, ...]:
    """The stores of a folder and of its subfolders, one for each further release of RocketMQ."""
    folders = sorted({path.parent for path in golden.glob(f"*/*{_EXPECTED}")})
    return tuple(each for folder in (golden, *folders) for each in directories(folder))


@functools.cache
def directories(golden: Path) -> tuple[Directory, ...]:
    """The stores of a folder. Raises FixturesError if it has no stores or if a part is missing.

    Cached: a dozen test files list the golden folder at collection.
    """
    names = sorted(path.name.removesuffix(_EXPECTED) for path in golden.glob(f"*{_EXPECTED}"))
    if not names:
        said = f"{FOLDER_VARIABLE}={golden}" if FOLDER_VARIABLE in os.environ else str(golden)
        raise FixturesError(f"{said}: no fixtures there; expected files NAME{_EXPECTED} with NAME{_ARCHIVE}")
    held = {name: _held(golden / f"{name}{_ARCHIVE}") for name in names if (golden / f"{name}{_ARCHIVE}").exists()}
    return tuple(each for name in names for each in _directories_of(golden, name, held))


def _directories_of(golden: Path, name: str, held: dict[str, list[str]]) -> list[Directory]:
    if name in held:
        return [Directory(golden, name, name, directory) for directory in held[name]]
    expected = read_expected(name, golden)
    base = expected.get("base")
    if base is None:
        raise FixturesError(f"{golden / name}{_ARCHIVE}: missing, and {name}{_EXPECTED} names no base to be made from")
    archives = [archive for archive, inside in held.items() if {"clean", base} <= set(inside)]
    if len(archives) != 1:
        raise FixturesError(f"{golden}: {name} needs one tarball with {base}/ and clean/; found {archives}")
    return [Directory(golden, name, archives[0], base)]


def _held(path: Path) -> list[str]:
    """The directories in a tarball."""
    with tarfile.open(path) as archive:
        return sorted({name.split("/")[0] for name in archive.getnames()})


def _change(store: Path, change: dict[str, Any]) -> None:
    """Apply one change of a damage. A queue or index folder that becomes empty is removed."""
    path = store / change["path"]
    operation = change["op"]
    if operation == "remove":
        path.unlink()
        for folder in path.relative_to(store).parents[:-2]:
            if not any((store / folder).iterdir()):
                (store / folder).rmdir()
    elif operation == "length":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, change["length"])
    elif operation == "write":
        with path.open("r+b") as file:
            file.seek(change["offset"])
            file.write(base64.b64decode(change["base64"]))
    else:
        raise FixturesError(f"{change['path']}: unknown change {operation!r}")


@functools.lru_cache(4)
def read_expected(name: str, golden: Path = GOLDEN) -> dict[str, Any]:
    """RocketMQ's description of a fixture."""
    expected: dict[str, Any] = json.loads(gzip.decompress((golden / f"{name}{_EXPECTED}").read_bytes()))
    return expected


def options_of(expected: dict[str, Any]) -> Options:
    """Sizes and delay levels of a fixture."""
    config = expected["config"]
    found: dict[str, Any] = {name: int(config[said]) for name in _SIZES if (said := rocketmq_name(name)) in config}
    if "messageDelayLevel" in config:
        found["message_delay_level"] = config["messageDelayLevel"]
    return Options(**found)


def unpack(archive: tarfile.TarFile, folder: Path, members: list[tarfile.TarInfo] | None = None) -> None:
    """Extract regular files and folders; Python before 3.11.4 has no filters."""
    if data_filter := getattr(tarfile, "data_filter", None):
        archive.extraction_filter = data_filter
    archive.extractall(folder, members)


def load_store(name: str, folder: Path, golden: Path = GOLDEN) -> Path:
    """Unpack a tarball below `folder`; return its directory `store`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(golden / f"{name}{_ARCHIVE}") as archive:
        unpack(archive, folder)
    return folder / "store"


def load_fixture(name: str, folder: Path, golden: Path = GOLDEN) -> Fixture:
    """Unpack a fixture below `folder` and read RocketMQ's description of it."""
    store = load_store(name, folder, golden)
    manifest_file = golden / f"{name}.manifest.jsonl.gz"
    lines = gzip.decompress(manifest_file.read_bytes()).splitlines() if manifest_file.exists() else []
    manifest = [json.loads(line) for line in lines if line.strip()]
    return Fixture(name, store, read_expected(name, golden), manifest)


def host_bytes(text: str) -> bytes:
    """A host as encoded in a record: 4 or 16 address bytes, then the port as i32."""
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]/")).packed + int(port).to_bytes(4, "big")

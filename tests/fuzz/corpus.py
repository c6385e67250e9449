"""Inputs that have found bugs, by what is wrong with them: seeds say something else as soon as a fuzzer changes.

Each is looked at by the fuzzer of its kind, as any damaged input is.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mqproc.layout import control, record
from tests.fuzz.files import Files, Harm
from tests.fuzz.json_files import JsonFiles
from tests.fuzz.kinds import Fuzzer
from tests.fuzz.records import KINDS, LOGS, Records
from tests.fuzz.shared_files import TOOLS, SharedFiles

Case = Callable[[Fuzzer], None]


def _folder(path: Path) -> None:
    """A folder in a file's place."""
    path.unlink()
    path.mkdir()


def _last_record(path: Path) -> None:
    """A file that ends in the last record of its queue."""
    os.truncate(path, path.read_bytes().index(b"large" * 2000) + 1000)


def _files(*harms: Harm, vouched: bool = True) -> Case:
    def replay(fuzzer: Fuzzer) -> None:
        assert isinstance(fuzzer, Files)
        for clean in (True, False):
            fuzzer.replay(harms, vouched=vouched, clean=clean)

    return replay


def _json(data: bytes) -> Case:
    def replay(fuzzer: Fuzzer) -> None:
        assert isinstance(fuzzer, JsonFiles)
        fuzzer.look(data)

    return replay


def _record(kind: int, place: int, data: bytes) -> Case:
    """The record of a kind with other bytes at a place."""
    assert not KINDS[kind].get("append_crc"), "its own CRC would tell"

    def replay(fuzzer: Fuzzer) -> None:
        assert isinstance(fuzzer, Records)
        log = LOGS[kind]
        at = log.start + place
        damaged = log.data[:at] + data + log.data[at + len(data) :]
        fuzzer.look(log, damaged)
        fuzzer.look_in_a_store(log, damaged)

    return replay


def _control(harm: Callable[[Path], object]) -> Case:
    """What lies in the place of the control file, for each tool and a start."""

    def replay(fuzzer: Fuzzer) -> None:
        assert isinstance(fuzzer, SharedFiles)
        for tool in TOOLS:
            fuzzer.lay(fuzzer.paths.control, harm)
            fuzzer.look(tool)

    return replay


def _words(value: int) -> Case:
    """A control file that is one by its head, and whose other words all say the same."""
    words = [value] * (control.FILE_SIZE // control.WORD_SIZE)
    words[control.HEADER_MAGIC], words[control.HEADER_VERSION] = control.MAGIC, control.VERSION
    return _control(lambda path: path.write_bytes(struct.pack(f"={len(words)}q", *words)))


_STORE_TIME: Final = record.BORN_HOST + record.HOST_V4_SIZE
CORPUS: Final[dict[str, dict[str, Case]]] = {
    "files": {
        "a folder for a ConsumeQueue file": _files(("consumequeue/topic-0/*/0*", _folder)),
        "a folder for a ConsumeQueue file that nothing vouches for": _files(
            ("consumequeue/topic-0/*/0*", _folder), vouched=False
        ),
        "a folder for a mark of the log": _files(("mqproc/marks/commitlog", _folder)),
        "a folder for a mark of the queues": _files(("mqproc/marks/consumequeue", _folder)),
        "a folder for a mark of the index": _files(("mqproc/marks/index", _folder)),
        "a folder for the queue table": _files(("mqproc/queues", _folder)),
        "a folder for the settings": _files(("mqproc/settings.json", _folder)),
        "a folder for progress": _files(("mqproc/progress", _folder)),
        "a folder for groups' offsets": _files(("config/consumerOffset.json", _folder)),
        "a folder for delays' offsets": _files(("config/delayOffset.json", _folder)),
        "a folder for the topics": _files(("config/topics.json", _folder)),
        "a segment that ends in a queue's last record": _files((f"commitlog/{0:020d}", _last_record)),
        "no files of ours": _files(("mqproc", shutil.rmtree)),
    },
    "json": {
        "lists too deep": _json(b"[" * 100_000),
        "objects too deep": _json(b'{"a":' * 100_000),
    },
    "shared": {
        "words that say nothing": _words(1 << 62),
        "words below 0": _words(-1),
        "words below all numbers of C": _words(-(1 << 63)),
        "a folder for the control file": _control(Path.mkdir),
    },
    "records": {
        "a store time behind all calendars": _record(1, _STORE_TIME, (1 << 62).to_bytes(8, "big")),
        "a store time before them": _record(1, _STORE_TIME, (-(1 << 62)).to_bytes(8, "big", signed=True)),
    },
}

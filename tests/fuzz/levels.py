"""The table of targets, the corpus, and seeds in shards run by worker processes."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import pytest

from mqproc.layout import control, record
from tests.fuzz.targets import LOG_KINDS, LOGS, TOOLS, Files, Frames, Harm, JsonFiles, Records, SharedFiles
from tests.support.processes import worker_pool

# Fuzz targets by name.


class Fuzzer(Protocol):
    """A target, with a folder for its files."""

    def run(self, seed: int) -> None:
        """Run a seed. Raises on a violation."""
        ...

    def close(self) -> str:
        """Run final checks; a summary of random coverage."""
        ...


KINDS: Final[dict[str, Callable[[Path], Fuzzer]]] = {
    "files": Files,
    "frames": Frames,
    "json": JsonFiles,
    "records": Records,
    "shared": SharedFiles,
}


SHARDS_PER_WORKER: Final = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """Seeds of a target that share one fuzzer."""

    kind: str
    first: int
    stop: int

    def __str__(self) -> str:
        return f"{self.kind} {self.first}:{self.stop}"


def _shards(kind: str, seeds: range, size: int) -> Iterator[Shard]:
    for first in range(seeds.start, seeds.stop, size):
        yield Shard(kind, first, min(first + size, seeds.stop))


LEVELS: Final[dict[str, list[Shard]]] = {
    "ci": [
        # Longest first, so that no worker waits long for another at the end.
        *_shards("files", range(1_000), 500),
        *_shards("frames", range(100_000), 50_000),
        *_shards("records", range(20_000), 10_000),
        *_shards("json", range(20_000), 10_000),
        *_shards("shared", range(1_000), 500),
    ],
    "nightly": [
        *_shards("frames", range(1_000_000, 2_000_000), 50_000),
        *_shards("files", range(1_000_000, 1_100_000), 500),
        *_shards("json", range(1_000_000, 2_000_000), 50_000),
        *_shards("records", range(1_000_000, 2_000_000), 50_000),
        *_shards("shared", range(1_000_000, 1_100_000), 5_000),
    ],
}


def run_level(shards: list[Shard], folder: Path | None, workers: int, progress: Path | None) -> int:
    """Run the shards that `progress` lacks, and report each at its end; how many failed."""
    done: list[str] = json.loads(progress.read_text()) if progress and progress.exists() else []
    begin, failed = time.monotonic(), 0
    with worker_pool(workers, SHARDS_PER_WORKER) as pool:
        running = [pool.submit(_run, shard, folder) for shard in shards if str(shard) not in done]
        for future in as_completed(running):
            shard, failure, reached = future.result()
            ended = "failed" if failure else f"done, {reached}" if reached else "done"
            print(f"{failure}{shard}: {ended}, {time.monotonic() - begin:,.0f} s", flush=True)
            failed += bool(failure)
            if progress and not failure:
                done.append(str(shard))
                temporary = progress.with_name(progress.name + ".tmp")
                temporary.write_text(json.dumps(done))
                temporary.replace(progress)
    return failed


def run_shard(shard: Shard, folder: Path | None) -> str:
    """Run every seed in order; the coverage. A failure notes the command that repeats it."""
    with tempfile.TemporaryDirectory(prefix="mqproc-fuzz-", dir=folder) as place:
        fuzzer = KINDS[shard.kind](Path(place))
        seed = shard.first
        try:
            for seed in range(shard.first, shard.stop):
                fuzzer.run(seed)
            return fuzzer.close()
        except BaseException as error:
            error.add_note(f"repeat: python -m tests.fuzz {shard.kind} {seed}, or with those before it: {shard}")
            raise


def _run(shard: Shard, folder: Path | None) -> tuple[Shard, str, str]:
    try:
        reached = run_shard(shard, folder)
    except (Exception, pytest.fail.Exception) as error:
        return shard, "".join(traceback.format_exception(error)), ""
    return shard, "", reached


# Corpus: inputs that found bugs, by name. Seeds generate other inputs when a fuzzer changes.
#
# Each is checked by the fuzzer of its target.


Case = Callable[[Fuzzer], None]


def _folder(path: Path) -> None:
    """A folder in place of a file."""
    path.unlink()
    path.mkdir()


def _last_record(path: Path) -> None:
    """A file that ends with the last record of its queue."""
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
        fuzzer.check(data)

    return replay


def _record(kind: int, place: int, data: bytes) -> Case:
    """The record of a kind with other bytes at an offset."""
    assert not LOG_KINDS[kind].get("append_crc"), "its own CRC would detect it"

    def replay(fuzzer: Fuzzer) -> None:
        assert isinstance(fuzzer, Records)
        log = LOGS[kind]
        at = log.start + place
        damaged = log.data[:at] + data + log.data[at + len(data) :]
        fuzzer.check(log, damaged)
        fuzzer.check_in_store(log, damaged)

    return replay


def _control(harm: Callable[[Path], object]) -> Case:
    """A replacement for the control file, checked with each tool and a start."""

    def replay(fuzzer: Fuzzer) -> None:
        assert isinstance(fuzzer, SharedFiles)
        for tool in TOOLS:
            fuzzer.lay(fuzzer.paths.control, harm)
            fuzzer.check(tool)

    return replay


def _words(value: int) -> Case:
    """A control file with a valid header and the same value in all other words."""
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

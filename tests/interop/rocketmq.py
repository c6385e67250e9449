"""Run the real RocketMQ through the Java program in `java/`, and make golden stores with it.

The program opens stores with Apache RocketMQ's own DefaultMessageStore; its Main.java documents requests and answers.
It needs a JDK and Maven. Maven keeps downloads in its repository.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pytest

from mqproc.config.options import rocketmq_name
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from tests.golden.fixtures import GOLDEN
from tests.support.command_line import call
from tests.support.group import SMALL

JAVA = Path(__file__).with_name("java")
VERSIONS: Final = ("5.3.3", "5.5.0")
"""RocketMQ's releases; the last is the reference."""
REFERENCE: Final = VERSIONS[-1]
JAVA_OPTIONS = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
"""For half a minute of work the second compiler would take a fifth of the processor time."""
REQUIRED_BY = "MQPROC_REQUIRE_JAVA"
BUILD_TIMEOUT_S = 900
STOP_TIMEOUT_S = 30
# Maven's messages for an artifact that is neither cached nor downloadable.
_UNRESOLVED = re.compile(r"could not be resolved|Could not (?:resolve|transfer|find artifact)|Cannot access")
SEGMENT_SIZE = 65536
BODY_MAX = 32768
UNITS_OF_A_FILE = 100
# Small files, so that each kind rolls several times.
SIZES: dict[str, Any] = SMALL | {
    "mapped_file_size_commit_log": SEGMENT_SIZE,
    # Both sides round up to whole units.
    "mapped_file_size_consume_queue": 20 * UNITS_OF_A_FILE - 10,
    "max_hash_slot_num": 200,
    "max_index_num": 800,
    "max_message_size": BODY_MAX,
    "enabled_append_prop_crc": True,
    # Otherwise RocketMQ loses keys after a kill: it deletes the newest index file and rebuilds only its end.
    "message_index_safe": True,
}

Line = dict[str, Any]


def _unavailable(reason: str) -> None:
    """Skip the test, or fail it where Java is required."""
    if os.environ.get(REQUIRED_BY) == "1":
        pytest.fail(f"{REQUIRED_BY}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@functools.cache
def classpath(version: str) -> str:
    """Class path of the program for a release. Skips without a JDK, Maven or artifacts."""
    for program, needed in (("javac", "a JDK"), ("mvn", "Maven")):
        if shutil.which(program) is None:
            _unavailable(f"{needed} is needed: there is no {program} on the path")
    target, state = JAVA / "target" / version, _state_of_sources()
    listed, stamp = target / "classpath.txt", target / "built"
    with (JAVA / "pom.xml").open() as turn:
        # One test process builds, the others wait for it.
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != state or not _all_there(listed):
            _build(version, target)
            stamp.write_text(state)
    return f"{target / 'classes'}{os.pathsep}{listed.read_text().strip()}"


def _state_of_sources() -> str:
    digest = hashlib.sha256()
    for path in [JAVA / "pom.xml", *sorted(path for path in (JAVA / "src").rglob("*") if path.is_file())]:
        digest.update(path.relative_to(JAVA).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _all_there(listed: Path) -> bool:
    return listed.exists() and all(Path(jar).exists() for jar in listed.read_text().strip().split(os.pathsep))


def _build(version: str, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    command = ["mvn", "-q", "-B", "-Dstyle.color=never", f"-Drocketmq.version={version}", "process-classes"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=JAVA, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        print(f"the Java program was built for {version} in {time.monotonic() - started:.1f} s")
    elif "COMPILATION ERROR" not in said and _UNRESOLVED.search(said):
        _unavailable(f"Maven cannot resolve the dependencies: {_first_line(said)}")
    else:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{said[-4000:]}", pytrace=False)


def _first_line(said: str) -> str:
    return next(line for line in said.splitlines() if _UNRESOLVED.search(line)).strip()[:400]


def rocketmq_options(options: dict[str, Any]) -> dict[str, str]:
    """Options by RocketMQ's names, as in broker.conf, without those that only mqproc has."""
    ours_alone = {"metrics_port", "broker_ip", "disk_floor_bytes", "profile"}
    return {
        rocketmq_name(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if name not in ours_alone
    }


class RocketMq:
    """A running Java program. Stores left open at its end are in the state after `kill -9`."""

    def __init__(self, folder: Path, version: str = REFERENCE) -> None:
        self.version = version
        self._log = folder / "rocketmq.log"
        command = ["java", *JAVA_OPTIONS, f"-Duser.home={folder}", "-cp", classpath(version)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "mqproc.interop.Main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        self._asked = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> RocketMq:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def kill(self) -> None:
        """Leave the open stores as `kill -9` does."""
        self._process.kill()
        self._process.wait()

    def ask(self, operation: str, store: Path, **fields: Any) -> Any:
        """Run one operation and return its answer. Raises RuntimeError with RocketMQ's exception."""
        return self.ask_all(operation, [(store, fields)])[0]

    def ask_all(self, operation: str, stores: Iterable[tuple[Path, dict[str, Any]]]) -> list[Any]:
        """Run an operation on several stores concurrently; return the answers in order."""
        assert self._process.stdin is not None
        first = self._asked
        for store, fields in stores:
            request = {"id": self._asked, "op": operation, "store": str(store)} | fields
            self._process.stdin.write(json.dumps(request) + "\n")
            self._asked += 1
        self._process.stdin.flush()
        answers = {answer["id"]: answer for answer in (self._answer() for _ in range(first, self._asked))}
        for answer in answers.values():
            if "error" in answer:
                raise RuntimeError(f"{operation}: {answer['error']}")
        return [answers[number]["result"] for number in range(first, self._asked)]

    def _answer(self) -> Line:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the Java program ended: {self._log.read_text()[-4000:]}")
        answer: Line = json.loads(line)
        return answer


class Dump:
    """RocketMQ's dump of a store, by kind of line; see StoreDump.java."""

    def __init__(self, file: Path) -> None:
        self._lines: dict[str, list[Line]] = defaultdict(list)
        with file.open(encoding="utf-8") as lines:
            for text in lines:
                line: Line = json.loads(text)
                self._lines[line.pop("kind")].append(line)

    def lines(self, kind: str) -> Sequence[Line]:
        return self._lines[kind]

    @property
    def max_physical_offset(self) -> int:
        end: int = self._lines["store"][0]["maxPhyOffset"]
        return end

    @functools.cached_property
    def records(self) -> dict[int, Line]:
        """The log's records by physical offset."""
        return {line["offset"]: line for line in self._lines["record"]}

    @functools.cached_property
    def queues(self) -> dict[tuple[str, int], Line]:
        return {(line["topic"], line["queueId"]): line for line in self._lines["queue"]}

    @functools.cached_property
    def keys(self) -> dict[tuple[str, str], list[int]]:
        """Physical offsets by (topic, key), as returned by queryMessage."""
        return {(line["topic"], line["key"]): line["physicalOffsets"] for line in self._lines["key"]}

    def due_undelivered(self, until_ms: int) -> dict[int, Line]:
        """Undelivered records that are due by this time, by physical offset."""
        due = [
            unit[0]
            for queue, line in self.queues.items()
            if queue[0] == SCHEDULE_TOPIC
            for unit in line["units"]
            if unit[0] in self.records and unit[2] <= until_ms
        ]
        delivered = {line["preparedTransactionOffset"] for line in self.records.values()}
        return {offset: self.records[offset] for offset in due if offset not in delivered}

    def pulled(self, topic: str, queue_id: int) -> list[int]:
        """Physical offsets returned by successive pulls of a whole queue."""
        return [
            offset
            for line in self._lines["pull"]
            if (line["topic"], line["queueId"], line["tag"]) == (topic, queue_id, "")
            for offset in line["physicalOffsets"]
        ]


# The golden stores created with RocketMQ: `python -m tests.interop`

_PACK_TIMEOUT_S = 60


def golden_of(version: str) -> Path:
    """The folder of a release's golden stores."""
    return GOLDEN if version == VERSIONS[0] else GOLDEN / version


def make_golden(name: str, make: Callable[[RocketMq, Path], None], version: str) -> None:
    """Have `make` fill a store, pack it as `name` and print its size."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with RocketMq(folder, version) as rocketmq:
            make(rocketmq, folder / "store")
        archive = golden_of(version) / f"{name}.tar.gz"
        # The timer's wheel has 38 MB, of which some pages are written.
        subprocess.run(["tar", "--sparse", "-czf", archive, "-C", folder, "store"], check=True, timeout=_PACK_TIMEOUT_S)
        print(json.dumps({"archive": str(archive), "bytes": archive.stat().st_size}))


# Messages 0 to 3 of the topic have tag a, the others tag b, and the group asks for tag b.
POP_STORE = "j_pop"
POP_TOPIC, POP_GROUP, POP_TAG = "Popped", "workers", "b"
POP_OPTIONS = {
    "mappedFileSizeCommitLog": 65536,
    "mappedFileSizeConsumeQueue": 2000,
    "maxHashSlotNum": 200,
    "maxIndexNum": 800,
    "mappedFileSizeTimerLog": 10400,
    "brokerName": "broker-a",
}
_POP_SOON_MS, POP_LATER_MS, POP_LATE_MS = 2_000, 600_000, 3_600_000
_POP_TIMEOUT_S = 60


def pop(rocketmq: RocketMq, store: Path, messages: int, invisible_ms: int, wait_ms: int = 1000) -> list[Line]:
    """Receive messages of the group."""
    of: dict[str, Any] = {"topic": POP_TOPIC, "group": POP_GROUP, "tag": POP_TAG}
    found: list[Line] = rocketmq.ask("pop", store, **of, messages=messages, invisibleMs=invisible_ms, waitMs=wait_ms)
    return found


def pop_all(rocketmq: RocketMq, store: Path, messages: int, invisible_ms: int) -> list[Line]:
    """Receive this many messages. Raises TimeoutError."""
    found: list[Line] = []
    deadline = time.monotonic() + _POP_TIMEOUT_S
    while len(found) < messages:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} and no more of {messages} messages came in {_POP_TIMEOUT_S} s")
        found += pop(rocketmq, store, messages - len(found), invisible_ms)
    return found


def ack(rocketmq: RocketMq, store: Path, message: Line) -> None:
    """Acknowledge a message. A retry topic's message has its original topic."""
    retry = message["handle"].split(" ")[4] == "1"
    topic = f"%RETRY%{POP_GROUP}_{POP_TOPIC}" if retry else POP_TOPIC
    rocketmq.ask("ack", store, topic=topic, group=POP_GROUP, handle=message["handle"])


def make_pop_store(rocketmq: RocketMq, store: Path) -> None:
    """Receive and acknowledge messages 4 to 11.

    4 is changed, 5 acknowledged, 6 open; 7 and 8 are acknowledged, 9 is open; 10 and 11 are redelivered, then 10 is
    acknowledged, 11 open.
    """
    rocketmq.ask("broker", store, options=POP_OPTIONS, topic=POP_TOPIC, group=POP_GROUP)
    for tag, numbers in (("a", range(4)), (POP_TAG, range(4, 12))):
        rocketmq.ask("send", store, topic=POP_TOPIC, tag=tag, bodies=[str(number) for number in numbers])
    first = pop_all(rocketmq, store, 3, POP_LATER_MS)
    ack(rocketmq, store, first[1])
    rocketmq.ask("change", store, topic=POP_TOPIC, group=POP_GROUP, handle=first[0]["handle"], invisibleMs=POP_LATE_MS)
    second = pop_all(rocketmq, store, 3, POP_LATER_MS)
    for message in second[:2]:
        ack(rocketmq, store, message)
    assert len(pop_all(rocketmq, store, 2, _POP_SOON_MS)) == 2
    again = pop_all(rocketmq, store, 2, POP_LATER_MS)
    assert [(each["body"], each["times"]) for each in again] == [("10", 1), ("11", 1)]
    ack(rocketmq, store, again[0])
    assert rocketmq.ask("stop", store) == {"clean": True}


# Three messages are delivered. Of the others, five are due half a minute later, the last ones sent first; one is due
# with them and cancelled; one is due much later and is enqueued again after half a minute.
TIMER_STORE: Final = "k_timer"
TIMER_STORE_TOPIC: Final = "Later"
_ROLL_S: Final = 40
TIMER_OPTIONS: Final = SIZES | {
    "enabled_append_prop_crc": False,
    "mapped_file_size_timer_log": 1024,
    "timer_roll_window_slot": _ROLL_S,
}
DELIVERED: Final = [f"delivered {number}" for number in range(3)]
WAITING: Final = [f"waiting {number}" for number in range(5)]
"""In the order of their times."""
CANCELLED, FAR = "cancelled", "far"
_TIMER_SOON_MS, _TIMER_LATER_MS, _TIMER_FAR_MS = 2_000, 30_000, 400 * 86_400_000
_APART_MS: Final = 700


def timer_message(body: str, due_ms: int, **properties: str) -> Line:
    """A message in the form in which RocketMQ's broker stores it in the timer topic."""
    own = {"TIMER_DELIVER_MS": str(due_ms), "TIMER_OUT_MS": str(due_ms // 1000 * 1000)}
    real = {"REAL_TOPIC": TIMER_STORE_TOPIC, "REAL_QID": "0"}
    return {
        "topic": TIMER_TOPIC,
        "queueId": 0,
        "body": base64.b64encode(body.encode()).decode(),
        "properties": {"UNIQ_KEY": unique_id(body)} | own | real | properties,
        "sysFlag": 0,
        "bornHost": "10.1.2.3",
        "storeHost": "192.168.1.2",
    }


def unique_id(body: str) -> str:
    return body.upper().replace(" ", "").ljust(32, "0")


def timer_units(store: Path) -> list[tuple[int, int]]:
    """(slot, physical offset) of timer_units of slots that are not delivered."""
    check = {row["name"]: row["value"] for row in dump_rows(store / "config" / "timercheck")}
    rows = [row for path in sorted((store / "timerlog").iterdir()) for row in dump_rows(path)]
    return sorted((row["slot_ms"], row["physical_offset"]) for row in rows if row["slot_ms"] >= check["read_ms"])


def dump_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `mqproc store dump`."""
    rows: list[dict[str, Any]] = call("store", "dump", path, "--json").json["rows"]
    return rows


def make_timer_store(rocketmq: RocketMq, store: Path) -> None:
    """A store of RocketMQ, closed while messages are waiting."""
    opened = rocketmq.ask("open", store, options=rocketmq_options(TIMER_OPTIONS))
    assert opened["started"], opened
    rocketmq.ask("timer", store)
    now_ms = time.time_ns() // 1_000_000
    later_ms = now_ms + _TIMER_LATER_MS
    messages = [timer_message(body, now_ms + _TIMER_SOON_MS) for body in DELIVERED]
    due = [(body, later_ms + _APART_MS * place) for place, body in enumerate(WAITING)]
    messages += [timer_message(body, due_ms) for body, due_ms in reversed(due)]
    messages += [timer_message(CANCELLED, later_ms)]
    messages += [timer_message("the cancellation", later_ms, TIMER_DEL_UNIQKEY=unique_id(CANCELLED))]
    messages += [timer_message(FAR, now_ms + _TIMER_FAR_MS)]
    assert {each["status"] for each in rocketmq.ask("append", store, messages=messages)} == {"PUT_OK"}
    delivered = rocketmq.ask("deliver", store, topic=TIMER_STORE_TOPIC, messages=len(DELIVERED))
    assert (delivered["delivered"], delivered["queueOffset"]) == (len(DELIVERED), len(messages)), delivered
    assert rocketmq.ask("close", store) == {"clean": True}
    assert time.time_ns() // 1_000_000 < later_ms, "closing took too long: waiting messages are delivered"


# Stores whose broker keeps state in RocksDB: a message is received and one acknowledged; a transaction is open, and one
# was committed; a timed message is delivered, and one waits.
KVSTORE: Final = "l_kvstore"
ROCKSDB_TRANSACTIONS: Final = "m_rocksdb_transactions"
ROCKSDB_TIMER: Final = "n_rocksdb_timer"
_PRODUCERS: Final = "producers"
_CLIENT_TIMEOUT_MS: Final = 30_000


def make_kvstore(rocketmq: RocketMq, store: Path) -> None:
    """POP check points in kvStore/."""
    _start_with(rocketmq, store, popConsumerKVServiceEnable="true", popConsumerKVServiceInit="true")
    rocketmq.ask("send", store, topic=POP_TOPIC, tag=POP_TAG, bodies=["0", "1"])
    ack(rocketmq, store, pop_all(rocketmq, store, 2, POP_LATER_MS)[0])
    assert rocketmq.ask("stop", store) == {"clean": True}


def make_rocksdb_transactions(rocketmq: RocketMq, store: Path) -> None:
    """Open transactions in rocksdbstore/."""
    _start_with(rocketmq, store, transRocksDBEnable="true", transWriteOriginTransHalfEnable="false")
    rocketmq.ask("produce", store, topic=POP_TOPIC, group=_PRODUCERS, answers={})
    for body, commit in (("open", None), ("committed", True)):
        rocketmq.ask("put", store, topic=POP_TOPIC, body=body, commit=commit)
    assert rocketmq.ask("stop", store) == {"clean": True}


def make_rocksdb_timer(rocketmq: RocketMq, store: Path) -> None:
    """State of timed messages in rocksdbstore/."""
    _start_with(rocketmq, store, timerRocksDBEnable="true")
    rocketmq.ask("produce", store, topic=POP_TOPIC, group=_PRODUCERS, answers={})
    rocketmq.ask("consume", store, topic=POP_TOPIC, group=POP_GROUP, refuse={})
    now_ms = time.time_ns() // 1_000_000
    for body, due_ms in (("delivered", now_ms + _POP_SOON_MS), ("waiting", now_ms + POP_LATE_MS)):
        rocketmq.ask("put", store, topic=POP_TOPIC, body=body, deliverMs=due_ms)
    assert rocketmq.ask("consumed", store, group=POP_GROUP, messages=1, waitMs=_CLIENT_TIMEOUT_MS)
    assert rocketmq.ask("stop", store) == {"clean": True}


def _start_with(rocketmq: RocketMq, store: Path, **options: str) -> None:
    rocketmq.ask("broker", store, options=POP_OPTIONS | options, topic=POP_TOPIC, group=POP_GROUP)

"""The real RocketMQ at work: builds the Java program in `java/` and asks it things.

The program opens stores with Apache RocketMQ's own DefaultMessageStore; what it is asked and answers stands in its
Main.java. It needs a JDK and Maven, whose repository keeps what was downloaded once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from mqproc.config import rocketmq_name
from mqproc.names import SCHEDULE_TOPIC

JAVA = Path(__file__).with_name("java")
TARGET = JAVA / "target"
JAVA_OPTIONS = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
"""Half a minute's work is not worth the second compiler, which takes a fifth of all the processor time then."""
REQUIRED_BY = "MQPROC_REQUIRE_JAVA"
BUILD_TIMEOUT_S = 900
STOP_TIMEOUT_S = 30
# What Maven says when an artifact or a plugin is neither in its repository nor can be fetched.
_UNRESOLVED = re.compile(r"could not be resolved|Could not (?:resolve|transfer|find artifact)|Cannot access")

Line = dict[str, Any]


def _unavailable(reason: str) -> None:
    """Skip the test, or fail it where Java must be there."""
    if os.environ.get(REQUIRED_BY) == "1":
        pytest.fail(f"{REQUIRED_BY}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@functools.cache
def classpath() -> str:
    """The class path of the built program. Skips when there is no JDK, no Maven, or nothing to resolve with."""
    for program, needed in (("javac", "a JDK"), ("mvn", "Maven")):
        if shutil.which(program) is None:
            _unavailable(f"{needed} is needed: there is no {program} on the path")
    listed, stamp, state = TARGET / "classpath.txt", TARGET / "built", _state_of_sources()
    with (JAVA / "pom.xml").open() as turn:
        # One process of the tests builds, the others wait for it.
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != state or not _all_there(listed):
            _build()
            stamp.write_text(state)
    return f"{TARGET / 'classes'}{os.pathsep}{listed.read_text().strip()}"


def _state_of_sources() -> str:
    digest = hashlib.sha256()
    for path in [JAVA / "pom.xml", *sorted(path for path in (JAVA / "src").rglob("*") if path.is_file())]:
        digest.update(path.relative_to(JAVA).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _all_there(listed: Path) -> bool:
    return listed.exists() and all(Path(jar).exists() for jar in listed.read_text().strip().split(os.pathsep))


def _build() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir()
    command = ["mvn", "-q", "-B", "-Dstyle.color=never", "process-classes"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=JAVA, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        print(f"the Java program was built in {time.monotonic() - started:.1f} s")
    elif "COMPILATION ERROR" not in said and _UNRESOLVED.search(said):
        _unavailable(f"Maven cannot resolve what the program needs: {_first_line(said)}")
    else:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{said[-4000:]}", pytrace=False)


def _first_line(said: str) -> str:
    return next(line for line in said.splitlines() if _UNRESOLVED.search(line)).strip()[:400]


def rocketmq_options(options: dict[str, Any]) -> dict[str, str]:
    """Options by RocketMQ's names, as a broker.conf has them. What RocketMQ has no option for is left out."""
    ours_alone = {"metrics_port", "broker_ip"}
    return {
        rocketmq_name(name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if name not in ours_alone
    }


class RocketMq:
    """A running Java program. Stores that are left open at its end are as after `kill -9`."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "rocketmq.log"
        command = ["java", *JAVA_OPTIONS, f"-Duser.home={folder}", "-cp", classpath()]
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

    def ask(self, operation: str, store: Path, **fields: Any) -> Any:
        """One operation's answer. Raises RuntimeError with what RocketMQ threw."""
        return self.ask_all(operation, [(store, fields)])[0]

    def ask_all(self, operation: str, stores: Iterable[tuple[Path, dict[str, Any]]]) -> list[Any]:
        """The same operation on several stores at the same time; the answers in their order."""
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
    """What RocketMQ told of a store, by kind of line; see StoreDump.java."""

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
        """Physical offsets by (topic, key), as queryMessage gives them."""
        return {(line["topic"], line["key"]): line["physicalOffsets"] for line in self._lines["key"]}

    def parked(self, until_ms: int) -> dict[int, Line]:
        """Records that were to be delivered by then, by their units' tags codes, and are not: by physical offset."""
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
        """Physical offsets that the pulls of a whole queue gave, one after the other."""
        return [
            offset
            for line in self._lines["pull"]
            if (line["topic"], line["queueId"], line["tag"]) == (topic, queue_id, "")
            for offset in line["physicalOffsets"]
        ]

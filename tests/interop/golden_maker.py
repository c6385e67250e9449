"""Golden stores of another RocketMQ release, made from the existing ones.

The puts of a store's manifest are replayed, so the log has the same layout. Store times differ: a question's times are
moved by the difference of the record before it.
"""

from __future__ import annotations

import base64
import bisect
import dataclasses
import gzip
import hashlib
import ipaddress
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.golden.fixtures import GOLDEN, Directory, directories, read_expected
from tests.interop.rocketmq import Dump, Line, RocketMq

REPLAYED: Final = ("a_basic", "b_transaction", "e_delay", "f_batch", "h_oversize")
"""Stores that were closed; all their puts."""
KILLED: Final = ("c1_killed", "c3_killed_fresh")
"""Stores whose second process was killed while it wrote."""
SETTLED: Final = "c4_killed_settled"
DAMAGED: Final = (
    "d01_zero_tail",
    "d02_garbage_tail",
    "d03_bad_magic",
    "d06_negative_size",
    "d07_body_flip_first_file_abort",
    "d07_body_flip_last_file_abort",
    "d07_body_flip_middle_file_abort",
    "d07_body_flip_middle_file_clean",
    "d08_no_consumequeue_clean",
    "d10_no_index_abort",
    "d10_no_index_clean",
    "d11_no_checkpoint_abort",
    "d12_last_file_gone_abort",
    "d14_middle_file_gone_abort",
    "d15_five_records_zeroed_clean",
    "d16_short_last_file",
    "d20_cq_tail_garbage",
    "d22_cq_tail_zero_clean",
)
_CHUNK: Final = 25
_PAUSE_S: Final = 0.06
_TIME_MAX: Final = 1 << 60
_TIMES: Final = ("timestamp", "begin", "end")
_TAR_TIMEOUT_S: Final = 60


def make_stores(version: str, folder: Path) -> None:
    """Make all stores of a release in `folder`."""
    folder.mkdir(exist_ok=True)
    for name in REPLAYED:
        _Maker(name, version, folder).closed()
    for name in KILLED:
        _Maker(name, version, folder).killed()
    _Maker(SETTLED, version, folder).killed(settled=True)
    directories.cache_clear()
    make_damaged(version, folder)


def make_damaged(version: str, folder: Path) -> None:
    """Make the damaged stores from the settled one."""
    for name in DAMAGED:
        _damage(name, version, folder)


def manifest_of(name: str) -> list[Line]:
    """The puts of a store."""
    lines = gzip.decompress((GOLDEN / f"{name}.manifest.jsonl.gz").read_bytes()).splitlines()
    return [json.loads(line) for line in lines]


def put_of(line: Line) -> Line:
    """A line of a manifest for `append`; an omitted body is made from its digest."""
    given = {name: line[name] for name in ("topic", "queueId", "flag", "bornTimestamp", "reconsumeTimes")}
    given |= {"preparedTransactionOffset": line["preparedTransactionOffset"], "sysFlag": line["sysFlagGiven"]}
    for kind in ("born", "store"):
        address, _, port = line[f"{kind}Host"].rpartition(":")
        given |= {f"{kind}Host": str(ipaddress.ip_address(address.strip("[]/"))), f"{kind}Port": int(port)}
    if line["op"] == "putBatch":
        parts = [
            {"body": _body(part), "flag": part["flag"], "properties": part["properties"]} for part in line["messages"]
        ]
        return given | {"batch": parts, "properties": line["properties"]}
    return given | {"body": _body(line), "propertiesString": line["propertiesString"]}


def _body(line: Line) -> str:
    if "bodyBase64" in line:
        return str(line["bodyBase64"])
    digest = bytes.fromhex(line["bodySha256"])
    return base64.b64encode((digest * (1 + line["bodyLen"] // len(digest)))[: line["bodyLen"]]).decode()


class _Maker:
    """One store, made from the golden one of this name."""

    def __init__(self, name: str, version: str, folder: Path) -> None:
        self._name = name
        self._version = version
        self._folder = folder
        self._old = read_expected(name)
        self._options = self._old["config"]

    def closed(self) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary) / "store"
            with RocketMq(Path(temporary), self._version) as rocketmq:
                _open(rocketmq, root, self._options)
                _put(rocketmq, root, manifest_of(self._name))
                _close(rocketmq, root)
            self._write(Path(temporary), ["store"], "store")

    def killed(self, *, settled: bool = False) -> None:
        """The first process closes the store; the second is killed."""
        lines = manifest_of(self._name)
        begins = [place for place, line in enumerate(lines) if line["seq"] == 0]
        first, second = (lines[: begins[1]], lines[begins[1] :]) if len(begins) > 1 else ([], lines)
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary) / "before"
            if first:
                with RocketMq(Path(temporary), self._version) as rocketmq:
                    _open(rocketmq, root, self._options)
                    _put(rocketmq, root, first)
                    _close(rocketmq, root)
            with RocketMq(Path(temporary), self._version) as rocketmq:
                _open(rocketmq, root, self._options)
                _put(rocketmq, root, second)
                # Flush threads run at least every half second.
                time.sleep(12 if settled else 0)
                rocketmq.kill()
            names = ["before", "after", *(["clean"] if settled else [])]
            self._write(Path(temporary), names, "before")

    def _write(self, folder: Path, names: Sequence[str], asked: str) -> None:
        """Write the archive and the expected file; the asked store is opened as a copy."""
        expected = _describe(folder, folder / asked, self._options, self._version, self._old)
        for name in names:
            if name != asked:
                shutil.copytree(folder / "opened", folder / name)
        archive = self._folder / f"{self._name}.tar.gz"
        subprocess.run(["tar", "-czf", archive, "-C", folder, *names], check=True, timeout=_TAR_TIMEOUT_S)
        _write_expected(self._folder, self._name, expected)


def _open(rocketmq: RocketMq, root: Path, options: dict[str, str]) -> None:
    opened = rocketmq.ask("open", root, options=options)
    assert opened["started"], opened


def _put(rocketmq: RocketMq, root: Path, lines: Sequence[Line]) -> None:
    for begin in range(0, len(lines), _CHUNK):
        rocketmq.ask("append", root, messages=[put_of(line) for line in lines[begin : begin + _CHUNK]])
        time.sleep(_PAUSE_S)


def _close(rocketmq: RocketMq, root: Path) -> None:
    assert rocketmq.ask("close", root) == {"clean": True}


def _describe(folder: Path, root: Path, options: dict[str, str], version: str, old: Line) -> Line:
    """RocketMQ's description of a copy of a store, which it opens in `folder`/opened and closes."""
    opened = folder / "opened"
    shutil.copytree(root, opened)
    expected: Line = {"rocketmqVersion": version, "config": options, "diskBefore": {"files": _files(opened)}}
    with RocketMq(folder, version) as rocketmq:
        state = rocketmq.ask("open", opened, options=options)
        expected["loadReturned"] = state["loaded"]
        if not state["started"]:
            return expected
        rocketmq.ask("dump", opened, to=str(folder / "dump"))
        dump = Dump(folder / "dump")
        questions = _moved(old, dump)
        answers = rocketmq.ask("answers", opened, questions=questions)
        expected["answers"] = [
            question | {"result": answer} for question, answer in zip(questions, answers, strict=True)
        ]
        _close(rocketmq, opened)
    return expected | _contents(opened, dump) | {"diskAfterShutdown": {"files": _files(opened)}}


def _files(root: Path) -> list[Line]:
    return [
        {"path": str(path.relative_to(root)), "length": path.stat().st_size}
        for path in sorted(root.rglob("*"))
        if path.is_file()
    ]


def _moved(old: Line, dump: Dump) -> list[Line]:
    """The questions of the old store, with the times of this one."""
    before = old.get("records") or read_expected(SETTLED)["records"]
    pairs = sorted(
        (each["storeTimestamp"], dump.records[each["phyOffset"]]["storeTimestamp"])
        for each in before
        if each["phyOffset"] in dump.records
    )
    olds = [pair[0] for pair in pairs]

    def moved(time_ms: int) -> int:
        if not 0 < time_ms < _TIME_MAX or not pairs:
            return time_ms
        from_ms, to_ms = pairs[max(0, bisect.bisect_right(olds, time_ms) - 1)]
        return time_ms - from_ms + to_ms

    asked = []
    for question in old.get("answers") or read_expected(SETTLED)["answers"]:
        named = {name: value for name, value in question.items() if name != "result"}
        asked.append(named | {name: moved(named[name]) for name in _TIMES if name in named})
    return asked


def _contents(root: Path, dump: Dump) -> Line:
    """Records, BLANKs and queues of a dump in the form of the expected files."""
    queues = [
        {name: line[name] for name in ("topic", "queueId", "minOffset", "maxOffset", "units")}
        for line in dump.lines("queue")
    ]
    # RocketMQ's own scans end at the first damaged record.
    end = min((line["offset"] for line in dump.lines("bad")), default=dump.max_physical_offset)
    records = [_record(root, line) for line in dump.records.values() if line["offset"] < end]
    return {
        "minPhyOffset": dump.lines("store")[0]["minPhyOffset"],
        "maxPhyOffset": dump.max_physical_offset,
        "records": records,
        "blanks": [{"phyOffset": line["offset"], "size": line["size"]} for line in dump.lines("blank")],
        "queues": queues,
        "recordsNotInQueue": _unqueued(records, queues),
        "recordsNotInIndexByUniqKey": _unindexed(records, dump),
    }


def _unqueued(records: Sequence[Line], queues: Sequence[Line]) -> list[int]:
    """Physical offsets of records that belong to a queue and have no unit."""
    units = {(queue["topic"], queue["queueId"], unit[0]) for queue in queues for unit in queue["units"]}
    queued = (each for each in records if each["sysFlag"] & 0xC in (0, 8))
    return [each["phyOffset"] for each in queued if (each["topic"], each["queueId"], each["phyOffset"]) not in units]


def _unindexed(records: Sequence[Line], dump: Dump) -> list[int]:
    """Physical offsets of records with a unique id that are not found by it."""
    indexed = {(line["topic"], line["key"], place) for line in dump.lines("key") for place in line["physicalOffsets"]}
    keyed = (each for each in records if each["uniqKey"] and each["sysFlag"] & 0xC != 0xC)
    return [each["phyOffset"] for each in keyed if (each["topic"], each["uniqKey"], each["phyOffset"]) not in indexed]


_SAME: Final = (
    *("size", "topic", "queueId", "queueOffset", "flag", "sysFlag", "bornTimestamp", "storeTimestamp"),
    *("reconsumeTimes", "preparedTransactionOffset", "properties"),
)


def _record(root: Path, line: Line) -> Line:
    body, properties = base64.b64decode(line["body"]), line["properties"]
    return {name: line[name] for name in _SAME} | {
        "phyOffset": line["offset"],
        "magic": _magic(root, line["offset"]),
        "recordSha256": line["sha256"],
        "commitLogOffset": line["physicalOffset"],
        "bodyCRC": line["bodyCrc"],
        "bornHost": _host(line["bornHost"]),
        "storeHost": _host(line["storeHost"]),
        "bodyLen": len(body),
        "bodySha256": hashlib.sha256(body).hexdigest(),
        "msgId": line["messageId"],
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        "uniqKey": properties.get("UNIQ_KEY"),
        "dispatchTagsCode": line["tagsCode"],
    }


def _magic(root: Path, physical_offset: int) -> int:
    """The magic number of a record, which RocketMQ's decoder omits."""
    starts = sorted(path.name for path in (root / "commitlog").iterdir() if int(path.name) <= physical_offset)
    with (root / "commitlog" / starts[-1]).open("rb") as file:
        file.seek(physical_offset - int(starts[-1]) + 4)
        return int.from_bytes(file.read(4), "big", signed=True)


def _host(text: str) -> str:
    """Java's text of an address in hexadecimal and a port."""
    address, _, port = text.rpartition(":")
    data = bytes.fromhex(address)
    if len(data) == ipaddress.IPV4LENGTH // 8:
        return f"{ipaddress.ip_address(data)}:{port}"
    groups = ipaddress.IPv6Address(data).exploded.split(":")
    return f"[{':'.join(f'{int(group, 16):x}' for group in groups)}]:{port}"


def _damage(name: str, version: str, folder: Path) -> None:
    """Apply the old store's damage to this release's settled store."""
    old = read_expected(name)
    base = Directory(folder, SETTLED, SETTLED, old["base"])
    with tempfile.TemporaryDirectory() as temporary:
        whole = base.unpack(Path(temporary) / "whole")
        changes = list(_changes(old, whole))
        damaged = dataclasses.replace(base, name=name)
        _write_expected(folder, name, {"base": old["base"], "change": old["change"], "changes": changes})
        read_expected.cache_clear()
        root = damaged.unpack(Path(temporary) / "damaged")
        expected = _describe(Path(temporary), root, old["config"], version, old)
    if "records" in expected:
        expected["recordOffsets"] = [[each["phyOffset"], each["size"]] for each in expected.pop("records")]
    _write_expected(folder, name, expected | {"base": old["base"], "change": old["change"], "changes": changes})


def _changes(old: Line, whole: Path) -> Iterable[Line]:
    """The old changes; index files have other names, and a flipped byte another value."""
    index = sorted(path.name for path in (whole / "index").iterdir())
    old_index = sorted(Path(each["path"]).name for each in old["changes"] if each["path"].startswith("index/"))
    names = dict(zip(old_index, index, strict=False))
    for change in old["changes"]:
        path = Path(change["path"])
        if path.parts[0] == "index":
            yield change | {"path": f"index/{names[path.name]}"}
        elif "body_flip" in old["fixture"]:
            byte = (whole / path).read_bytes()[change["offset"]] ^ 0x10
            yield change | {"base64": base64.b64encode(bytes([byte])).decode()}
        else:
            yield change


def _write_expected(folder: Path, name: str, expected: Line) -> None:
    data = json.dumps(expected | {"fixture": name}, separators=(",", ":"), ensure_ascii=False).encode()
    (folder / f"{name}.expected.json.gz").write_bytes(gzip.compress(data, mtime=0))


def summary(expected: dict[str, Any]) -> str:
    """Numbers of an expected file for the terminal."""
    counts = {name: len(expected.get(name, ())) for name in ("records", "recordsNotInQueue", "answers")}
    return f"{counts}, load {expected['loadReturned']}"

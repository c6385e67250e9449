"""RocketMQ's JSON files and their copies, and the settings file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.access import read_settings, write_settings
from mqproc.store.read.reader import settings_of


def test_parse_integer_keys_with_and_without_quotes() -> None:
    assert rocketmq_json.parse('{"a":{0:1, -7 :2,"3":4},"b":"{0:1}"}') == {"a": {"0": 1, "-7": 2, "3": 4}, "b": "{0:1}"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('\ufeff{"a":{1:2}}', {"a": {"1": 2}}),
        ('\ufeff{"a":1}', {"a": 1}),
        ('{"a":{1:2,3:4,},"b":[1,2 , ],}', {"a": {"1": 2, "3": 4}, "b": [1, 2]}),
        ('{"a":",}",1:"\\",]"\n,\n}', {"a": ",}", "1": '",]'}),
    ],
)
def test_parse_accepts_deviations_that_rocketmq_accepts(text: str, value: object) -> None:
    assert rocketmq_json.parse(text) == value


@pytest.mark.parametrize("text", ['{"a":1,,}', "[,]x", '{"a":,}', "\ufeff", '\ufeff\ufeff{"a":1}'])
def test_parse_other_deviations_raise(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        rocketmq_json.parse(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_load_deeply_nested_file_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "topics.json"
    path.write_text(text)
    with pytest.raises(CorruptStoreError, match=r"topics\.json"):
        rocketmq_json.load(StoreIO(), path)


def test_load_damaged_file_falls_back_to_copy(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    path.write_text("[" * 100_000)
    path.with_name("topics.json.bak").write_text('{"a":{1:2}}')
    value, remark = rocketmq_json.load(StoreIO(), path)
    assert value == {"a": {"1": 2}}
    assert "topics.json" in remark


def test_load_folder_at_path_falls_back_to_copy(tmp_path: Path) -> None:
    path = tmp_path / "delayOffset.json"
    path.mkdir()
    with pytest.raises(CorruptStoreError, match=r"delayOffset.json is a folder"):
        rocketmq_json.load(StoreIO(), path)
    path.with_name("delayOffset.json.bak").write_text('{"a":{1:2}}')
    assert rocketmq_json.load(StoreIO(), path) == ({"a": {"1": 2}}, "delayOffset.json is a folder")


@pytest.mark.parametrize("damaged", [b"", b" \n", bytes(2), b'{"a":{1:2', b'{"a":"\xff"}', b"[" * 100_000])
def test_save_damaged_file_does_not_replace_the_copy(tmp_path: Path, damaged: bytes) -> None:
    path, io = tmp_path / "delayOffset.json", StoreIO()
    copy = path.with_name("delayOffset.json.bak")
    copy.write_text('{"a":{1:2}}')
    path.write_bytes(damaged)
    steps = rocketmq_json.save_steps(io, io, path, {"a": {"1": 3}}, integer_keys=True)
    next(steps, None)
    assert rocketmq_json.load(io, copy) == ({"a": {"1": 2}}, "")
    for _ in steps:
        pass
    assert rocketmq_json.load(io, path) == ({"a": {"1": 3}}, "")


@pytest.mark.parametrize("before", ['{"a":{1:2}}', '{"a": {"1": 2}}'])
def test_save_valid_file_becomes_the_copy(tmp_path: Path, before: str) -> None:
    path, io = tmp_path / "delayOffset.json", StoreIO()
    path.write_text(before)
    path.with_name("delayOffset.json.bak").write_text("{}")
    rocketmq_json.save(io, io, path, {})
    assert path.with_name("delayOffset.json.bak").read_text() == before


# Settings


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    found = StorePaths(tmp_path)
    found.own.mkdir()
    return found


def test_settings_round_trip(paths: StorePaths) -> None:
    options = Options(max_queues=17, broker_ip="10.0.0.1")
    write_settings(StoreIO(), paths, options)
    assert read_settings(StoreIO(), paths) == options


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"7", b'["\xf6"]', b'{"max_queues": "many"}'])
def test_settings_unreadable_file_gives_defaults(paths: StorePaths, text: bytes) -> None:
    paths.settings.write_bytes(text)
    assert settings_of(StoreIO(), paths) == Options()

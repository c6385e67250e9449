"""`mqproc send --whole` and binary bodies: a file is one message and back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc import Client
from tests.support.command_line import call
from tests.support.group import Group, wait_until

BODY = bytes(range(256)) + b"\r\n\n\x00" + bytes(range(256)) + b"\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    group = Group(tmp_path_factory.mktemp("group") / "store").start()
    yield group.store
    group.close()


def _mqproc(store: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mqproc", *arguments, "--store", store]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)


@pytest.mark.parametrize("body", [BODY, b"", b"\n"])
@pytest.mark.parametrize("way", ["file", "stdin", "dash"])
def test_send_whole_file_comes_back_unchanged(store: Path, tmp_path: Path, body: bytes, way: str) -> None:
    file = tmp_path / "body"
    file.write_bytes(body)
    given = {"file": ("--file", str(file)), "stdin": (), "dash": ("-",)}[way]
    sent = call("send", "whole", *given, "--whole", "--key", "k", "--json", "--store", store, stdin=body)
    assert sent.code == 0, sent.err
    found = _mqproc(store, "message", "get", sent.json["message_id"], "--body", "raw")
    assert (found.returncode, found.stdout, found.stderr) == (0, body, b"")
    with Client(store) as client:
        client.wait_dispatched()
    place = str(sent.json["queue_id"]), str(sent.json["queue_offset"])
    assert _mqproc(store, "message", "offset", "whole", *place, "--body", "raw").stdout == body


def test_send_whole_with_count_sends_copies(store: Path) -> None:
    sent = call("send", "often", "--whole", "--count", 3, "--json", "--store", store, stdin=b"1\n2\n")
    assert (sent.code, len(sent.json_lines)) == (0, 3)
    wait_until(lambda: call("message", "range", "often", "--count", "--store", store).out == "3\n", what="the messages")
    assert call("tail", "often", "--format", "%s|", "--store", store).out == "1\n2\n|" * 3


def test_send_whole_with_wrong_options_is_a_usage_error(store: Path, tmp_path: Path) -> None:
    for wrong in (("text", "--whole"), ("--whole", "--key-delimiter", ":")):
        refused = call("send", "whole", *wrong, "--store", store, stdin=b"x")
        assert (refused.code, refused.err.count("\n")) == (2, 1)
    large = tmp_path / "large"
    for size in (5 << 20, 1 << 40):
        with large.open("wb") as file:
            file.truncate(size)
        refused = call("send", "whole", "--file", large, "--whole", "--store", store)
        assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_message_body_of_many_messages_is_refused(store: Path) -> None:
    assert call("message", "range", "whole", "--body", "raw", "--store", store).code == 2
    assert call("tail", "whole", "--body", "raw", "--store", store).code == 2

"""Options nested more deeply than any decoder follows, to each socket of a real group."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.errors import BadRequestError
from mqproc.layout.control import QUERY, ROLES, WRITER
from mqproc.layout.frame import encode_header
from mqproc.supervisor.control_socket import OPERATIONS
from mqproc.supervisor.store_folder import CONTROL_SOCKET
from mqproc.wire.operations import REQUESTS, WRITER_OPERATIONS, Operation
from tests.bad_input.cases import RawClient, rejects
from tests.support.group import Group

DEPTHS = (900, 1500, 30_000)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made = Group(Path(folder) / "store").start()
        yield made
        made.close()


def nested(operation: Operation, depth: int) -> Iterator[bytes]:
    """Frames with an array of this depth in place of each field, and after the last one."""
    fields = len(REQUESTS[operation].__struct_fields__)
    for place in range(fields + 1):
        options = b"\xdc" + (place + 1).to_bytes(2, "big") + b"\xa1a" * place + b"\x91" * depth + b"\xc0"
        yield encode_header(operation, 1, len(options), 0) + options


def socket_of(operation: Operation) -> str:
    if operation in WRITER_OPERATIONS - {Operation.PING}:
        return WRITER
    return CONTROL_SOCKET if operation in OPERATIONS else QUERY


@pytest.mark.parametrize("depth", DEPTHS)
def test_nested_options_are_refused_by_every_operation(group: Group, depth: int) -> None:
    pids = {role: group.pid(role) for role in ROLES}
    for operation in REQUESTS:
        if operation in (Operation.RUN_ROLE, Operation.STOP_GROUP, Operation.RELOAD):
            continue  # Without such a request's fields it would be carried out.
        for data in nested(operation, depth):
            with RawClient(group.paths.socket(socket_of(operation))) as client:
                client.send(data)
                frame = client.frame()
                assert frame is not None, operation
                assert client.serves(), operation
    assert {role: group.pid(role) for role in ROLES} == pids


@pytest.mark.parametrize(("role", "operation"), [(WRITER, Operation.APPEND), (QUERY, Operation.PULL)])
def test_nested_options_are_a_counted_bad_request(group: Group, role: str, operation: Operation) -> None:
    before = rejects(group, role).get(BadRequestError.code, 0)
    frames = list(nested(operation, 1500))
    with RawClient(group.paths.socket(role)) as client:
        for data in frames:
            client.send(data)
            assert isinstance(client.refusal(), BadRequestError)
    assert rejects(group, role)[BadRequestError.code] == before + len(frames)

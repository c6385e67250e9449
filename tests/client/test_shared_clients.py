"""One client where several threads, event loops or forked processes have it."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import threading
import warnings
from collections.abc import Coroutine
from typing import Any

import pytest

import mqproc
from mqproc.client._async.client import AsyncClient
from mqproc.client._sync.client import Client
from mqproc.client.retry import RetryPolicy
from mqproc.errors import BadRequestError, StoreAccessError
from tests.client.memory_roles import MemoryRoles
from tests.support.group import PATIENCE_S, wait_until

FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_fork(work: Any) -> int:
    """Exit code of a forked process that runs this: 0 without an error or a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # Of what other tests have left it would be warned, too.
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                work()
                gc.collect()
            code = 2 if warned else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_apart(steps: Coroutine[Any, Any, Any]) -> None:
    """Run in a loop of its own, in a process that was forked from within one that runs."""
    asyncio.events._set_running_loop(None)
    asyncio.run(steps)


@FORKS
@pytest.mark.parametrize("what", ["send", "close"])
def test_forked_async_client_leaves_parent_loop_alone(roles: MemoryRoles, what: str) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client:
            await client.send("orders", b"before")
            steps = client.send("orders", b"child") if what == "send" else client.close()
            assert in_fork(lambda: run_apart(steps)) == 0
            steps.close()
            await asyncio.wait_for(client.send("orders", b"after"), PATIENCE_S / 2)

    asyncio.run(go())
    bodies = [message.body for message in roles.messages]
    assert bodies == ([b"before", b"child", b"after"] if what == "send" else [b"before", b"after"])


@FORKS
def test_a_fork_closes_the_connections_that_it_was_born_with(client: Client, roles: MemoryRoles) -> None:
    client.send("orders", b"parent")
    assert in_fork(lambda: client.send("orders", b"child")) == 0
    client.send("orders", b"parent")
    assert [len(server.connections) for server in roles.servers] == [1, 0]


def test_two_event_loops_that_run_cannot_share_a_client(roles: MemoryRoles) -> None:
    client = AsyncClient(roles.store, timeout=PATIENCE_S)
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(client.ping())
        except BadRequestError as error:
            caught.append(error)

    async def go() -> None:
        await client.ping()
        await asyncio.to_thread(elsewhere)
        await client.ping()
        await client.close()

    asyncio.run(go())
    assert [str(error) for error in caught] == [
        "the client is in use in another event loop: each loop needs a client of its own"
    ]


def test_connection_in_use_at_close_is_closed_afterwards(roles: MemoryRoles) -> None:
    client = Client(roles.store, timeout=PATIENCE_S)
    client.create_topic("orders", 1)
    poll = threading.Thread(target=lambda: client.pull("orders", 0, 0, timeout=60))
    poll.start()
    wait_until(lambda: roles.held_pulls == 1, what="the poll is held")
    client.close()
    with Client(roles.store, timeout=PATIENCE_S) as other:
        other.send("orders", b"x", queue_id=0)
    poll.join()
    wait_until(lambda: not any(server.connections for server in roles.servers), what="all connections closed")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda client: pickle.loads(pickle.dumps(client))])
def test_a_client_that_is_copied_or_pickled_connects_itself(
    roles: MemoryRoles, kind: type[Client | AsyncClient], copied: Any
) -> None:
    policy = RetryPolicy(base_ms=7)
    client = kind(roles.store, timeout=PATIENCE_S, retry=policy, max_frame_bytes=1 << 20)

    async def ping(which: Client | AsyncClient) -> None:
        answered = which.ping()
        if answered is not None:
            await answered

    async def go() -> None:
        await ping(client)
        made = copied(client)
        assert type(made) is kind
        assert (made.store, made.timeout_s, made.retry) == (roles.store, PATIENCE_S, policy)
        await ping(made)
        assert [len(server.connections) for server in roles.servers] == [2, 2]
        for each in (client, made):
            closed = each.close()
            if closed is not None:
                await closed

    asyncio.run(go())


def test_a_client_shows_its_store(roles: MemoryRoles) -> None:
    assert repr(Client(roles.store)) == f"Client('{roles.store}')"
    assert repr(AsyncClient(roles.store)) == f"AsyncClient('{roles.store}')"


@FORKS
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_store_of_another_user_raises_store_access_error(roles: MemoryRoles) -> None:
    def ask() -> None:
        os.setuid(65_534)
        client = Client(roles.store, timeout=PATIENCE_S)
        with pytest.raises(StoreAccessError, match="only its owner may ask"):
            client.count("orders")
        with pytest.raises(StoreAccessError, match="only its owner may ask"), mqproc.open(roles.store):
            pass

    assert in_fork(ask) == 0


@pytest.mark.parametrize("seconds", [1e7, 1e12])
def test_a_timeout_may_be_as_good_as_none(roles: MemoryRoles, seconds: float) -> None:
    with Client(roles.store, timeout=seconds) as client:
        client.create_topic("orders", 1)
        client.send("orders", b"x", queue_id=0)
        (message,) = client.pull("orders", 0, 0, timeout=1e6).messages
        assert message.body == b"x"

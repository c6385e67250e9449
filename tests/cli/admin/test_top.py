"""`mqproc top` on a real terminal: views, keys, and restoring the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc.errors import TopicNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.metrics import groups
from tests.grafana.scenarios import Sender
from tests.support.command_line import PseudoTerminal, call
from tests.support.group import Group, wait_until


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group for all tests that do not stop it."""
    running = Group(tmp_path_factory.mktemp("top") / "store", heartbeat_timeout_ms=600_000).start()
    yield running
    running.close()


def rows_become(terminal: PseudoTerminal, *names: str) -> None:
    """Wait for these rows in this order; a page is written in pieces, the head first."""
    wait_until(lambda: row_names(terminal.text()) == list(names), what=f"rows {names}")


def row_names(text: str) -> list[str]:
    """First words of the table's rows, in order."""
    lines = text.splitlines()
    at = next((number for number, line in enumerate(lines) if "1 roles" in line), len(lines))
    return [line.split()[0] for line in lines[at + 2 : -1] if line.strip()]


def test_top_keys_select_view_sort_and_filter(group: Group) -> None:
    with group.client() as client:
        for topic, count in (("orders", 300), ("payments", 20), ("returns", 100)):
            client.send_batch(topic, [b"hello"] * count)
        client.wait_dispatched()
    with PseudoTerminal("top", "--store", group.store, "--interval", "200ms") as terminal:
        terminal.until("mqproc top", "ready", "dispatch", "up with the log", "writer", "quit")
        roles = {"supervisor", *words_of.ROLES}
        wait_until(lambda: set(row_names(terminal.text())) == roles, what="a row for each role")
        terminal.send("2")
        terminal.until("payments", "in/s▼")
        terminal.send("\x1b[C")
        terminal.until("out/s▼")
        terminal.send("\x1b[C")
        terminal.until("stored▼")
        rows_become(terminal, "orders", "returns", "payments")
        terminal.send("r")
        terminal.until("stored▲")
        rows_become(terminal, "payments", "returns", "orders")
        terminal.send("/PAY")
        terminal.until("filter: PAY", "1 of 3")
        rows_become(terminal, "payments")
        terminal.send("\x1b")
        terminal.until("orders", "1-4")
        terminal.send("?")
        terminal.until("reverse the order")
        terminal.send(" ")
        terminal.until("orders", "1-4")
        terminal.send(" ")
        terminal.until("paused")
        terminal.send("3")
        terminal.until("no consumer group has committed an offset yet")
        terminal.send("q")
        assert terminal.end() == 0
        assert terminal.is_as_before()


def test_top_shows_dispatch_lag_of_stopped_dispatcher(group: Group) -> None:
    with PseudoTerminal("top", "--store", group.store, "--interval", "200ms") as terminal:
        terminal.until("up with the log")
        os.kill(group.pid("dispatcher"), signal.SIGSTOP)
        try:
            with group.client() as client:
                client.send_batch("orders", [b"hello"] * 500)
            terminal.until("STALLED", "500 messages,")
        finally:
            os.kill(group.pid("dispatcher"), signal.SIGCONT)
        terminal.until("up with the log")
        terminal.send("q")
        assert terminal.end() == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda it: str(it)
)
def test_top_signals_restore_the_terminal(group: Group, number: signal.Signals, code: int) -> None:
    with PseudoTerminal("top", "--store", group.store) as terminal:
        terminal.until("quit")
        assert terminal.settings() != terminal.before
        if number is signal.SIGINT:
            terminal.send("\x03")
        else:
            terminal.process.send_signal(number)
        assert terminal.end() == code
        assert terminal.is_as_before()


def test_top_suspended_restores_the_terminal(group: Group) -> None:
    with PseudoTerminal("top", "--store", group.store, "--interval", "200ms") as terminal:
        terminal.until("quit")
        terminal.send("\x1a")
        stat = Path(f"/proc/{terminal.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the pause")
        terminal.text()
        assert terminal.is_as_before()
        terminal.process.send_signal(signal.SIGCONT)
        wait_until(lambda: terminal.settings() != terminal.before, what="the screen taken again")
        terminal.screen.reset()
        terminal.until("mqproc top", "quit")
        terminal.send("q")
        assert terminal.end() == 0


def test_top_keeps_killed_group_and_follows_the_next(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    # Wide enough for the store's path followed by the state, wherever the tests run.
    with PseudoTerminal("top", "--store", group.store, "--interval", "200ms", columns=300) as terminal:
        terminal.until(f"{group.store}  ready, up")
        group.kill()
        terminal.until("down, ", "the supervisor has been silent", timeout_s=60)
        group.start()
        # State of the new group: wait for its start before its end.
        terminal.until(f"{group.store}  ready, up", "up with the log")
        assert group.stop() == 0
        terminal.until("  down")
        group.store.rename(group.store.with_name("elsewhere"))
        code = terminal.end()
        assert (code, "mqproc: " in terminal.text()) == (9, True), terminal.text()
        assert terminal.is_as_before()


def test_top_adapts_to_the_terminal_size(group: Group) -> None:
    with PseudoTerminal("top", "--store", group.store, "--interval", "200ms", columns=60, lines=14) as terminal:
        shown = terminal.until("mqproc top", "1 roles", "quit")
        assert "dispatch" in shown
        terminal.send("\x1b[B" * 3)
        terminal.resize(130, 40)
        terminal.until("silent", "monitor")
        terminal.send("q")
        assert terminal.end() == 0


def test_top_narrow_terminal_shows_refusals_and_connections(group: Group) -> None:
    with PseudoTerminal("top", "--store", group.store, "--interval", "200ms", columns=80) as terminal:
        terminal.until("0 refused/s", "memory")
        with group.client() as client:

            def refused() -> bool:
                with pytest.raises(TopicNotFoundError):
                    client.delete_topic("nobody-made-it")
                return re.search(r" [1-9][\d,.]* refused/s", terminal.text()) is not None

            wait_until(refused, what="refusals")
            client.send("orders", b"x")
            client.pull("orders", 0, 0)
            terminal.until("1 + 1 cli")


def test_top_once_prints_one_page(group: Group) -> None:
    with group.client() as client:
        client.send_batch("orders", [b"hello"] * 1000)
        client.wait_dispatched()
    page = call("top", "--store", group.store, "--once", "--interval", "200ms", "--view", "topics", "--sort", "stored")
    assert page.code == 0
    assert "up with the log" in page.out
    assert "orders" in page.out
    assert "\x1b" not in page.out
    picture = json.loads(call("top", "--store", group.store, "--json").out)
    assert picture["topics"][0]["topic"] == "orders"
    assert picture["path"]["dispatch_behind_bytes"] == 0
    refused = call("top", "--store", group.store)
    assert refused.code == 2
    assert "--once" in refused.err
    assert call("top", "--store", group.store, "--once", "--view", "topics", "--sort", "lag_s").code == 2


def test_top_once_shows_change_of_lag(make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both samples are read, however long reading the first takes."""
    monkeypatch.setattr(groups, "REST_FACTOR", 1_000_000)
    group = make_group()
    with group.client() as client:
        client.create_topic("orders", 1)
        client.groups.commit("billing", "orders", 0, 0)
    load = Sender(group, "orders", count=10, size=10, pause_s=0.01)
    load.start()
    try:
        page = call("top", "--store", group.store, "--once", "--interval", "500ms", "--view", "groups")
    finally:
        load.end()
    assert re.search(r"^ billing +orders +[\d,]+ +\+[\d,]+ ", page.out, re.MULTILINE), page.out


def test_top_store_never_started_is_an_error(tmp_path: Path) -> None:
    with PseudoTerminal("top", "--store", tmp_path) as terminal:
        assert terminal.end() == 9
        assert terminal.settings() == terminal.before
        assert b"\x1b[?1049h" not in terminal.raw


def test_top_dumb_terminal_is_refused(group: Group) -> None:
    """Emacs' shell and similar terminals show escapes as text."""
    with PseudoTerminal("top", "--store", group.store, kind="dumb") as terminal:
        assert terminal.end() == 2
        assert "--once" in terminal.text()
        assert b"\x1b[?1049h" not in terminal.raw


def test_top_degraded_group_is_not_ready(make_group: Callable[..., Group]) -> None:
    group = make_group()
    assert call("status", "--store", group.store).out.startswith(f"{group.store}: ready, up")
    control = Control.open(StoreIO(), group.paths, write=True)
    control.store(words_of.QUERY_SYNC_ERRNO, 5)
    control.close()
    status = call("status", "--store", group.store)
    assert status.code == 1
    assert status.out.startswith(f"{group.store}: degraded, READ-ONLY after a failed sync, up")
    problem = "✗ the store is read-only: a sync failed with errno 5, since "
    assert problem in status.out
    (found,) = call("status", "--store", group.store, "--json").json["problems"]
    assert found["remedy"] == "repair the disk, mqproc down, mqproc store repair"
    page = call("top", "--store", group.store, "--once", "--interval", "200ms").out
    assert f"{group.store}  degraded, up" in page
    assert problem in page

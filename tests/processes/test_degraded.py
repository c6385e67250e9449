"""A group that does not do its whole job says so everywhere: what, since when, what to do."""

from __future__ import annotations

import json
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command_line import call
from tests.support.group import Group, wait_until


@contextmanager
def replaced(path: Path, *, by_folder: bool) -> Iterator[None]:
    """Put a file, or a folder with a file, in the place of a path for the duration of the block."""
    kept = path.with_name(path.name + ".kept")
    if path.exists():
        path.rename(kept)
    if by_folder:
        path.mkdir(parents=True)
        (path / "other").touch()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        yield
    finally:
        shutil.rmtree(path) if by_folder else path.unlink()
        if kept.exists():
            kept.rename(path)


def readyz(group: Group) -> tuple[int, str]:
    port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def degraded(group: Group, name: str, text: str) -> None:
    """Wait until a problem is shown, and compare all displays of it."""
    began_ms = round(time.time() * 1000)
    since = f"{name}.problem_since_ms"
    wait_until(lambda: group.words()[since], what=f"{name} is noted")
    status = call("status", "--store", group.store, "--json")
    assert (status.code, status.json["state"], status.json["ready"]) == (1, "degraded", False)
    (problem,) = (each for each in status.json["problems"] if each["problem"].startswith(text))
    assert began_ms - 60_000 < problem["since_ms"] <= round(time.time() * 1000)
    assert problem["remedy"]
    shown = call("status", "--store", group.store)
    assert shown.out.startswith(f"{group.store}: degraded")
    assert f"✗ {text}" in shown.out
    code, answer = readyz(group)
    assert (code, text in answer) == (503, True)
    top = json.loads(call("top", "--store", group.store, "--json").out)
    assert (top["state"], any(each["problem"].startswith(text) for each in top["problems"])) == ("degraded", True)
    doctor = call("doctor", "--store", group.store)
    assert text in doctor.out
    with group.client() as client:
        health = client.health()
        assert (health.ready, any(each.startswith(text) for each in health.problems)) == (False, True)


def ready(group: Group) -> None:
    """Wait until the group is ready again."""
    wait_until(lambda: call("status", "--store", group.store).code == 0, what="the group is ready again")
    assert readyz(group) == (200, "ok\n")


def use(group: Group) -> None:
    """Make every role write its files."""
    with group.client() as client:
        client.send("orders", b"x", delay_level=1)
        client.create_topic("new", 1)
        with client.consumer("billing", "orders", start="earliest"):
            wait_until(lambda: client.groups.info("billing").queues, what="the group has offsets")


CASES = {
    "dispatch": ("consumequeue/orders", False, "dispatch waits, and consumers see no new messages: Not a directory"),
    "topics": ("config/topics.json", True, "topics.json cannot be saved"),
    "offsets": ("config/consumerOffset.json", True, "committed offsets cannot be saved"),
    "delivery": ("config/delayOffset.json", True, "scheduled delivery waits"),
    "options": ("mqproc/settings.json", True, "the group's options cannot be read from"),
}


@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_group_with_a_blocked_file_is_degraded(
    make_group: Callable[..., Group], name: str, case: tuple[str, bool, str]
) -> None:
    path, by_folder, text = case
    group = make_group()
    ready(group)
    with replaced(group.store / path, by_folder=by_folder):
        if name != "dispatch":
            use(group)
        else:
            with group.client() as client:
                client.send("orders", b"x")
        degraded(group, name, text)
    ready(group)


def test_group_whose_metrics_port_is_taken_is_degraded(make_group: Callable[..., Group]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        group = make_group(metrics_port=port)
        wait_until(lambda: group.words()["metrics.problem_since_ms"], what="the problem is noted")
        status = call("status", "--store", group.store, "--json")
        assert (status.code, status.json["state"]) == (1, "degraded")
        (problem,) = status.json["problems"]
        assert problem["problem"] == f"metrics and the status page are unavailable at 127.0.0.1:{port}"
        assert problem["remedy"] == "set metrics_port; see mqproc errors"
        assert json.loads(call("top", "--store", group.store, "--json").out)["state"] == "degraded"
        with group.client() as client:
            assert not client.health().ready
    ready(group)

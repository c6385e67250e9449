"""The status page in a real browser over a real group: lag rises and falls with a role, and nothing goes wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message
from mqproc.layout import control as words_of
from tests.conftest import Group, wait_until
from tests.metrics.chromium import Chromium, browser

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture
def page(tmp_path: Path, group: Group) -> Iterator[Chromium]:
    wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    with Chromium(tmp_path / "profile") as page:
        page.open(f"http://127.0.0.1:{group.words()['monitor_port']}/")
        page.wait(lambda: page.text("#verdict") == "ready", "the page says ready")
        yield page


def send(group: Group, count: int, topic: str = "orders") -> None:
    with group.client() as client:
        client.send_many([Message(topic, b"x" * 200, keys=[f"k{number}"]) for number in range(count)])


def rows(page: Chromium, table: str) -> list[list[str]]:
    find = f"[...document.querySelectorAll('#{table} tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    found: list[list[str]] = page.value(find)
    return found


def test_lag_rises_and_falls_as_the_dispatcher_is_stopped_and_continued(group: Group, page: Chromium) -> None:
    assert page.text("#dispatch-behind") == "0 B behind"
    dispatcher = group.pid(words_of.DISPATCHER)
    os.kill(dispatcher, signal.SIGSTOP)
    try:
        send(group, 2000)
        page.wait(lambda: "KiB behind" in page.text("#dispatch-behind"), "lag is shown")
        silent: Callable[[], Any] = lambda: "silent" in page.text("#roles tbody")  # noqa: E731
        page.wait(silent, "the dispatcher is called silent")
        assert page.value("document.querySelector('.node[data-role=dispatcher]').classList.contains('bad')")
    finally:
        os.kill(dispatcher, signal.SIGCONT)
    page.wait(lambda: page.text("#dispatch-behind") == "0 B behind", "lag falls")
    page.wait(lambda: "silent" not in page.text("#roles tbody"), "the dispatcher is well again")
    assert page.problems == []


def test_topics_roles_and_theme_can_be_clicked_through(group: Group, page: Chromium, tmp_path: Path) -> None:
    for topic in ("orders", "payments"):
        send(group, 10, topic)
    page.wait(lambda: {row[0] for row in rows(page, "topics")} == {"orders", "payments"}, "both topics are shown")
    page.click("#filter")
    page.type("pay")
    page.wait(lambda: [row[0] for row in rows(page, "topics")] == ["payments"], "one topic is left")
    assert [row[0] for row in rows(page, "roles")] == [words_of.SUPERVISOR, *words_of.ROLES]
    assert rows(page, "errors") == [["none"]]

    before = page.value("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.value("getComputedStyle(document.body).backgroundColor") != before
    page.open(page.value("location.href"), width=390)
    page.wait(lambda: page.text("#verdict") == "ready", "the page says ready on a phone")
    assert page.value("document.documentElement.scrollWidth") <= 390
    cut = "[...document.querySelectorAll('section')].filter(each => each.scrollWidth > each.clientWidth)"
    assert page.value(f"{cut}.map(each => each.innerText)") == []
    assert page.screenshot(tmp_path / "phone.png").startswith(b"\x89PNG")
    assert page.problems == []


def test_a_group_that_goes_is_told(group: Group, page: Chromium) -> None:
    assert page.value("document.querySelector('#lost').hidden")
    group.stop()
    page.wait(lambda: not page.value("document.querySelector('#lost').hidden"), "the page says that it is old")

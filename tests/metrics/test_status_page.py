"""The status page in a real browser with a real group: lag rises and falls with a role."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message
from mqproc.layout import control as words_of
from tests.support.chromium import Chromium, browser
from tests.support.group import Group, wait_until

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture
def group(make_group: Callable[..., Group]) -> Group:
    """A hung role is not restarted, however slowly a busy machine displays it."""
    return make_group(heartbeat_timeout_ms=600_000)


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


def classes(page: Chromium, selector: str) -> set[str]:
    return set(page.value(f"document.querySelector('{selector}').className").split())


def behind(group: Group) -> int:
    words = group.words()
    return words["written"] - words["dispatched"]


def in_bytes(value: float) -> str:
    """A size as the page formats it."""
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "B"
    while value >= 1024:
        value, unit = value / 1024, next(units)
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def test_page_lag_follows_stopped_and_continued_dispatcher(group: Group, page: Chromium) -> None:
    assert page.text("#dispatch-behind") == "0 B behind"
    dispatcher = group.pid(words_of.DISPATCHER)
    os.kill(dispatcher, signal.SIGSTOP)
    try:
        send(group, 2000)
        page.wait(lambda: "KiB behind" in page.text("#dispatch-behind"), "lag is shown")
        silent: Callable[[], Any] = lambda: "running, silent for" in page.text("#roles tbody")  # noqa: E731
        page.wait(silent, "the dispatcher is called silent")
        # It is not considered dead yet, neither here nor in /readyz.
        assert "warn" in classes(page, ".node[data-role=dispatcher]")
        assert page.text("#dispatch-behind") == f"{in_bytes(behind(group))} behind"
        assert page.text("[data-show=dispatcher]") == "2000 to go"
        first = behind(group)
        send(group, 4000)
        assert behind(group) > 2 * first
        page.wait(lambda: page.text("#dispatch-behind") == f"{in_bytes(behind(group))} behind", "lag rises")
        # The oldest undispatched message gets older.
        page.wait(lambda: {"warn", "bad"} & classes(page, "[data-arrow=dispatch]"), "the arrow is coloured")
    finally:
        os.kill(dispatcher, signal.SIGCONT)
    page.wait(lambda: page.text("#dispatch-behind") == "0 B behind", "lag falls")
    assert page.text("[data-show=dispatcher]") == "all done"
    assert not {"warn", "bad"} & classes(page, "[data-arrow=dispatch]")
    page.wait(lambda: "silent" not in page.text("#roles tbody"), "the dispatcher is well again")
    assert page.problems == []


def test_page_lagging_group_says_what_to_do(group: Group, tmp_path: Path) -> None:
    port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    with Chromium(tmp_path / "profile") as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.wait(lambda: page.text("#verdict") == "ready", "the page says ready")
        hidden = "document.querySelector('#problems').hidden"
        assert page.value(hidden)
        dispatcher = group.pid(words_of.DISPATCHER)
        os.kill(dispatcher, signal.SIGSTOP)
        try:

            def late() -> bool:
                """Late: waiting for more than ten seconds."""
                send(group, 1)
                text = r"messages \d+ s late, for \d+ s: if dispatch is stuck: mqproc restart dispatcher"
                return bool(re.search(text, page.text("#problems")))

            page.wait(late, "the page says what to do")
            assert not page.value(hidden)
            assert page.text("#verdict") == "degraded"
        finally:
            os.kill(dispatcher, signal.SIGCONT)
        page.wait(lambda: page.value(hidden), "nothing is to be done")
        assert page.text("#verdict") == "ready"
        assert page.problems == []


def test_page_dead_role_is_red(group: Group, page: Chromium) -> None:
    def look(**said: object) -> str:
        role = {"pid": 1, "state": "running", "busy": False, "silent": False, "silent_s": 0.1} | said
        return str(page.value(f"Object.values(looks({json.dumps(role)})).join(': ')"))

    assert look() == "good: running"
    assert look(silent_s=5) == "warn: running, silent for 5 s"
    assert look(silent_s=12, silent=True) == "bad: silent for 12 s"
    assert look(silent_s=50, state="syncing", busy=True) == "good: syncing for 50 s"
    assert look(pid=0, silent_s=None, state="STOPPED") == ": STOPPED"
    assert look(pid=0, silent_s=None, state="BACKOFF") == "bad: BACKOFF"


def test_page_numbers_fit_on_arrows(group: Group, page: Chromium) -> None:
    spans = "[...document.querySelectorAll('.arrow span')]"
    wide = f"({spans}.forEach(each => each.textContent = '123.4 k keys/s'), {spans})"
    assert page.value(f"{wide}.filter(each => each.scrollWidth > each.clientWidth).length") == 0
    assert page.value("document.documentElement.scrollWidth") <= 1280


def test_page_topics_roles_and_theme_are_clickable(group: Group, page: Chromium, tmp_path: Path) -> None:
    long = "payments-of-customers-who-live-abroad"
    for topic in ("orders", long):
        send(group, 10, topic)
    page.wait(lambda: {row[0] for row in rows(page, "topics")} == {"orders", long}, "both topics are shown")
    page.click("#filter")
    page.type("pay")
    page.wait(lambda: [row[0] for row in rows(page, "topics")] == [long], "one topic is left")
    assert page.text("[data-show=topic_count]") == "1 found, 2 in all"
    assert page.value("[ofAll(50, 70), ofAll(2, 2)].join()") == "50 of 70,2"
    assert page.text("[data-show=group_count]") == "0"
    assert page.value("[atMost(0.005), atMost(null), atMost(Infinity)].join()") == "≤ 5 ms,–,longer"
    assert [row[0] for row in rows(page, "roles")] == [words_of.SUPERVISOR, *words_of.ROLES]
    assert rows(page, "errors") == [["none"]]

    before = page.value("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.value("getComputedStyle(document.body).backgroundColor") != before
    page.open(page.value("location.href"), width=390)
    page.wait(lambda: page.text("#verdict") == "ready", "the page says ready on a phone")
    assert long in {row[0] for row in rows(page, "topics")}
    # A store's folder may have a name without a line break opportunity.
    assert page.value(f"one('#store').textContent += '{'x' * 80}', one('#store').scrollWidth") <= 390
    assert page.value("document.documentElement.scrollWidth") <= 390
    cut = "[...document.querySelectorAll('section')].filter(each => each.scrollWidth > each.clientWidth)"
    assert page.value(f"{cut}.map(each => each.innerText)") == []
    assert page.screenshot(tmp_path / "phone.png").startswith(b"\x89PNG")
    assert page.problems == []


def test_page_filter_finds_hidden_rows(group: Group, page: Chromium) -> None:
    with group.client() as client:
        # The topics with the latest messages are shown.
        for topic in ("hidden-one", *(f"shown-{number:02d}" for number in range(69))):
            client.send(topic, b"x")
        client.wait_dispatched()
        client.groups.commit("billing", "hidden-one", 0, 0)
    page.wait(lambda: page.text("[data-show=topic_count]") == "50 of 70", "50 of 70")
    assert len(rows(page, "topics")) == 50
    assert "hidden-one" not in {row[0] for row in rows(page, "topics")}
    page.click("#filter")
    page.type("Hidden")
    page.wait(lambda: [row[0] for row in rows(page, "topics")] == ["hidden-one"], "it is found")
    assert page.text("[data-show=topic_count]") == "1 found, 70 in all"
    page.wait(lambda: [row[:3] for row in rows(page, "groups")] == [["billing", "hidden-one", "1"]], "its group, too")
    assert page.value("document.querySelector('#filter').select()") is None
    page.type("shown-")
    page.wait(lambda: page.text("[data-show=topic_count]") == "50 of 69 found, 70 in all", "the others")
    assert rows(page, "groups") == [["none"]]
    assert page.text("[data-show=group_count]") == "0 found, 1 in all"
    assert page.problems == []


def test_page_rates_follow_traffic(group: Group, page: Chromium) -> None:
    shown = {"append": "append_rate", "dispatch": "dispatch_rate", "deliver": "deliver_rate", "answer": "request_rate"}

    def flowing(arrow: str) -> bool:
        return float(page.text(f"[data-show={shown[arrow]}]").split()[0]) > 0 and "flows" in classes(
            page, f"[data-arrow={arrow}]"
        )

    assert not any(map(flowing, shown))
    with group.client() as client:
        client.create_topic("orders", 1)
        send(group, 5000)
        client.wait_dispatched()
        sent = 5000

        def flows(arrow: str) -> bool:
            """With steady small traffic: a page that is checked rarely would not show a single message."""
            nonlocal sent
            send(group, 10)
            sent += 10
            assert len(client.pull("orders", 0, 0, 1000).messages) > 0
            return flowing(arrow)

        for arrow in shown:
            page.wait(lambda arrow=arrow: flows(arrow), f"{arrow} flows")
    page.wait(lambda: not any(map(flowing, shown)), "all rests")
    assert page.text("[data-show=writer]") == f"{sent} messages"
    in_table = {row[0]: row for row in rows(page, "latencies")}
    assert in_table["append"][3] != "0"
    assert page.problems == []


def test_page_clock_set_back_shows_no_huge_rates(group: Group, page: Chromium) -> None:
    send(group, 100)
    page.wait(lambda: page.value("seen.at(-1).topics.length"), "a snapshot with the topic")
    assert page.value("seen.splice(0, seen.length - 1), seen.length") == 1
    earlier = "{...seen.at(-1), time_ms: seen.at(-1).time_ms - 3600000}"
    more = "topics: seen.at(-1).topics.map(topic => ({...topic, appended: topic.appended + 50}))"
    used = "roles: seen.at(-1).roles.map(role => ({...role, cpu_s: role.cpu_s + 1}))"
    # In one evaluation: the page's next snapshot would use the old clock again.
    shown = "[...document.querySelectorAll('#topics tbody td:nth-child(5), #roles tbody td:nth-child(4)')]"
    found = page.value(f"take({{...{earlier}, {more}, {used}}}); {shown}.map(cell => cell.textContent)")
    assert set(found) == {"0", "0 %"}
    assert page.value(f"take({earlier}); document.querySelector('#since').textContent") == "up 0 s"
    assert page.problems == []


def test_page_shows_groups_disk_roles_and_errors(group: Group, page: Chromium) -> None:
    with group.client() as client:
        client.create_topic("orders", 2)
        client.send_many([Message("orders", b"x" * 200, queue_id=number % 2) for number in range(600)])
        client.wait_dispatched()
        client.groups.commit("billing", "orders", 0, 100)
        client.groups.commit("billing", "orders", 1, 50)
        page.wait(lambda: [row[:3] for row in rows(page, "groups")] == [["billing", "orders", "450"]], "the lag")
        assert page.text("[data-show=group_lag]") == "groups 450 behind"
        for queue in (0, 1):
            client.groups.commit("billing", "orders", queue, 300)
        page.wait(lambda: rows(page, "groups") == [["billing", "orders", "0", "–", "0"]], "no lag")
    (topic,) = [row for row in rows(page, "topics") if row[0] == "orders"]
    assert topic[1:4] == ["2", "600", "600"]

    def disk_is_shown() -> bool:
        """Compare values of the same moment: other processes fill and empty the disk."""
        words, shown = group.words(), dict(rows(page, "disk"))["used"]
        used, free = words["disk_used_bytes"], words["disk_free_bytes"]
        share = 100 * used / (used + free)
        return shown.endswith(f"of {in_bytes(used + free)}") and abs(float(shown.split()[0]) - share) < 1

    page.wait(disk_is_shown, "the disk")
    words, disk = group.words(), dict(rows(page, "disk"))
    assert disk["log"] == in_bytes(words["written"] - words["min_physical_offset"])
    assert disk["sends are refused above"] == "90 %"
    assert disk["deleted in this run"] == "0 segments, 0 B"

    os.kill(group.pid(words_of.KEEPER), signal.SIGABRT)
    page.wait(lambda: [row[4] for row in rows(page, "roles") if row[0] == words_of.KEEPER] == ["1"], "the restart")
    page.wait(lambda: rows(page, "errors") != [["none"]], "the error")
    (error,) = rows(page, "errors")
    assert error[1:3] == [words_of.SUPERVISOR, "1"]
    assert "a role crashed" in error[3]
    page.wait(lambda: page.text("#verdict") == "ready", "the page says ready again")
    assert page.problems == []


def test_page_stopped_group_is_reported(group: Group, page: Chromium) -> None:
    assert page.value("document.querySelector('#lost').hidden")
    group.stop()
    page.wait(lambda: not page.value("document.querySelector('#lost').hidden"), "the page says that it is old")

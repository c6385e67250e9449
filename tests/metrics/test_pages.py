"""Alive and ready are told apart, with reasons; the landing page links to the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.control import Control
from mqproc.layout import control as layout
from mqproc.metrics.pages import Pages
from tests.metrics.control_file import make_control


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = make_control(tmp_path)
    yield control
    control.close()


def pages(control: Control) -> Pages:
    return Pages(control, "/data/<store>", "1.2.3", 10_000)


def test_a_running_group_is_alive_and_ready(control: Control) -> None:
    assert pages(control).page("/healthz").status == 200
    assert pages(control).page("/readyz").body == b"ok\n"


def test_a_recovering_group_is_alive_but_not_ready(control: Control) -> None:
    control.store(layout.GROUP_STATE, layout.GROUP_RECOVERING)
    assert pages(control).page("/healthz").status == 200
    page = pages(control).page("/readyz")
    assert (page.status, page.body) == (503, b"the group is recovering\n")


def test_a_dead_supervisor_is_neither(control: Control) -> None:
    control.store(layout.SUPERVISOR_HEARTBEAT_NS, 1)
    assert pages(control).page("/healthz").status == 503
    assert b"supervisor has been silent" in pages(control).page("/readyz").body


def test_ready_names_the_role_that_is_not(control: Control) -> None:
    control.store(layout.supervised_word(layout.QUERY, "supervised"), layout.BACKOFF)
    control.store(layout.role_word(layout.WRITER, "heartbeat_ns"), 1)
    control.store(layout.WRITER_SYNC_ERRNO, 5)
    text = pages(control).page("/readyz").body.decode()
    assert "query is BACKOFF" in text
    assert "writer has been silent" in text
    assert "read-only: a sync failed with errno 5" in text


def test_a_busy_role_is_not_silent(control: Control) -> None:
    control.store(layout.role_word(layout.WRITER, "heartbeat_ns"), 1)
    control.store(layout.role_word(layout.WRITER, "state"), layout.STATE_SYNCING)
    assert pages(control).page("/readyz").status == 200


def test_the_landing_page_links_and_escapes(control: Control) -> None:
    page = pages(control).page("/")
    assert page.status == 200
    assert b'href="/metrics"' in page.body
    assert b"/data/&lt;store&gt;" in page.body
    assert pages(control).page("/other").status == 404

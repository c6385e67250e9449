"""Render the images in `grafana/screenshots`: `python -m tests.metrics [STORE]`.

The images show a group under load. They name the store, which is created if missing: `/var/lib/mqproc` if permitted. It
is removed afterwards.
"""

from __future__ import annotations

import html
import shutil
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyte.screens

from mqproc import Client, Message
from tests.support.chromium import Chromium
from tests.support.command_line import PseudoTerminal
from tests.support.group import ROOT, Group, wait_until

FOLDER: Final = ROOT / "grafana" / "screenshots"
PAUSE_S: Final = 0.05
# Long enough for a visible curve, and for latencies over most of their minute.
LOADED_S: Final = 45.0
TOP_SHOWN_S: Final = 12.0
LINES: Final = 24
# Terminal colours by their names in pyte.
_COLOURS: Final = {
    "default": "#d0d0d0",
    "black": "#1c1c1c",
    "red": "#d75f5f",
    "green": "#98b04a",
    "brown": "#d7af5f",
    "blue": "#5f87d7",
    "magenta": "#af87d7",
    "cyan": "#6ba5ba",
    "white": "#d0d0d0",
}
_BACKGROUND: Final = "#292929"
_WINDOW: Final = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #292929; color: {text}; width: max-content; }}
pre {{ margin: 0; padding: 12px 16px; font: 20px/24px "DejaVu Sans Mono", monospace; }}
</style><pre>{lines}</pre>"""


def main(store: Path) -> None:
    """Render all images."""
    group = Group(store)
    group.options = {"metrics_port": 0}
    try:
        group.start()
        with tempfile.TemporaryDirectory() as profile, _loaded(group), Chromium(Path(profile)) as page:
            _take_pages(group, page)
            _take_top(group, page)
        group.stop()
    finally:
        group.close()
        shutil.rmtree(store)
        group.output.unlink()


@contextmanager
def _loaded(group: Group) -> Iterator[None]:
    """Producers, members of a group that keep up, a slow group, and queries by key."""
    with group.client() as client:
        for topic, queues in (("orders", 4), ("payments", 2), ("shipments", 1)):
            client.create_topic(topic, queues)
        client.groups.commit("audit", "payments", 0, 0)
        client.groups.commit("audit", "payments", 1, 0)
    ended = threading.Event()
    parties = [_sends_orders, _sends_shipments, _consumes_orders, _consumes_orders, _asks]
    threads = [threading.Thread(target=_party, args=(party, group, ended)) for party in parties]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _party(party: Callable[[Client, threading.Event], None], group: Group, ended: threading.Event) -> None:
    with group.client() as client:
        party(client, ended)


def _sends_orders(client: Client, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(PAUSE_S):
        for topic in ("orders", "payments"):
            keys = [f"{topic}-{number + each}" for each in range(32)]
            client.send_batch(topic, [b"x" * 400] * len(keys), keys=keys)
        number += 32


def _sends_shipments(client: Client, ended: threading.Event) -> None:
    while not ended.wait(PAUSE_S):
        client.send_many([Message("shipments", b"x" * 400) for _ in range(31)])
        client.send("shipments", b"x" * 400, delay=1.0)


def _consumes_orders(client: Client, ended: threading.Event) -> None:
    with client.consumer("billing", "orders") as consumer:
        while not ended.is_set():
            for _ in consumer.messages(timeout=PAUSE_S):
                if ended.is_set():
                    return


def _asks(client: Client, ended: threading.Event) -> None:
    offsets = {0: 0, 1: 0}
    while not ended.wait(PAUSE_S):
        client.by_key("orders", "orders-1")
        for queue, offset in offsets.items():
            offsets[queue] += len(client.pull("payments", queue, offset, 64).messages)


def _take_pages(group: Group, page: Chromium) -> None:
    address = f"http://127.0.0.1:{wait_until(lambda: group.words()['monitor_port'], what='the monitor listens')}/"
    for name, width, scheme, shown_s in (
        ("status", 1280, "light", LOADED_S),
        ("status-dark", 1280, "dark", LOADED_S),
        ("status-phone", 390, "light", LOADED_S / 3),
    ):
        page.open(address, width=width, scheme=scheme)
        page.wait(lambda: page.text("#verdict") == "ready", "the page says ready")
        time.sleep(shown_s)
        page.screenshot(FOLDER / f"{name}.png")
    assert page.problems == []


def _take_top(group: Group, page: Chromium) -> None:
    with PseudoTerminal("top", "--store", group.store, columns=120, lines=LINES) as terminal:
        terminal.until("mqproc top", "writer")
        ends = time.monotonic() + TOP_SHOWN_S
        while time.monotonic() < ends:
            terminal.text()
            time.sleep(PAUSE_S)
        lines = "\n".join(_line(terminal.screen.buffer[row], terminal.screen.columns) for row in range(LINES))
    window = _WINDOW.format(text=_COLOURS["default"], lines=lines)
    page.open(f"data:text/html;charset=utf-8,{urllib.parse.quote(window)}", width=1400, height=600)
    page.wait(lambda: "mqproc top" in page.text("pre"), "the terminal's picture")
    box = page.value("document.querySelector('pre').getBoundingClientRect().toJSON()")
    page.open(page.value("location.href"), width=round(box["width"]), height=round(box["height"]))
    page.wait(lambda: "mqproc top" in page.text("pre"), "the terminal's picture")
    page.screenshot(FOLDER / "top.png")


def _line(cells: dict[int, pyte.screens.Char], columns: int) -> str:
    return "".join(_cell(cells[column]) for column in range(columns))


def _cell(cell: pyte.screens.Char) -> str:
    text, behind = _colour(cell.fg, _COLOURS["default"]), _colour(cell.bg, _BACKGROUND)
    if cell.reverse:
        text, behind = behind, text
    style = f"color:{text};background:{behind}"
    style += ";font-weight:bold" if cell.bold else ""
    style += ";text-decoration:underline" if cell.underscore else ""
    return f'<span style="{style}">{html.escape(cell.data)}</span>'


def _colour(name: str, default: str) -> str:
    if name == "default":
        return default
    return _COLOURS.get(name.removeprefix("bright"), f"#{name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "orders")

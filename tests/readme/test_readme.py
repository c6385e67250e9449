"""The README's Python example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from mqproc import Message
from mqproc.cli.main import cli
from mqproc.config import PAGE_BYTES, Options
from tests.cli.calling import call
from tests.conftest import PATIENCE_S, Group, wait_until

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


# What each Python example prints, line by line: by a word of it. Their topics have one queue, so there is one order.
PRINTED = {
    'b"hello"': ["b'hello'", "0 0 b'hello'", "1"],
    "shipping": ["bill b'order 0'", "bill b'order 2'", "bill b'order 4'", "dead 3", "again 6"],
    "batches": [
        "3 {'keys': ['tea', 'rice', 'tea'], 'body': [b'7.5', b'8', b'8.5']}",
        "left [b'7.5', b'8', b'8.5']",
        "right [b'7.5', b'8', b'8.5']",
        "left []",
    ],
    "asyncio": [
        *("group b'one'", "group b'two'", "group b'three'", "simple [b'one', b'two', b'three'] 3"),
        *("dead [b'two']", "replayed 4"),
    ],
    "account-7": [f"account-7 b'{event}'" for event in ("opened", "paid 10", "paid 20", "closed")],
    "change_invisible_duration": ["job b'job 0' 1", "job b'job 1' 1", "job b'job 2' 1"],
    "reminders": ["now b'first'", "now b'second'", "now b'to the millisecond'", "now b'by level'"],
    "became_of": ["the card was refused", "booked b'paid'", "booked b'paid too'"],
    "SqlFilter": ["11 10", "b'order 7' 70.5", "b'order 8' 80.5", "b'order 9' 90.5", "FOUND", "3 0"],
}


RUNS_MAX = 3
"""Of an example. It waits for half a second, and a busy machine may stand still for longer."""


@pytest.mark.parametrize("word", PRINTED)
def test_the_python_examples_run(tmp_path: Path, word: str) -> None:
    (example,) = (block for block in blocks("python") if word in block)
    runs: list[list[str]] = []
    while PRINTED[word] not in runs:
        assert len(runs) < RUNS_MAX, runs
        folder = tmp_path / f"{len(runs)}"
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout.splitlines())


def test_every_python_example_is_run() -> None:
    for block in blocks("python"):
        assert any(word in block for word in PRINTED), block


def test_every_command_of_the_readme_exists() -> None:
    commands = {match for block in blocks("sh") for match in re.findall(r"(?<!/)\bmqproc ([a-z]+)", block)}
    assert {"up", "send", "tail", "message", "stat"} <= commands
    for command in sorted(commands):
        assert call(command, "--help").code == 0, command


def command_lines() -> list[str]:
    """Every `mqproc …` of the shell examples, those inside of `$(…)` too."""
    lines = [line.partition("  #")[0] for block in blocks("sh") for line in block.splitlines()]
    return [found for line in lines for found in re.findall(r"(?<!/)\bmqproc (?:[^)&|;'\"]|'[^']*'|\"[^\"]*\")+", line)]


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_has_real_options_and_arguments(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """click parses the line as it stands, down to its last option, and calls nothing."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "checkpoint").touch()
    monkeypatch.chdir(tmp_path)
    assert line.startswith(parsed(line))


# What shell examples show, in the README's order, on a store where ten messages were consumed and wait among the dead
# letters. Those that show a plan end with 1, and do it with --execute as well.
SHOWN = {
    "mqproc group list": (0, "shipping"),
    "mqproc group info billing": (0, "orders"),
    "mqproc group lag billing": (0, "orders    0"),
    "mqproc group reset billing --by-duration": (1, "10 messages again, 0 skipped"),
    "mqproc group reset billing --to-datetime": (0, "billing stands there already"),
    "mqproc group reset billing --to-offset": (1, "1 queue: 0 messages again, 1 skipped"),
    "mqproc group clone billing audit --execute": (0, "audit"),
    "mqproc group skip audit": (1, "9 skipped"),
    "mqproc group change audit --retry-max-times 5": (1, "would change audit"),
    "mqproc group delete audit": (1, "would forget audit"),
    "mqproc group dlq list shipping": (0, "order 9"),
    "mqproc group dlq resend shipping": (1, "10 dead letters"),
    "mqproc send reminders": (0, "PUT_OK"),
    "mqproc transaction list": (0, "half message"),
    "mqproc transaction rollback": (1, "would rollback 1 transaction"),
    "mqproc tail orders --sql": (0, "order 7"),
    "mqproc message trace": (0, "RMQ_SYS_TRANS_HALF_TOPIC queue 0 offset 0: FOUND"),
    "mqproc replay": (0, "10"),
}


def test_the_shell_examples_of_consumers_run(make_group: Callable[..., Group]) -> None:
    group = make_group(transaction_timeout=3_600_000)
    with group.client() as client:
        client.transaction("books", Message("orders", b"the first record is an open half message")).begin()
        for number in range(10):
            client.send("orders", b"order %d" % number, properties={"amount": f"{10 * number}.5"})
        client.wait_dispatched()
        for name, is_dead in (("billing", False), ("shipping", True)):
            with client.consumer(name, "orders", start="earliest") as consumer:
                for _ in range(10):
                    (message,) = consumer.receive(1, timeout=PATIENCE_S)
                    consumer.nack(message, delay_level=-1) if is_dead else consumer.ack(message)
        client.wait_dispatched()
    for begin, (code, text) in SHOWN.items():
        (line,) = (line for line in command_lines() if line.startswith(begin))
        assert text in shown(group, line, code)
        if code == 1:
            shown(group, line + " --execute", 0)


def test_a_running_store_that_is_copied_in_the_order_of_the_readme_has_all_and_no_damage(
    make_group: Callable[..., Group], tmp_path: Path
) -> None:
    group = make_group("store", flush_interval_commit_log=20, flush_interval_consume_queue=50)
    (block,) = (block for block in blocks("sh") if "cp -a store/commitlog backup" in block)
    acknowledged, stop = [0], threading.Event()

    def send() -> None:
        with group.client() as client:
            while not stop.wait(0.002):
                acknowledged[0] += len(client.send_batch("load", [b"x" * 900] * 50, keys=["key"] * 50))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for line in block.splitlines():
            # A store of hundreds of GiB takes its time: the log goes on by segments, and the marks go after it.
            mark = group.words()["commitlog_mark"]
            wait_until(lambda mark=mark: group.words()["commitlog_mark"] > mark + (3 << 20), 60, "more log")
            there = acknowledged[0]
            subprocess.run(["bash", "-ec", line], cwd=tmp_path, check=True, timeout=60)
    finally:
        stop.set()
        sender.join()
    copy = make_group("backup")
    with copy.client() as client:
        assert client.count("load") >= there
    assert copy.words()["damage_holes"] == 0
    shown(copy, "mqproc store verify ./backup", 0)


def shown(group: Group, line: str, code: int) -> str:
    """What a command line prints beside the store, when it ends with this exit code."""
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=group.store.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, (line, done.stdout, done.stderr)

    return done.stdout + done.stderr


def test_a_command_line_that_is_none_is_seen() -> None:
    for line in ("mqproc send orders --nope x", "mqproc group resset billing", "mqproc replay --topic orders"):
        with pytest.raises(click.UsageError):
            parsed(line)


def parsed(line: str) -> str:
    """The names of a line's command, when all that follows them can be parsed. Raises click.UsageError."""
    words = shlex.split(line)[1:]
    command: click.Command | None = cli
    context = click.Context(cli, info_name="mqproc")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        assert command is not None
        context = click.Context(command, parent=context, info_name=name)
    assert command is not None
    return command.make_context(context.info_name, words, parent=context.parent).command_path


def test_every_command_line_is_found() -> None:
    assert len(command_lines()) >= 33
    assert "mqproc spark script" in command_lines()


def test_the_loss_window_is_that_of_the_defaults() -> None:
    options = Options()
    pages, seconds = options.flush_commit_log_least_pages, options.flush_commit_log_thorough_interval // 1000
    (row,) = re.findall(r"^\| power loss.*$", README, re.MULTILINE)
    for promised in (
        f"`flush_interval_commit_log`, {options.flush_interval_commit_log} ms",
        f"`flush_commit_log_least_pages`, {pages} pages of {PAGE_BYTES // 1024} KiB",
        f"`flush_commit_log_thorough_interval`, {seconds} s",
    ):
        assert promised in row

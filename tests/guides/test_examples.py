"""Examples of the README and the guides run as written and print the output shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from mqproc import Message
from mqproc.cli.main import cli
from mqproc.config.options import Options
from mqproc.util.units import PAGE_BYTES
from tests.guides import api_reference
from tests.support.group import PATIENCE_S, Group, wait_until

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "mqproc" / "guides"
DOCUMENTS = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]
OPERATIONS = (GUIDES / "operations.md").read_text()
RUNS_MAX = 3
"""Runs of an example. It waits for half a second, and a busy machine may stall for longer."""


@dataclass(frozen=True)
class Example:
    """A Python block and the text block after it, which is its output."""

    name: str
    code: str
    output: list[str]


def python_examples() -> list[Example]:
    found = []
    for document in DOCUMENTS:
        blocks = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", document.read_text(), re.DOTALL)
        for number, (code, output) in enumerate(blocks, 1):
            found.append(Example(f"{document.stem}-{number}", code, output.splitlines()))
    return found


def shell_blocks() -> list[str]:
    return [block for path in DOCUMENTS for block in re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL)]


def command_lines() -> list[str]:
    """Every `mqproc …` of the shell blocks, also inside `$(…)`."""
    lines = [line.partition("  #")[0] for block in shell_blocks() for line in block.splitlines()]
    pattern = r"(?<![/'\w-])\bmqproc (?:[^)&|;'\"]|'[^']*'|\"[^\"]*\")+"
    found = [match.strip() for line in lines if "pip install" not in line for match in re.findall(pattern, line)]
    return sorted(set(found))


@pytest.mark.parametrize("example", python_examples(), ids=lambda example: example.name)
def test_python_example_prints_the_output_shown(tmp_path: Path, example: Example) -> None:
    runs: list[list[str]] = []
    while example.output not in runs:
        assert len(runs) < RUNS_MAX, runs
        folder = tmp_path / f"{len(runs)}"
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", example.code], cwd=folder, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        runs.append(done.stdout.splitlines())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_python_block_shows_its_output(document: Path) -> None:
    """Blocks that need Spark are marked `notest`; tests/spark runs the same reads and streams."""
    text = document.read_text()
    shown = re.findall(r"```python\n.*?```\s*```text\n", text, re.DOTALL)
    assert len(re.findall(r"```python\n", text)) == len(shown)


@pytest.mark.parametrize("line", command_lines())
def test_command_line_has_valid_options_and_arguments(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """click parses the whole line and runs nothing."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "checkpoint").touch()
    (tmp_path / "backup").mkdir()
    monkeypatch.chdir(tmp_path)
    assert line.startswith(parsed(line))


def test_invalid_command_line_is_refused() -> None:
    for line in ("mqproc send orders --nope x", "mqproc group resset billing", "mqproc replay --topic orders"):
        with pytest.raises(click.UsageError):
            parsed(line)


def parsed(line: str) -> str:
    """Name of the command of a line whose words all parse. Raises click.UsageError."""
    words = shlex.split(line)[1:]
    command: click.Command | None = cli
    context = click.Context(cli, info_name="mqproc")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        assert command is not None
        context = click.Context(command, parent=context, info_name=name)
    assert command is not None
    return command.make_context(context.info_name, words, parent=context.parent).command_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = target.partition("#")
        linked = (document.parent / path) if path else document
        assert linked.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
            assert heading in slugs, target


# Begin of a line, its exit code, and a word of its output, on a store where ten messages were consumed and failed.
# Lines with exit code 2 print a plan and its exit code on request; the test runs them with --execute as well.
SHOWN = {
    "mqproc group list": (0, "shipping"),
    "mqproc group info billing": (0, "orders"),
    "mqproc group lag billing": (0, "orders    0"),
    "mqproc group reset billing --by-duration": (2, "10"),
    "mqproc group reset billing --to-datetime": (0, "billing"),
    "mqproc group reset billing --to-offset": (2, "1 queue"),
    "mqproc group clone billing audit --execute": (0, "audit"),
    "mqproc group skip audit": (2, "9"),
    "mqproc group change audit --retry-max-times 5": (2, "audit"),
    "mqproc group delete audit": (2, "audit"),
    "mqproc group dlq list shipping": (0, "order 9"),
    "mqproc group dlq resend shipping": (2, "10 dead letters"),
    "mqproc send reminders": (0, "PUT_OK"),
    "mqproc transaction list": (0, "half message"),
    "mqproc transaction rollback": (2, "1 transaction"),
    "mqproc tail orders --sql": (0, "order 7"),
    "mqproc message trace": (0, "RMQ_SYS_TRANS_HALF_TOPIC queue 0 offset 0: FOUND"),
    "mqproc replay": (0, "10"),
}


def test_shell_examples_for_consumers_run(make_group: Callable[..., Group]) -> None:
    group = make_group(transaction_timeout=3_600_000)
    with group.client() as client:
        client.transaction("books", Message("orders", b"the first record is an open half message")).begin()
        for number in range(10):
            client.send("orders", b"order %d" % number, properties={"amount": f"{10 * number}.5"})
        client.wait_dispatched()
        for name, failed in (("billing", False), ("shipping", True)):
            with client.consumer(name, "orders", start="earliest") as consumer:
                for _ in range(10):
                    (message,) = consumer.receive(1, timeout=PATIENCE_S)
                    consumer.nack(message, delay_level=-1) if failed else consumer.ack(message)
        client.wait_dispatched()
    for begin, (code, text) in SHOWN.items():
        (line,) = (line for line in command_lines() if line.startswith(begin))
        assert text in output_of(group, line + " --detailed-exitcode" * (code == 2), code)
        if code == 2:
            output_of(group, line + " --execute", 0)


def output_of(group: Group, line: str, code: int) -> str:
    """Output of a command line in the store's parent folder, which must exit with `code`."""
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=group.store.parent, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, (line, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_backup_of_a_running_store_is_complete_and_undamaged(make_group: Callable[..., Group], tmp_path: Path) -> None:
    group = make_group("store", flush_interval_commit_log=20, flush_interval_consume_queue=50)
    (block,) = (block for block in shell_blocks() if "cp -a store/commitlog backup" in block)
    acknowledged, stop = [0], threading.Event()

    def send() -> None:
        with group.client() as client:
            while not stop.wait(0.002):
                acknowledged[0] += len(client.send_batch("load", [b"x" * 900] * 50, keys=["key"] * 50))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for line in block.splitlines():
            # A large store takes long to copy: meanwhile the log grows and the durable marks advance.
            mark = group.words()["commitlog_mark"]
            wait_until(lambda mark=mark: group.words()["commitlog_mark"] > mark + (3 << 20), 60, "more log")
            before = acknowledged[0]
            subprocess.run(["bash", "-ec", line], cwd=tmp_path, check=True, timeout=60)
    finally:
        stop.set()
        sender.join()
    copy = make_group("backup")
    with copy.client() as client:
        assert client.count("load") >= before
    assert copy.words()["damage_holes"] == 0
    output_of(copy, "mqproc store verify ./backup", 0)


def test_loss_window_matches_the_default_options() -> None:
    options = Options()
    pages, seconds = options.flush_commit_log_least_pages, options.flush_commit_log_thorough_interval // 1000
    (row,) = re.findall(r"^\| power loss.*$", OPERATIONS, re.MULTILINE)
    for promised in (
        f"`flush_interval_commit_log`, {options.flush_interval_commit_log} ms",
        f"`flush_commit_log_least_pages`, {pages} pages of {PAGE_BYTES // 1024} KiB",
        f"`flush_commit_log_thorough_interval`, {seconds} s",
    ):
        assert promised in row


def test_retention_defaults_match_the_options() -> None:
    options = Options()
    for promised in (
        f"`file_reserved_time` ({options.file_reserved_time} h)",
        f"`disk_max_used_space_ratio` ({options.disk_max_used_space_ratio} %)",
        f"`disk_space_clean_forcibly_ratio` ({options.disk_space_clean_forcibly_ratio} %)",
        f"`delete_when` ({options.delete_when})",
    ):
        assert promised in OPERATIONS


def test_api_guide_matches_the_docstrings() -> None:
    """`python -m tests.guides.api_reference` writes it."""
    assert api_reference.TARGET.read_text() == api_reference.reference()

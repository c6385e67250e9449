"""The command line: help texts, one-line errors, exit codes, quick start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
import pytest

from mqproc.cli.main import EXIT_CODES, cli
from mqproc.cli.options import SIZE, Command, CommandGroup
from mqproc.errors import ERROR_BY_CODE
from mqproc.paths import StorePaths, check_may_be_store
from tests.client.memory_roles import MemoryRoles
from tests.support.command_line import call


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            yield from walk(found, (*path, name))


ALL = list(walk(cli))
IDS = [" ".join(path) or "mqproc" for path, _ in ALL]


@pytest.mark.parametrize(("path", "command"), ALL, ids=IDS)
def test_commands_and_options_have_help_texts(path: tuple[str, ...], command: click.Command) -> None:
    assert command.help
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, f"{path} {param.opts}"


@pytest.mark.parametrize(("path", "command"), ALL, ids=IDS)
def test_commands_have_common_options_and_help(path: tuple[str, ...], command: click.Command) -> None:
    assert isinstance(command, (Command, CommandGroup))
    names = {name for param in command.params for name in param.opts}
    assert {"--store", "--config", "--set", "--output", "--json", "--timeout", "--color", "--verbose"} <= names
    assert call(*path, "--help").code == 0


def test_overview_matches_command_summaries() -> None:
    context = click.Context(cli)
    assert isinstance(cli, CommandGroup)
    for name, (_, short_help) in cli.lazy.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(120) == short_help, name


def test_documented_commands_exist() -> None:
    names = {" ".join(path) for path, _ in ALL}
    expected = {
        "up", "down", "restart", "run", "status", "send", "import", "tail", "stat", "demo", "topic create",
        "topic list", "topic info", "topic delete", "message get", "message key", "message offset", "message range",
        "message scan", "store info", "store dump", "store retention", "config show", "config check", "config doc",
        "bench append", "bench retention", "bench dispatch", "bench pull", "bench query", "bench e2e", "bench delay",
        "completion",
    }  # fmt: skip
    assert expected <= names


def test_help_lists_exit_codes_of_all_errors() -> None:
    text = call("--help").out
    for code, meaning in EXIT_CODES.items():
        assert any(line.split(maxsplit=1) == [str(code), meaning] for line in text.splitlines()), code
    assert {error.exit_code for error in ERROR_BY_CODE.values()} <= set(EXIT_CODES)


def test_send_without_answer_exits_as_timeout(tmp_path: Path) -> None:
    (tmp_path / "mqproc").mkdir(mode=0o700)
    with MemoryRoles(tmp_path) as roles:
        roles.behaviour = lambda request: True
        began_s = time.monotonic()
        outcome = call("send", "orders", "x", "--store", tmp_path, "--timeout", "100ms")
    assert time.monotonic() - began_s >= 0.1
    assert outcome.code == 4
    text = r"mqproc: \S+/writer.sock: no answer in [\d.]+ s; the request may be carried out yet\n"
    assert re.fullmatch(text, outcome.err), outcome.err


def test_mistyped_command_gets_a_suggestion() -> None:
    outcome = call("tial")
    assert outcome.code == 2
    assert outcome.err == "mqproc: No such command 'tial'; did you mean 'tail'?; see mqproc --help\n"
    assert "did you mean 'create'" in call("topic", "craete").err


def test_command_of_other_tools_gets_a_suggestion() -> None:
    for word, meant in (("start", "up"), ("stop", "down"), ("help", "--help")):
        assert call(word).err == f"mqproc: No such command '{word}'; did you mean '{meant}'?; see mqproc --help\n"
    assert "did you mean '--help'?; see mqproc topic --help" in call("topic", "help").err
    assert "there are: create," in call("topic", "start").err


def test_missing_argument_is_one_sentence() -> None:
    outcome = call("topic", "create")
    assert (outcome.code, outcome.err) == (
        2,
        "mqproc: Missing argument 'TOPIC'; see mqproc topic create --help\n",
    )


def test_invalid_choice_is_one_line() -> None:
    outcome = call("completion")
    assert (outcome.code, outcome.err) == (
        2,
        "mqproc: Missing argument 'SHELL'. Choose from: bash, zsh, fish; see mqproc completion --help\n",
    )
    wrong = call("restart", "writter")
    assert (wrong.code, wrong.err.count("\n"), wrong.err.count("index-flusher")) == (2, 1, 1)
    assert wrong.err.startswith("mqproc: Invalid value for 'ROLE': 'writter' is not one of 'writer', ")


@pytest.mark.parametrize("options", [(), ("x", "--count", "3")])
def test_send_without_group_does_not_read_stdin(tmp_path: Path, options: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"first\nsecond\n")
    os.close(writer)
    command = mqproc("send", "orders", *options, "--store", str(tmp_path))
    outcome = subprocess.run(command, stdin=reader, capture_output=True, text=True, env=environment(), check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr.count("\n")) == (9, "", 1)
    assert "no group serves this store now" in outcome.stderr
    assert os.read(reader, 100) == b"first\nsecond\n"
    os.close(reader)


def test_error_is_one_line_and_verbose_adds_traceback(tmp_path: Path) -> None:
    outcome = call("status", "--store", tmp_path)
    assert outcome.code == 9
    assert outcome.err.count("\n") == 1
    assert f"mqproc up --store {tmp_path}" in outcome.err
    assert "Traceback" in call("status", "--store", tmp_path, "--verbose").err


def test_missing_store_is_a_usage_error() -> None:
    outcome = call("status")
    assert outcome.code == 2
    assert "--store DIR" in outcome.err


def test_common_options_work_before_and_after_the_command(tmp_path: Path) -> None:
    before = call("--store", tmp_path, "--json", "config", "show", "max_queues")
    after = call("config", "show", "max_queues", "--store", tmp_path, "--output", "json")
    assert before.json == after.json


@pytest.mark.parametrize(
    ("text", "size"), [("100", 100), ("64KiB", 65536), ("10MB", 10**7), ("1g", 1 << 30), ("2k", 2048)]
)
def test_sizes_accept_units(text: str, size: int) -> None:
    assert SIZE.convert(text, None, None) == size


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}


def mqproc(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mqproc", *arguments]


def test_closed_pipe_ends_quietly() -> None:
    with subprocess.Popen(
        mqproc("config", "doc"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(30) == 0


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    from tests.support.fakes import make_control

    make_control(tmp_path).close()
    command = mqproc("stat", "--watch", "--store", str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["stat"], ["status"], ["config", "check"]])
def test_start_imports_no_slow_modules(arguments: list[str], tmp_path: Path) -> None:
    """Times depend on the machine, imports do not: the compiler, Arrow, the client."""
    code = (
        "import sys; from mqproc.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'numba', 'pyarrow', 'mqproc.client', 'asyncio')))"
    )
    command = [sys.executable, "-c", code, *arguments, "--store", str(tmp_path)]
    null = subprocess.DEVNULL
    assert subprocess.run(command, stdout=null, stderr=null, env=environment(), check=False).returncode == 0


def test_client_commands_do_not_import_numba() -> None:
    """It takes longer than the rest of `mqproc topic list`."""
    code = (
        "import importlib, sys; from mqproc.cli.main import cli\n"
        "for name in cli.lazy.keys() - {'top', 'doctor'}:\n"
        "    importlib.import_module(cli.lazy[name][0].partition(':')[0])\n"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_help_and_stat_start_quickly(tmp_path: Path) -> None:
    """By processor time, so that a busy machine does not matter."""
    from tests.support.fakes import make_control

    make_control(tmp_path).close()
    for arguments in (["--help"], ["stat", "--store", str(tmp_path)]):
        took = min(_cpu_seconds(mqproc(*arguments)) for _ in range(5))
        assert took < 0.4, arguments


def _cpu_seconds(command: list[str]) -> float:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_completion_scripts_are_those_of_click() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_MQPROC_COMPLETE" in call("completion", shell).out


def test_interrupt_in_a_command_exits_130() -> None:
    with mock.patch("mqproc.cli.admin.config.environment_warnings", side_effect=KeyboardInterrupt):
        assert call("config", "check").code == 130


@pytest.mark.parametrize("module", ["mqproc.errors", "msgspec", "mqproc.cli.output"])
def test_interrupt_during_start_exits_130_without_traceback(module: str) -> None:
    """The signal arrives while the command line's modules are loaded."""
    code = (
        "import signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *others):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from mqproc.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_command_group_without_command_shows_help() -> None:
    outcome = call("topic")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Usage: mqproc topic")
    assert outcome.err == call("topic", "--help").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("group", "reset", "g", "--by-duration", "15"), "'15' is not a duration; write 500ms, 90s, 15m, 2h"),
        (("tail", "t", "--tag", "a |"), "'a |' is not a tag; || separates tags"),
        (("tail", "t", "--tag", "a | b"), "'a | b' is not a tag; || separates tags"),
        (("message", "range", "t", "--tag", "a ||"), "'' is not a tag; || separates tags"),
    ],
)
def test_value_that_cannot_be_meant_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    refused = call(*arguments, "--store", tmp_path)
    assert refused.code == 2
    assert said in refused.err


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_help_is_complete_without_docstrings(how: str) -> None:
    """With -OO, which strips them."""
    command = [sys.executable, *(["-OO"] if how == "flag" else []), "-m", "mqproc", "topic", "--help"]
    environment = os.environ | ({"PYTHONOPTIMIZE": "2"} if how == "variable" else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert "Create, list, inspect and delete topics." in done.stdout


def test_import_on_another_system_says_what_is_needed() -> None:
    program = "import sys; sys.platform = 'darwin'; import mqproc"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "ImportError: mqproc requires Linux, and this is darwin: run it in a container" in done.stderr
    assert "docker run" in done.stderr


def test_folder_with_other_files_is_no_store(tmp_path: Path) -> None:
    """`up` makes no store there unless forced, and no command advises to start a group there."""
    (tmp_path / "holiday.jpg").write_bytes(b"")
    for command in ("status", "down", "up"):
        refused = call(command, "--store", tmp_path)
        assert refused.code == 3
        assert f"{tmp_path}: not a store, and not empty" in refused.err
        assert ("--force" in refused.err) == (command == "up")
        assert "mqproc up" not in refused.err
    assert os.listdir(tmp_path) == ["holiday.jpg"]


@pytest.mark.parametrize("name", ["lost+found", "mqproc.toml", "commitlog", "config"])
def test_folder_of_a_store_or_volume_may_be_started(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    check_may_be_store(StorePaths(tmp_path))


def test_options_with_one_meaning_share_their_names() -> None:
    """A name that one command takes for a limit or for the execution of a plan, others take too."""
    names = {"execute": {"--execute", "--yes"}, "limit": {"-n", "--max", "--limit"}}
    found = 0
    for path, command in ALL:
        for option in command.params:
            for meaning, all_of_them in names.items():
                text = str(getattr(option, "help", ""))
                is_limit = text.startswith(("At most N", "Print at most N", "Print N messages"))
                if (is_limit and "per second" not in text and meaning == "limit") or (
                    meaning == "execute" and "--execute" in option.opts
                ):
                    assert all_of_them <= set(option.opts), (path, option.opts)
                    found += 1
    assert found > 12

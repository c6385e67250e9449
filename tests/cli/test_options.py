"""Store and options come from flag, environment, config file, default, in this order."""

from __future__ import annotations

import re
import shlex
import threading
import time
from pathlib import Path

import click
import psutil
import pytest

from mqproc.cli.options import SECONDS, Invocation, process_start_s
from mqproc.config.options import FIELDS
from mqproc.errors import ConfigurationError
from tests.support.command_line import call
from tests.support.group import Group


def source_of(outcome_json: dict[str, list[dict[str, str]]], name: str) -> tuple[str, str]:
    row = next(row for row in outcome_json["options"] if row["name"] == name)
    return row["value"], row["source"]


def test_store_comes_from_flag_environment_or_file(tmp_path: Path) -> None:
    config = tmp_path / "mqproc.toml"
    config.write_text('store = "from-file"\nmax_queues = 4096\n')
    show = ("config", "show", "--json", "--config", config)
    flag = call(*show, "--store", "/a", MQPROC_STORE="/b").json
    environment = call(*show, MQPROC_STORE="/b").json
    file = call(*show).json
    assert source_of(flag, "store") == ("/a", "--store")
    assert source_of(environment, "store") == ("/b", "MQPROC_STORE")
    assert source_of(file, "store") == (str(tmp_path / "from-file"), str(config))


def test_store_missing_reports_mistyped_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call("status", MQPROC_STORRE="/data")
    assert outcome.code == 2
    assert "no store is named, no group runs, and ./mqproc-store is missing: give --store DIR, set" in outcome.err
    assert "; MQPROC_STORRE is not an option, and ignored; did you mean MQPROC_STORE?; see mqproc status" in outcome.err


def test_options_name_their_source(tmp_path: Path) -> None:
    config = tmp_path / "mqproc.toml"
    config.write_text("max_queues = 4096\nmax_spin_us = 1\nmetrics_port = 1\n")
    arguments = ("config", "show", "--json", "--config", config, "--set", "metrics_port=3")
    found = call(*arguments, MQPROC_MAX_SPIN_US="2").json
    assert source_of(found, "max_queues") == (4096, str(config))
    assert source_of(found, "max_spin_us") == (2, "MQPROC_MAX_SPIN_US")
    assert source_of(found, "metrics_port") == (3, "--set")
    assert source_of(found, "listen_port")[1] == "default"


def test_broker_conf_gives_store_and_options(tmp_path: Path) -> None:
    config = tmp_path / "broker.conf"
    config.write_text("storePathRootDir=/data/rocketmq\nmaxMessageSize=65536\nbrokerName=a\n")
    found = call("config", "show", "--json", "--config", config).json
    assert source_of(found, "store") == ("/data/rocketmq", str(config))
    assert source_of(found, "max_message_size") == (65536, str(config))


def test_default_config_file_is_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mqproc.toml").write_text("max_queues = 512\n")
    assert call("config", "show", "max_queues", "--json").json["options"][0]["value"] == 512


def test_wrong_configuration_exits_8(tmp_path: Path) -> None:
    missing = call("config", "check", "--config", tmp_path / "none.toml")
    assert (missing.code, missing.err.count("\n")) == (8, 1)
    wrong = call("config", "check", "--set", "max_queues=1")
    assert wrong.code == 8
    assert "from 16 to 1,048,576" in wrong.err
    broken = tmp_path / "broken.toml"
    broken.write_text("store = [")
    assert call("config", "check", "--config", broken).code == 8


@pytest.mark.parametrize("arguments", ["config check", "config show", "up --store store"])
def test_config_options_not_a_table_is_wrong_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mqproc.toml").write_text("mqproc = 3\n")
    refused = call(*arguments.split())
    assert (refused.code, refused.err.count("\n")) == (8, 1)
    assert "mqproc.toml: mqproc = 3 is not a table" in refused.err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("line", "name"), [('store = "store"', "store"), ("max_queues = 77", "max_queues")])
def test_config_unknown_top_level_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mqproc.toml").write_text(f'title = "of another tool"\n{line}\n[mqproc]\nmax_message_size = 65536\n')
    for arguments in (["config", "check"], ["status"]):
        refused = call(*arguments)
        told = f"mqproc: mqproc.toml: {name} is outside of [mqproc]: options belong to it, or to no table\n"
        assert (refused.code, refused.err) == (8, told)


@pytest.mark.parametrize(
    "arguments",
    [
        "status --store {loop}/store",
        "send orders hello --store {loop}/store",
        "store dump {loop}/store",
        "store verify {loop}",
        "up --detach --store {loop}",
        "store export {store} --topic orders --to {loop}/orders.jsonl",
        "config check --config {loop}/mqproc.toml",
    ],
)
def test_inaccessible_store_is_not_reported_as_missing(tmp_path: Path, arguments: str) -> None:
    """Nor does the message suggest to create it."""
    loop, store = tmp_path / "loop", tmp_path / "store"
    loop.symlink_to(loop)
    (store / "commitlog").mkdir(parents=True)
    refused = call(*arguments.format(loop=loop, store=store).split())
    assert refused.code not in (0, 5)
    assert "Too many levels of symbolic links" in refused.err
    assert "no such" not in refused.err


@pytest.mark.parametrize("arguments", ["status --store", "store verify", "store info", "doctor --store"])
def test_dangling_symlink_names_its_target(tmp_path: Path, arguments: str) -> None:
    """The error used to say that no folder exists, which `mqproc up` would create."""
    (tmp_path / "store").symlink_to("nowhere")
    told = call(*arguments.split(), tmp_path / "store")
    assert f"{tmp_path}/store: a symlink to {tmp_path}/nowhere, which does not exist" in told.out + told.err
    assert "mqproc up" not in told.err
    below = call(*arguments.split(), tmp_path / "store" / "a" / "b")
    there = f"{tmp_path}/store/a/b: {tmp_path}/store is a symlink to {tmp_path}/nowhere, which does not exist"
    assert there in below.out + below.err
    assert "mqproc up" not in below.err


@pytest.mark.parametrize(
    "arguments", [("status", "--store", ""), ("up", "--store", ""), ("store", "verify", ""), ("store", "dump", "")]
)
def test_empty_store_is_not_the_current_folder(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = call(*arguments)
    assert refused.code == 2
    assert "the path is empty; . is the current folder" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_unknown_home_folder_is_wrong_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mqproc.toml").write_text('store = "~no-such-user/store"\n')
    refused = call("status")
    assert refused.code == 8
    assert refused.err.startswith("mqproc: mqproc.toml: '~no-such-user/store': Could not determine home")


def test_suggested_command_quotes_the_store(tmp_path: Path) -> None:
    store = tmp_path / "it's a store"
    for _ in range(2):
        refused = call("status", "--store", store)
        told = re.search(r"mqproc up --store (.*) (?:creates|starts)", refused.err)
        assert told is not None
        assert shlex.split(told[1]) == [str(store)]
        store.mkdir(exist_ok=True)


def test_config_file_removed_meanwhile_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MQPROC_CONFIG", raising=False)
    invocation = Invocation()
    assert invocation.options().max_queues == FIELDS["max_queues"].default
    config = tmp_path / "mqproc.toml"
    config.write_text("max_queues = 4096\n")
    assert invocation.options().max_queues == 4096
    config.unlink()
    with pytest.raises(ConfigurationError, match=r"^mqproc\.toml: no such file$"):
        invocation.options()


@pytest.mark.parametrize("config", ["/dev/null", "/tmp"])
def test_config_that_is_not_a_file_is_not_missing(config: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{config}: not a regular file$"):
        Invocation(config=Path(config)).options()


def test_start_time_is_that_of_the_process() -> None:
    made_s = psutil.Process().create_time()
    least_s = time.time() - made_s
    ago_s = time.monotonic() - process_start_s()
    assert least_s - 1.0 <= ago_s <= time.time() - made_s + 1.0


def test_start_time_unknown_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str, **_options: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    # Filter by this module's name: other threads of the process open files, too.
    monkeypatch.setattr("mqproc.cli.options.open", missing, raising=False)
    called_s = time.monotonic()
    began_s = process_start_s()
    assert called_s <= began_s <= time.monotonic()


@pytest.mark.parametrize("text", ["9" * 400, "99999999999999999999w"])
def test_seconds_too_large_are_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is longer than 53,375,995,583d"):
        SECONDS.convert(text, None, None)
    assert SECONDS.convert("0.29", None, None) == 0.29


def test_timeout_may_exceed_the_system_limit(group: Group) -> None:
    """Sleeps and sockets are limited to 292 years, poll to 24 days."""
    assert SECONDS.convert("99999999999", None, None) == SECONDS.convert("900000d", None, None) == threading.TIMEOUT_MAX
    assert call("status", "--store", group.store, "--timeout", "99999999999").code == 0

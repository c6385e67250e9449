"""Options from a RocketMQ `broker.conf`: those that mqproc supports, and the log's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.config.options import FIELDS, PROFILES, Profile, rocketmq_name
from mqproc.config.parse import delete_hours, load_options, load_settings, read_lines
from mqproc.errors import ConfigurationError
from mqproc.util.units import delays_ms_of


def write_conf(folder: Path, *lines: str) -> Path:
    path = folder / "broker.conf"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_broker_conf_known_names_are_used_others_ignored(tmp_path: Path) -> None:
    conf = write_conf(
        tmp_path,
        "# maxIndexNum = 5",
        "brokerName = a=b",
        " maxMessageSize = 65536 ",
        "flushDiskType=SYNC_FLUSH",
        "! a comment too",
        "brokerIP2 = 10.0.0.2",
        "",
    )
    found = load_options(conf, environment={})
    assert (found.max_message_size, found.sync_flush, found.max_index_num) == (65536, True, 20_000_000)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mapedFileSizeCommitLog=1048576", "'mapedFileSizeCommitLog'; did you mean mappedFileSizeCommitLog?"),
        ("flushDiskTypes=SYNC_FLUSH", "'flushDiskTypes'; did you mean flushDiskType?"),
        ("flushDiskTipe=SYNC_FLUSH", "'flushDiskTipe'; did you mean flushDiskType?"),
        ("flushDiksType=SYNC_FLUSH", "'flushDiksType'; did you mean flushDiskType?"),
        ("FlushDiskType=SYNC_FLUSH", "'FlushDiskType'; did you mean flushDiskType?"),
        ("storePathRootDirs=/data", "'storePathRootDirs'; did you mean storePathRootDir?"),
        ("flushDiskType", "'flushDiskType' is not NAME=VALUE"),
        ("flushDiskType: SYNC_FLUSH", "'flushDiskType: SYNC_FLUSH' is not NAME=VALUE"),
        ("= SYNC_FLUSH", "'= SYNC_FLUSH' is not NAME=VALUE"),
    ],
)
def test_broker_conf_mistaken_line_is_reported(tmp_path: Path, line: str, said: str) -> None:
    """An ignored line would leave an option at its default."""
    conf = write_conf(tmp_path, "# a comment", "namesrvAddr=localhost:9876", line)
    with pytest.raises(ConfigurationError) as caught:
        load_options(conf, environment={})
    assert str(caught.value).startswith(f"{conf}, line 3: ")
    assert str(caught.value).endswith(said)


def test_broker_conf_backslash_continues_line(tmp_path: Path) -> None:
    """RocketMQ's reader supports this, and lists of name servers use it."""
    conf = write_conf(
        tmp_path,
        "namesrvAddr=one:9876;\\",
        "    two:9876",
        "# a comment does not \\",
        "flushDiskType=\\",
        "  SYNC_FLUSH",
        "brokerName=a\\\\",
        "maxMessageSize=65536 \\",
    )
    assert [(line.number, line.name, line.value) for line in read_lines(conf)] == [
        (1, "namesrvAddr", "one:9876;two:9876"),
        (4, "flushDiskType", "SYNC_FLUSH"),
        (6, "brokerName", "a\\\\"),
        (7, "maxMessageSize", "65536"),
    ]
    assert load_options(conf, environment={}).sync_flush


@pytest.mark.parametrize("name", [name for name in FIELDS if name != rocketmq_name(name)])
def test_broker_conf_snake_case_name_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"line 1: .* did you mean {rocketmq_name(name)}"):
        load_options(write_conf(tmp_path, f"{name}=1"), environment={})


@pytest.mark.parametrize(
    "lines",
    [
        ["storePathRootDir=/data/store", "storePathCommitLog=/data/store/commitlog"],
        ["storePathCommitLog=/data/store/commitlog"],
        ["storePathRootDir=/data/store", "storePathCommitLog=", "readOnlyCommitLogStorePaths="],
        ["#storePathCommitLog=/a,/b"],
    ],
)
def test_broker_conf_log_path_in_store_is_accepted(tmp_path: Path, lines: list[str]) -> None:
    load_options(write_conf(tmp_path, *lines), environment={})


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["storePathCommitLog=/a/commitlog,/b/commitlog"], "storePathCommitLog = /a/commitlog,/b/commitlog"),
        (["storePathCommitLog=/a/log"], "the log can only be /a/commitlog"),
        (["storePathRootDir=/data", "storePathCommitLog=/fast/commitlog"], "the log can only be /data/commitlog"),
        (["readOnlyCommitLogStorePaths=/old/commitlog"], "the log can only be in one folder"),
    ],
)
def test_broker_conf_log_path_elsewhere_is_refused(tmp_path: Path, lines: list[str], text: str) -> None:
    """Otherwise its segments would seem lost, and a new log would begin."""
    with pytest.raises(ConfigurationError, match=text):
        load_options(write_conf(tmp_path, *lines), environment={})


@pytest.mark.parametrize(("text", "size"), [("1048576", 1 << 20), ("1MiB", 1 << 20), ("2m", 2 << 20)])
def test_size_option_accepts_units(tmp_path: Path, text: str, size: int) -> None:
    name = "mapped_file_size_commit_log"
    toml = tmp_path / "mqproc.toml"
    toml.write_text(f'{name} = "{text}"\n')
    nothing: dict[str, str] = {}
    assert load_options(None, [f"{name}={text}"], nothing).mapped_file_size_commit_log == size
    assert load_options(None, [], {"MQPROC_MAPPED_FILE_SIZE_COMMIT_LOG": text}).mapped_file_size_commit_log == size
    assert load_options(toml, [], nothing).mapped_file_size_commit_log == size


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("mapped_file_size_commit_log=1PiB", "--set: mapped_file_size_commit_log: '1PiB' is not a size; write"),
        ("mapped_file_size_commit_log=4GiB", "4,294,967,296 is out of range"),
        ("max_queues=1k", "max_queues = '1k' is not a whole number"),
        ("flush_interval_commit_log=1k", "is not a whole number"),
    ],
)
def test_size_option_invalid_text_is_refused(flag: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_options(None, [flag], {})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("METRICS_HOST", "a\udcff", r"metrics_host = 'a\\udcff' is not printable text"),
        ("BROKER_NAME", "a\x01", r"broker_name = 'a\\x01' is not printable text"),
        ("BROKER_NAME", "a b", "broker_name = 'a b' contains a space"),
        ("BROKER_IP", "localhost", "broker_ip = 'localhost' is not an IP address"),
        ("BROKER_IP", "", "broker_ip = '' is not an IP address"),
    ],
)
def test_text_option_unusable_by_roles_is_refused(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^MQPROC_{variable}: {said}"):
        load_options(environment={f"MQPROC_{variable}": value})


def test_list_option_accepts_line_breaks() -> None:
    given = {"MQPROC_MESSAGE_DELAY_LEVEL": "1s 5s\n10s\t1m\n", "MQPROC_DELETE_WHEN": "04;\n16\n"}
    options = load_options(environment=given)
    assert delays_ms_of(options.message_delay_level) == (1_000, 5_000, 10_000, 60_000)
    assert delete_hours(options.delete_when) == {4, 16}


def test_conflicting_options_error_names_each_source(tmp_path: Path) -> None:
    toml = tmp_path / "mqproc.toml"
    toml.write_text('delete_when = "99"\n')
    with pytest.raises(ConfigurationError, match=rf"^{toml}: delete_when = '99' is out of range"):
        load_options(toml, [], {})
    toml.write_text("max_pull_bytes = 67108864\n")
    with pytest.raises(ConfigurationError, match=rf"^--set and {toml}: max_pull_bytes = .* exceeds max_frame_bytes"):
        load_options(toml, ["max_frame_bytes=1048576"], {})


def test_profile_sets_sizes_that_no_source_sets(tmp_path: Path) -> None:
    toml = tmp_path / "mqproc.toml"
    toml.write_text('profile = "embedded"\nmax_index_num = 5000\n')
    found = load_settings(toml, ["max_hash_slot_num=5000000"], {})
    sizes = {name: (found[name].value, found[name].source) for name in PROFILES[Profile.EMBEDDED]}
    assert sizes == {
        "mapped_file_size_commit_log": (64 << 20, "profile embedded"),
        "max_hash_slot_num": (5_000_000, "--set"),
        "max_index_num": (5000, str(toml)),
    }
    assert [name for name, setting in found.items() if setting.is_explicit] == [
        "profile", "max_hash_slot_num", "max_index_num",
    ]  # fmt: skip


def test_profile_of_a_command_yields_to_every_source() -> None:
    assert load_settings(environment={}, profile=Profile.EMBEDDED)["max_index_num"].value == 1_000_000
    given = {"MQPROC_PROFILE": "server"}
    assert load_settings(environment=given, profile=Profile.EMBEDDED)["max_index_num"].value == 20_000_000

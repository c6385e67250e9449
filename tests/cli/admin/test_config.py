"""`mqproc config` explains every option."""

from __future__ import annotations

import re
from pathlib import Path

import mqproc
from mqproc.config.options import FIELDS
from mqproc.config.parse import OTHER_VARIABLES, environment_warnings
from tests.support.command_line import call


def test_config_doc_explains_every_option() -> None:
    rows = {row["name"]: row for row in call("config", "doc", "--json").json["options"]}
    assert set(rows) == set(FIELDS)
    assert all(row["doc"] and row["rocketmq_name"] for row in rows.values())
    assert rows["max_queues"]["bounds"] == "16…1,048,576"
    text = call("config", "doc", "flush_disk_type").out
    assert "flush_disk_type = ASYNC_FLUSH" in text
    assert "broker.conf: flushDiskType" in text


def test_config_show_lists_all_or_changed_options() -> None:
    assert len(call("config", "show").out.splitlines()) == len(FIELDS) + 1
    changed = call("config", "show", "--changed", "--set", "max_queues=77").out
    assert [line.split()[:2] for line in changed.splitlines()[1:]] == [["max_queues", "77"]]


def test_config_check_valid_succeeds() -> None:
    assert f"{len(FIELDS)} options are valid, 1 of them set" in call("config", "check", "--set", "max_queues=77").out


def test_config_check_lists_ignored_broker_conf_names(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("namesrvAddr=localhost:9876\nmaxMessageSize=65536\nbrokerId=0\nstorePathRootDir=/data\n")
    checked = call("config", "check", "--config", conf)
    assert checked.code == 0
    assert checked.out.splitlines()[1:] == ["ignored, as mqproc has no such options: namesrvAddr, brokerId"]
    assert call("config", "check", "--config", conf, "--json").json["ignored"] == ["namesrvAddr", "brokerId"]


def test_broker_conf_misspelt_name_is_wrong_configuration(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerId=0\nflush_disk_type=SYNC_FLUSH\n")
    for command in (("config", "check"), ("up", "--store", tmp_path / "store")):
        refused = call(*command, "--config", conf)
        assert refused.code == 8
        assert f"{conf}, line 2: no option is called 'flush_disk_type'; did you mean flushDiskType?" in refused.err


def test_environment_misspelt_variable_is_reported(tmp_path: Path) -> None:
    misspelt = {"MQPROC_FLUSH_DISK_TYP": "SYNC_FLUSH", "MQPROC_SERVICE_HOST": "10.0.0.1"}
    reported = [
        "MQPROC_FLUSH_DISK_TYP is not an option, and ignored; did you mean MQPROC_FLUSH_DISK_TYPE?",
        "MQPROC_SERVICE_HOST is not an option, and ignored",
    ]
    checked = call("config", "check", **misspelt)
    assert (checked.code, checked.out.splitlines()[1:]) == (0, reported)
    assert call("config", "check", "--json", **misspelt).json["warnings"] == reported
    # The start is refused too, but the misspelt name is reported first.
    assert (
        call("up", "--store", tmp_path / "store", "--set", "writer_cpus=4095", **misspelt).out.splitlines() == reported
    )


def test_environment_kubernetes_service_variable_is_ignored() -> None:
    """Kubernetes sets MQPROC_METRICS_PORT for a service called mqproc-metrics."""
    service = {"MQPROC_METRICS_PORT": "tcp://10.0.0.1:5557", "MQPROC_METRICS_PORT_5557_TCP": "tcp://10.0.0.1:5557"}
    checked = call("config", "check", "--json", **service).json
    assert checked["set"] == 0
    assert checked["warnings"] == [
        "MQPROC_METRICS_PORT is set by Kubernetes for a service, and ignored",
        "MQPROC_METRICS_PORT_5557_TCP is not an option, and ignored",
    ]
    wrong = call("config", "check", MQPROC_METRICS_PORT="10.0.0.1:5557")
    assert (wrong.code, "MQPROC_METRICS_PORT: metrics_port = '10.0.0.1:5557'" in wrong.err) == (8, True)


def test_environment_known_variables_are_accepted() -> None:
    sources = [path.read_text() for path in Path(mqproc.__file__).parent.rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'"(MQPROC_[A-Z_]+[A-Z])"', source)}
    assert named == set(OTHER_VARIABLES)
    assert environment_warnings(dict.fromkeys(named, "")) == []
    assert environment_warnings({f"MQPROC_{name.upper()}": "" for name in FIELDS} | {"MQPROCESS": ""}) == []


def test_config_show_unknown_name_is_a_usage_error() -> None:
    assert call("config", "doc", "nothing").code == 2

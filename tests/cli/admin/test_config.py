"""`mqproc config` explains every option."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mqproc
from mqproc.config.options import FIELDS
from mqproc.config.parse import OTHER_VARIABLES, environment_warnings
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.topics import queues_in_use
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


def test_config_sizes_have_units_and_can_be_set_again() -> None:
    name = "mapped_file_size_commit_log"
    row = call("config", "show", name, "--set", f"{name}=16MiB").out.splitlines()[1]
    assert row.split()[:3] == [name, "16MiB", "--set"]
    (exact,) = call("config", "show", name, "--json").json["options"]
    assert (exact["value"], exact["unit"]) == (1 << 30, "bytes")
    described = call("config", "doc", name).out
    assert described.startswith(f"{name} = 1GiB  (bytes)\n")


def test_config_show_unknown_name_is_a_usage_error() -> None:
    assert call("config", "doc", "nothing").code == 2


UNSUPPORTED = {
    "popConsumerKVServiceEnable": "true",
    "enableRetryTopicV2": "true",
    "timerRocksDBEnable": "True",
    "transRocksDBEnable": "true",
    "storeType": "defaultRocksDB",
    "enableDLegerCommitLog": "true",
    "configManagerVersion": "v2",
    "messageStorePlugIn": "org.apache.rocketmq.tieredstore.TieredMessageStore",
}


def test_config_check_names_all_unsupported_options(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerId=0\n" + "".join(f"{name} = {value}\n" for name, value in UNSUPPORTED.items()))
    for command in (("config", "check"), ("up", "--store", tmp_path / "store")):
        refused = call(*command, "--config", conf)
        assert refused.code == 8
        for number, (name, value) in enumerate(UNSUPPORTED.items(), 2):
            assert f"{conf}, line {number}: {name} = {value} is not supported: " in refused.err
    assert not (tmp_path / "store").exists()


def test_config_check_ignore_kvstore_keeps_others_refused(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("popConsumerKVServiceEnable=true\n")
    checked = call("config", "check", "--config", conf, "--set", "ignore_kvstore=true")
    assert (checked.code, "popConsumerKVServiceEnable" in checked.out) == (0, True)
    conf.write_text("popConsumerKVServiceEnable=true\nenableDLegerCommitLog=true\n")
    refused = call("config", "check", "--config", conf, "--set", "ignore_kvstore=true")
    assert (refused.code, "popConsumer" in refused.err, "enableDLegerCommitLog" in refused.err) == (8, False, True)


def test_config_check_unsupported_feature_turned_off_passes(tmp_path: Path) -> None:
    """A name's last line counts."""
    conf = tmp_path / "broker.conf"
    off = {"storeType": "default", "configManagerVersion": "v1", "messageStorePlugIn": ""}
    lines = [f"{name}={off.get(name, 'false')}" for name in UNSUPPORTED]
    conf.write_text("\n".join(["storeType=defaultRocksDB", *lines]))
    checked = call("config", "check", "--config", conf)
    assert (checked.code, checked.err) == (0, "")


def test_config_check_names_all_wrong_options(tmp_path: Path) -> None:
    file = tmp_path / "mqproc.toml"
    file.write_text("max_queues = 1\nmax_quees = 20\n")
    flags = ["--set", "flush_disk_type=X", "--set", "listen_port"]
    checked = call("config", "check", "--config", file, *flags, MQPROC_METRICS_PORT="-1")
    assert checked.code == 8
    for wrong in ("max_queues = 1", "'max_quees'", "flush_disk_type = 'X'", "--set listen_port", "metrics_port = -1"):
        assert checked.err.count(wrong) == 1, checked.err
    together = call("config", "check", "--set", "delete_when=77", "--set", "broker_name=a b")
    assert (together.code, len(together.err.splitlines())) == (8, 2)
    conf = tmp_path / "broker.conf"
    conf.write_text("maxMesageSize=1\nflushDiskTyp=x\nstorePathCommitLog=/elsewhere\ndeleteWhen=4\nmaxMessageSize=1\n")
    assert len(call("config", "check", "--config", conf).err.splitlines()) == 4
    conf.write_text("maxMessageSize=x\nenableDLegerCommitLog=true\nno line\n")
    said = call("config", "check", "--config", conf, "--set", "broker_ip=a").err
    assert [said.count(wrong) for wrong in ("'no line'", "maxMessageSize", "DLeger")] == [1, 0, 0], "it has no lines"
    conf.write_text("maxMessageSize=x\nenableDLegerCommitLog=true\n")
    said = call("config", "check", "--config", conf).err
    assert (said.count("max_message_size: 'x'"), said.count("enableDLegerCommitLog")) == (1, 1), said


def test_config_check_names_all_wrong_combinations() -> None:
    flags = ["--set", "broker_ip=host", "--set", "metrics_host=\x01", "--set", "broker_name=a b"]
    together = call("config", "check", *flags)
    assert (together.code, len(together.err.splitlines())) == (8, 3), together.err


def test_option_that_the_store_contradicts_is_wrong_configuration(tmp_path: Path) -> None:
    """The start and the checks before it name the number of queues above `max_queues`."""
    store = StorePaths(tmp_path)
    for queue in range(12):
        (store.consume_queue / "t" / str(queue)).mkdir(parents=True)
    store.config.mkdir()
    topic = {"topicName": "t", "readQueueNums": 18, "writeQueueNums": 16}
    store.topics.write_text(json.dumps({"topicConfigTable": {"t": topic, "u": topic | {"topicName": "u"}}}))
    few = ("--store", tmp_path, "--set", "max_queues=16")
    assert queues_in_use(StoreIO(), store) == 36
    started, checked = call("up", *few), call("config", "check", *few)
    for refused in (started, checked):
        assert refused.code == 8, refused
        assert "max_queues = 16: the store has 36 queues" in refused.err
    findings = call("doctor", *few, "--json").json["findings"]
    (found,) = [finding for finding in findings if finding["check"] == "queue-count"]
    assert found["level"] == "error"
    assert "max_queues=72" in found["mend"]
    assert call("config", "check", "--store", tmp_path, "--set", "max_queues=36").code == 0

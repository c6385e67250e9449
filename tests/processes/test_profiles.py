"""Profiles: file sizes of new stores, their disk space, and the floor of free space."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqproc
from mqproc.client.retry import NO_RETRY
from mqproc.config.options import PROFILES, Options, Profile
from mqproc.errors import ConfigurationError, DiskFullError
from mqproc.paths import StorePaths
from tests.support.command_line import call
from tests.support.group import Group, wait_until

EMPTY_BYTES_MAX = 150_000_000
USED_BYTES_MAX = 200_000_000
RUN_BYTES_MAX = 4_000_000_000
STORES = 20
BODY = b"x" * 1000
ROLES_OWN = {"metrics_port": 0}


def on_disk(store: Path) -> int:
    """Bytes of disk space, as `du` counts them."""
    shown = subprocess.run(["du", "-s", "--block-size=1", store], capture_output=True, text=True, check=True)
    return int(shown.stdout.split()[0])


def send_thousand(client: mqproc.Client) -> None:
    client.send_many([mqproc.Message("orders", BODY, keys=[f"order-{number}"]) for number in range(1000)])
    client.wait_dispatched()


def sizes(store: Path) -> dict[str, Any]:
    found = call("store", "info", store, "--json").json
    names = ("profile", "segment_bytes", "queue_file_bytes", "index_slots", "index_file_entries")
    return {name: found[name] for name in names}


def sizes_of(profile: Profile) -> dict[str, Any]:
    values = PROFILES[profile]
    return {
        "profile": profile,
        "segment_bytes": values["mapped_file_size_commit_log"],
        "queue_file_bytes": Options().consume_queue_file_bytes,
        "index_slots": values["max_hash_slot_num"],
        "index_file_entries": values["max_index_num"],
    }


@pytest.mark.parametrize("profile", [None, *Profile])
def test_opened_store_takes_megabytes(tmp_path: Path, profile: Profile | None) -> None:
    """Space is reserved as the log grows, so that a store of the profile `server` is small, too."""
    with mqproc.open(tmp_path / "store", profile=profile, options=ROLES_OWN) as client:
        assert on_disk(tmp_path / "store") < EMPTY_BYTES_MAX
        send_thousand(client)
        assert on_disk(tmp_path / "store") < USED_BYTES_MAX
        assert sizes(tmp_path / "store") == sizes_of(profile or Profile.EMBEDDED)
    assert on_disk(tmp_path / "store") < USED_BYTES_MAX


@pytest.mark.parametrize("flags", [(), ("--profile", "embedded"), ("--set", "profile=embedded")])
def test_up_makes_a_store_of_its_profile(tmp_path: Path, flags: tuple[str, ...]) -> None:
    up = call("up", "--detach", "--store", tmp_path / "store", "--set", "metrics_port=0", *flags)
    try:
        assert up.code == 0, up.err
        assert sizes(tmp_path / "store") == sizes_of(Profile.EMBEDDED if flags else Profile.SERVER)
    finally:
        call("down", "--store", tmp_path / "store")


def test_twenty_stores_fit_in_four_gigabytes(tmp_path: Path) -> None:
    """Two are made here, one used and one empty."""
    for name in ("empty", "used"):
        with mqproc.open(tmp_path / name, options=ROLES_OWN) as client:
            if name == "used":
                send_thousand(client)
    assert STORES * on_disk(tmp_path) < RUN_BYTES_MAX


@pytest.mark.slow
def test_twenty_stores_together_fit_in_four_gigabytes(tmp_path: Path) -> None:
    for number in range(STORES):
        with mqproc.open(tmp_path / str(number), options=ROLES_OWN) as client:
            send_thousand(client)
    assert on_disk(tmp_path) < RUN_BYTES_MAX


def test_existing_store_keeps_its_sizes(tmp_path: Path) -> None:
    """Also the index's, of which an empty store has no file yet."""
    store = tmp_path / "store"
    with mqproc.open(store, options=ROLES_OWN):
        pass
    group = Group(store)
    group.options = dict(ROLES_OWN)
    try:
        with group.start().client() as client:
            send_thousand(client)
        assert "option says" not in group.output.read_text()
        assert sizes(store) == sizes_of(Profile.EMBEDDED)
        assert group.stop() == 0
        group.options["profile"] = "server"
        group.start()
        assert "the store's files have 67,108,864, the option says 1,073,741,824" in group.output.read_text()
        assert sizes(store) == sizes_of(Profile.EMBEDDED) | {"profile": "embedded"}
    finally:
        group.close()


def test_explicit_size_is_used_and_shown_as_custom(tmp_path: Path) -> None:
    with mqproc.open(tmp_path / "store", options=ROLES_OWN | {"mapped_file_size_commit_log": "1MiB"}):
        found = sizes(tmp_path / "store")
    assert (found["profile"], found["segment_bytes"], found["index_file_entries"]) == ("custom", 1 << 20, 1_000_000)


def test_unknown_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^options: profile = 'tiny' is not one of server, embedded$"):
        mqproc.open(tmp_path / "store", profile="tiny")
    assert "'tiny' is not one of 'server', 'embedded'" in call("up", "--profile", "tiny", "--store", tmp_path).err


def test_sends_below_the_floor_are_refused(make_group: Callable[..., Group]) -> None:
    floor = 1 << 49
    group = make_group(disk_floor_bytes=floor)
    refusal = f"{floor + (2 << 20):,} bytes must be free, "
    option = f"(disk_floor_bytes = {floor:,} and two segments)"
    wait_until(lambda: group.words()["disk_full"], what="a refusal")
    with group.client(retry=NO_RETRY) as client, pytest.raises(DiskFullError) as refused:
        client.send("orders", b"x")
    status = call("status", "--store", group.store)
    doctor = call("doctor", "--store", group.store, "--set", f"disk_floor_bytes={floor}")
    for text in (group.output.read_text(), str(refused.value), status.out, doctor.out):
        flat = " ".join(text.split())
        assert refusal in flat
        assert option in flat
    assert status.code == 1


def test_disk_refusal_names_the_option_that_refuses() -> None:
    options, gib = Options(), 1 << 30
    assert options.disk_refusal(0, 5 * gib // 2) == ""
    assert options.disk_refusal(0, 5 * gib // 2 - 1) == (
        "2,684,354,560 bytes must be free, 2,684,354,559 are (disk_floor_bytes = 536,870,912 and two segments)"
    )
    assert options.disk_refusal(91, 9).endswith("(disk_space_warning_level_ratio = 90)")
    assert Options(disk_floor_bytes=0).disk_refusal(0, 0) == ""
    assert Options(**PROFILES[Profile.EMBEDDED]).disk_refusal(0, 640 << 20) == ""


def test_settings_of_a_lost_group_mean_server(tmp_path: Path) -> None:
    """As RocketMQ's stores, whose index files would have its sizes."""
    store = tmp_path / "store"
    with mqproc.open(store, options=ROLES_OWN):
        pass
    StorePaths(store).settings.unlink()
    with mqproc.open(store, options=ROLES_OWN):
        assert sizes(store)["index_file_entries"] == 20_000_000

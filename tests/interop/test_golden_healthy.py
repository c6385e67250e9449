"""`store verify` and `store repair` on healthy stores of each release of RocketMQ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.fixtures import Directory, all_directories, fixtures_folder, load_store, options_of
from tests.interop.rocketmq import POP_STORE, TIMER_STORE, VERSIONS, golden_of
from tests.support.command_line import call
from tests.support.store_checks import digests, flags_of

HEALTHY = [store for store in all_directories(fixtures_folder()) if not store.damaged and store.closed]


def is_healthy(root: Path, flags: list[str]) -> None:
    """Verify finds no damage, and repair changes none of RocketMQ's files."""
    verified = call("store", "verify", root, "--json", *flags)
    assert (verified.code, verified.json["damage"]) == (0, 0), verified.json["findings"][:3]
    before = digests(root)
    done = call("store", "repair", root, "--execute", *flags)
    assert (done.code, done.out.endswith("nothing to repair\n")) == (0, True)
    assert digests(root) == before


@pytest.mark.parametrize("store", HEALTHY, ids=str)
def test_healthy_store_is_clean_and_not_repaired(store: Directory, tmp_path: Path) -> None:
    is_healthy(store.unpack(tmp_path), flags_of(options_of(store.expected)))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [POP_STORE, TIMER_STORE])
def test_healthy_timer_files_are_clean_and_not_repaired(name: str, version: str, tmp_path: Path) -> None:
    is_healthy(load_store(name, tmp_path, golden_of(version)), [])

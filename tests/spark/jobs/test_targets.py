"""Targets of jobs must be outside of stores, whatever form the path has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mqproc.errors import BadRequestError, CorruptStoreError, StoreAccessError
from mqproc.spark.jobs.output import check_sources, check_target


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    """A folder with two stores, and a link to the first store next to it."""
    for name in ("one", "two"):
        (tmp_path / "stores" / name / "commitlog").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "stores" / "one")
    return tmp_path / "stores"


def test_target_without_name_is_rejected(stores: Path) -> None:
    with pytest.raises(BadRequestError, match="to is empty"):
        check_target("", [stores / "one"])


@pytest.mark.parametrize(
    ("to", "relation"),
    [
        ("stores/one", "is the store"),
        ("stores/two/../one/", "is the store"),
        ("link", "is the store"),
        ("file:{}/stores/one", "is the store"),
        ("FILE://{}/stores/one", "is the store"),
        ("file://localhost{}/link", "is the store"),
        ("stores", "holds the store"),
        ("stores/one/new/folder", "lies in the store"),
        ("link/commitlog", "lies in the store"),
        ("stores/two", "is the store"),
        ("stores/two/commitlog", "lies in the store"),
    ],
)
def test_target_inside_or_around_store_is_rejected(
    stores: Path, monkeypatch: pytest.MonkeyPatch, to: str, relation: str
) -> None:
    monkeypatch.chdir(stores.parent)
    for source in (stores / "one", Path("link"), "stores/./one"):
        with pytest.raises(BadRequestError, match=f"{relation} "):
            check_target(to.format(os.getcwd()), [source])
    assert sorted(path.name for path in stores.iterdir()) == ["one", "two"]


def test_target_outside_of_stores_is_accepted(stores: Path) -> None:
    for to in (stores / "one-more", stores / "out" / "x", stores.parent / "out", "s3://stores/one"):
        check_target(to, [stores / "one"])
    check_target(stores, [], overwrites=False)
    with pytest.raises(BadRequestError, match=r"holds the store \S*stores/\w+, which overwriting would delete"):
        check_target(stores, [], overwrites=True)


@pytest.mark.parametrize("to", ["s3a://b/stores/one", "s3://b/stores", "s3://b/stores/one/x/"])
def test_target_rule_applies_to_remote_storage(to: str) -> None:
    with pytest.raises(BadRequestError, match="the store s3://b/stores/one"):
        check_target(to, ["s3://b/stores/one"])
    check_target("s3://b/stores/one-more", ["s3://b/stores/one"])


@pytest.mark.parametrize("around", ["{}/stores.zip", "file://{}/stores.zip", "tar://stores.zip::{}/all.tar"])
def test_target_holding_archive_of_source_is_rejected(tmp_path: Path, around: str) -> None:
    with pytest.raises(BadRequestError, match=f"{tmp_path}: holds the store zip://one::"):
        check_target(tmp_path, [f"zip://one::{around.format(tmp_path)}"], overwrites=True)
    check_target(tmp_path / "out", [f"zip://one::{around.format(tmp_path)}"], overwrites=True)


def test_target_checks_sources(rolled_store: Path, tmp_path: Path) -> None:
    assert check_sources([rolled_store, rolled_store.parent / "s*"]) == [str(rolled_store)]
    with pytest.raises(StoreAccessError, match="no such folder"):
        check_sources([rolled_store, tmp_path / "missing"])
    store = shutil.copytree(rolled_store, tmp_path / "store")
    (store / "commitlog" / f"{65536:020d}").unlink()
    with pytest.raises(CorruptStoreError, match="segment 00000000000000065536 is missing"):
        check_sources(store)
    assert check_sources(store, fail_on_data_loss=False) == [str(store)]

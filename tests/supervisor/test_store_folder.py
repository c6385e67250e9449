"""The store's folder: made where only its last part is missing, refused where it is not ours alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import StoreAccessError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.supervisor.store_folder import prepare_folder


def prepare(root: Path) -> None:
    prepare_folder(StoreIO(), StorePaths(root))


def test_missing_folder_is_made_for_us_alone(tmp_path: Path) -> None:
    prepare(tmp_path / "store")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("store", "store/mqproc")] == [0o700, 0o700]


def test_missing_parent_is_refused_and_nothing_made(tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match="its parent folder does not exist"):
        prepare(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_rocketmq_store_that_others_may_read_is_taken_and_our_part_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mqproc").mkdir(mode=0o755)
    prepare(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "mqproc").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("folder", ["", "mqproc"])
def test_folder_that_everybody_may_write_to_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "mqproc").mkdir()
    (tmp_path / folder).chmod(0o777)
    with pytest.raises(StoreAccessError, match="everybody may write"):
        prepare(tmp_path)


def test_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreAccessError, match="not a folder"):
        prepare(tmp_path / "store")


@pytest.mark.parametrize("name", ["lock", "mqproc/control"])
def test_a_folder_in_the_place_of_a_file_that_a_start_opens_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(StoreAccessError, match=f"{name}: a folder"):
        prepare(tmp_path)


def test_our_part_behind_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mqproc").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreAccessError, match="a symlink"):
        prepare(tmp_path / "store")

"""`mqproc.open`: a group for as long as a block of code needs one, whoever else needs it at the same time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import mqproc
from mqproc.errors import BadRequestError, NotRunningError
from tests.conftest import PATIENCE_S, Group


def test_a_group_that_runs_is_used_and_left_running(group: Group) -> None:
    with mqproc.open(group.store) as client:
        assert client.send("orders", b"x").queue_offset == 0
    with group.client() as after:
        assert after.health()


def test_of_two_that_start_it_at_once_one_does_and_the_other_waits_for_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    both = threading.Barrier(2)

    def use(number: int) -> int:
        with mqproc.open(store) as client:
            stored = client.send("orders", b"%d" % number, queue_id=0).queue_offset
            both.wait(PATIENCE_S)
        return stored

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(use, range(2))) == [0, 1]
    assert not runs(store)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose groups `open` starts; none runs between tests."""
    return tmp_path_factory.mktemp("opened") / "store"


def runs(store: Path) -> bool:
    try:
        with mqproc.Client(store, timeout=2.0) as client:
            client.health()
    except NotRunningError:
        return False
    return True


def test_the_last_one_out_stops_it(store: Path) -> None:
    with ExitStack() as later:
        with mqproc.open(store) as first:
            second = later.enter_context(mqproc.open(store))
            first.send("orders", b"x")
        second.wait_dispatched()
        assert second.count("orders") == 1
    assert not runs(store)


def test_who_ended_without_leaving_uses_it_no_more(store: Path) -> None:
    program = f"import mqproc, os\nopened = mqproc.open({str(store)!r})\nopened.__enter__()\nos._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
    assert runs(store)
    with mqproc.open(store) as client:
        assert client.health()
    assert not runs(store)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_group_alone(store: Path) -> None:
    with ExitStack() as opened:
        client = opened.enter_context(mqproc.open(store))
        child = multiprocessing.get_context("fork").Process(target=opened.close)
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        assert client.health()
    assert not runs(store)


def test_a_group_that_was_stopped_meanwhile_is_none_to_stop(store: Path) -> None:
    with mqproc.open(store):
        run("down", store)
    assert not runs(store)
    with mqproc.open(store):
        run("down", store)
        run("up", store, "--detach")
    assert runs(store), "this one was started in another way"
    run("down", store)


def run(command: str, store: Path, *flags: str) -> None:
    arguments = [sys.executable, "-m", "mqproc", command, "--store", str(store), *flags]
    subprocess.run(arguments, check=True, timeout=2 * PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(BadRequestError, match="path is empty"), mqproc.open(""):
        pass


def test_home_is_meant_by_a_tilde_as_clients_mean_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(store.parent))
    monkeypatch.chdir(store.parent)
    with mqproc.open("~/store") as client, mqproc.Client("~/store") as other:
        assert other.store == client.store == store
        assert other.health()
    assert not Path("~").exists()


@pytest.mark.parametrize("name", [b"lat\xe9in", b"store.sock", b"-a b=%d", "käse 中".encode()])
def test_a_folder_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    store = tmp_path / os.fsdecode(name)
    with mqproc.open(store) as client:
        client.send("orders", b"x")
        client.wait_dispatched()
        run("status", store)
        with mqproc.Client(store) as other:
            assert other.count("orders") == 1


def test_a_locale_that_knows_no_more_than_ascii_is_enough(tmp_path: Path) -> None:
    program = (
        "import sys, mqproc\nwith mqproc.open(sys.argv[1]) as client: print(client.send('orders', b'x').queue_offset)"
    )
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    arguments = [sys.executable, "-c", program, str(tmp_path / "käse 中")]
    done = subprocess.run(arguments, capture_output=True, timeout=2 * PATIENCE_S, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, b"0\n"), done.stderr

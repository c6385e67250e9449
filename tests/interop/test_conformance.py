"""Every store of a folder of fixtures, opened by our engine, answers as RocketMQ answered.

The folder is the golden one, or what MQPROC_FIXTURES names. README.md tells what is compared.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.fixtures import (
    FOLDER_VARIABLE,
    GOLDEN,
    Directory,
    FixturesError,
    directories,
    fixtures_folder,
)
from tests.interop.conformance import Way, compare_files, outcome_of
from tests.interop.differences import DIFFERENCES
from tests.interop.ledger import Record, note

STORES = directories(fixtures_folder())


@pytest.fixture
def compared(record_property: Record) -> Callable[[Way, Directory], str]:
    """Compare a store in one way; what is wrong with it."""

    def compare(way: Way, store: Directory) -> str:
        outcome = outcome_of(way, store)
        note(record_property, str(store), outcome.answers, set(outcome.named))
        return outcome.report()

    return compare


Compared = Callable[[Way, Directory], str]


@pytest.mark.parametrize("store", Way.RECOVERED.stores(STORES), ids=str)
def test_a_recovered_store_answers_as_rocketmqs(store: Directory, compared: Compared) -> None:
    assert not compared(Way.RECOVERED, store)


@pytest.mark.parametrize("store", Way.REBUILT.stores(STORES), ids=str)
def test_a_log_alone_makes_the_same_queues(store: Directory, compared: Compared) -> None:
    assert not compared(Way.REBUILT, store)


@pytest.mark.parametrize("store", Way.FILES.stores(STORES), ids=str)
def test_files_read_directly_answer_as_rocketmqs(store: Directory, compared: Compared) -> None:
    assert not compared(Way.FILES, store)


def test_stores_and_answers_were_compared() -> None:
    outcomes = {store: outcome_of(Way.RECOVERED, store) for store in STORES}
    assert outcomes
    assert sum(outcome.answers for outcome in outcomes.values()) > 0
    silent = [store for store in STORES if store.expected.get("answers") and not outcomes[store].answers]
    assert not silent


def test_every_named_difference_is_met() -> None:
    met: Counter[str] = Counter()
    for way in Way:
        for store in way.stores(STORES):
            met += outcome_of(way, store).named
    assert set(met) <= {difference.name for difference in DIFFERENCES}
    golden = fixtures_folder() == GOLDEN
    unused = [
        difference.name
        for difference in DIFFERENCES
        if not met[difference.name]
        and any(difference.may_be_in(store.name) for store in STORES)
        and (difference.in_golden if golden else not difference.by_chance)
    ]
    assert not unused, "differences that no fixture shows; take them out of the table"
    assert not golden or not [each.name for each in DIFFERENCES if met[each.name] and not each.in_golden]


@pytest.mark.skipif(fixtures_folder() != GOLDEN, reason="figures of the golden stores")
def test_undamaged_stores_differ_in_three_answers_about_keys() -> None:
    """Of stores that were closed, and of those that were killed, all else is equal."""
    undamaged = [store for store in STORES if not store.damaged]
    met = {str(store): dict(outcome_of(Way.RECOVERED, store).named) for store in undamaged}
    once = "the index holds each entry once"
    assert {store: named for store, named in met.items() if named} == {
        "c1_killed/before": {once: 2},
        "c4_killed_settled/before": {once: 1},
    }


# Folders that are none


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FixturesError, match="no fixtures there"):
        directories(tmp_path)
    with pytest.raises(FixturesError, match="no fixtures there"):
        directories(tmp_path / "missing")


def test_a_fixture_without_its_tarball_is_refused(tmp_path: Path) -> None:
    whole = next(store for store in STORES if not store.damaged)
    shutil.copy(whole.golden / f"{whole.name}.expected.json.gz", tmp_path)
    with pytest.raises(FixturesError, match=rf"{whole.name}.tar.gz: missing"):
        directories(tmp_path)


def test_a_damaged_fixture_without_its_base_is_refused(tmp_path: Path) -> None:
    expected = json.dumps({"base": "before", "changes": []}).encode()
    (tmp_path / "damaged.expected.json.gz").write_bytes(gzip.compress(expected))
    with pytest.raises(FixturesError, match="damaged needs one tarball with before/ and clean/"):
        directories(tmp_path)


# The last line of a run


def run_suite(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """This very file, on another folder."""
    return run_pytest(__file__, *flags, environment={FOLDER_VARIABLE: str(folder)})


def run_pytest(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=GOLDEN.parents[1],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_the_suite_fails_on_a_wrong_folder(tmp_path: Path) -> None:
    """Not a silent success with nothing compared."""
    done = run_suite(tmp_path)
    assert done.returncode not in (0, 5)
    assert f"{FOLDER_VARIABLE}={tmp_path}: no fixtures there" in done.stdout
    assert "0 stores, 0 answers compared, 0 named differences" in done.stdout


def test_a_run_on_another_folder_tells_what_it_compared(tmp_path: Path) -> None:
    store = min(Way.FILES.stores(STORES), key=lambda store: (store.golden / f"{store.name}.tar.gz").stat().st_size)
    for ending in ("expected.json.gz", "tar.gz"):
        shutil.copy(store.golden / f"{store.name}.{ending}", tmp_path)
    done = run_suite(tmp_path, "-k", "(rocketmqs or same_queues or compared or is_met) and not folder")
    assert done.returncode == 0, done.stdout
    answers = 2 * len(store.expected["answers"])
    assert f"{len(directories(tmp_path))} stores, {answers:,} answers compared, " in done.stdout


COMPARING = """
from tests.interop.ledger import note

def test_first(record_property):
    note(record_property, "one/store", {answers}, {{"a difference"}})

def test_second(record_property):
    note(record_property, "two/store", {answers}, {{"a difference", "another"}})
"""


# With `-n` a report is made in one process and counted in another: what of it travels is what pytest serializes. The
# whole run does so with xdist itself; processes of pytest within it have hung.
TRAVELLING = """
import json

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    hook = item.config.hook
    data = hook.pytest_report_to_serializable(config=item.config, report=(yield))
    return hook.pytest_report_from_serializable(config=item.config, data=json.loads(json.dumps(data)))
"""

ONE_OF_MANY = """
def pytest_configure(config):
    config.workerinput = {}
"""


def run_with_ledger(folder: Path, suite: str, conftest: str) -> subprocess.CompletedProcess[str]:
    file = folder / "interop" / "test_conformance.py"
    file.parent.mkdir()
    file.write_text(suite)
    (file.parent / "conftest.py").write_text(conftest)
    return run_pytest(
        *("-p", "tests.interop.ledger", "-c", os.devnull, f"--rootdir={folder}", str(file)),
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


@pytest.mark.parametrize("conftest", ["", TRAVELLING], ids=["one process", "another process"])
@pytest.mark.parametrize(
    ("suite", "told", "passes"),
    [
        (COMPARING.format(answers=700), "2 stores, 1,400 answers compared, 2 named", True),
        (COMPARING.format(answers=0), "2 stores, 0 answers compared, 2 named", False),
        ("raise RuntimeError", "0 stores, 0 answers compared, 0 named", False),
    ],
    ids=["answers", "no answer", "no store"],
)
def test_the_process_that_prints_tells_of_all_and_fails_without_any(
    tmp_path: Path, suite: str, told: str, passes: bool, conftest: str
) -> None:
    """Of a suite whose tests pass by themselves."""
    done = run_with_ledger(tmp_path, suite, conftest)
    assert f"{told} differences" in done.stdout, done.stdout + done.stderr
    assert (done.returncode == pytest.ExitCode.OK) is passes


def test_one_of_many_processes_tells_nothing_and_leaves_failing_to_the_other(tmp_path: Path) -> None:
    done = run_with_ledger(tmp_path, COMPARING.format(answers=0), ONE_OF_MANY)
    assert "compared" not in done.stdout
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: one recorded answer changed is one thing wrong, with question and both answers."""
    store = Way.FILES.stores(STORES)[0]
    question = store.expected["answers"][0]
    monkeypatch.setitem(question, "result", {"never": "so"})
    outcome = compare_files(store)
    assert len(outcome.wrong) == 1
    assert str(question) in outcome.report()

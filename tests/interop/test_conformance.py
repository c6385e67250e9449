"""Every store of a folder of fixtures gives RocketMQ's answers.

The folder is the golden one, or that in MQPROC_FIXTURES. README.md lists the comparisons.
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
    all_directories,
    directories,
    fixtures_folder,
)
from tests.interop import Record, note
from tests.interop.conformance import DIFFERENCES, Way, compare_files, outcome_of

STORES = all_directories(fixtures_folder())


@pytest.fixture
def compared(record_property: Record) -> Callable[[Way, Directory], str]:
    """Compare a store in one way; returns the failures as text."""

    def compare(way: Way, store: Directory) -> str:
        outcome = outcome_of(way, store)
        note(record_property, str(store), outcome.answers, set(outcome.named))
        return outcome.report()

    return compare


Compared = Callable[[Way, Directory], str]


@pytest.mark.parametrize("store", Way.RECOVERED.stores(STORES), ids=str)
def test_recovered_store_answers_as_rocketmq(store: Directory, compared: Compared) -> None:
    assert not compared(Way.RECOVERED, store)


@pytest.mark.parametrize("store", Way.REBUILT.stores(STORES), ids=str)
def test_store_rebuilt_from_log_has_same_queues(store: Directory, compared: Compared) -> None:
    assert not compared(Way.REBUILT, store)


@pytest.mark.parametrize("store", Way.FILES.stores(STORES), ids=str)
def test_files_read_directly_answer_as_rocketmq(store: Directory, compared: Compared) -> None:
    assert not compared(Way.FILES, store)


def test_suite_compared_stores_and_answers() -> None:
    outcomes = {store: outcome_of(Way.RECOVERED, store) for store in STORES}
    assert outcomes
    assert sum(outcome.answers for outcome in outcomes.values()) > 0
    silent = [store for store in STORES if store.expected.get("answers") and not outcomes[store].answers]
    assert not silent


def test_every_named_difference_occurs() -> None:
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
    assert not unused, "differences without a fixture; remove them from the table"
    assert not golden or not [each.name for each in DIFFERENCES if met[each.name] and not each.in_golden]


@pytest.mark.skipif(fixtures_folder() != GOLDEN, reason="figures of the golden stores")
def test_undamaged_stores_differ_in_key_answers_of_killed() -> None:
    """All other answers of closed and killed stores are equal."""
    undamaged = [store for store in STORES if not store.damaged]
    met = {str(store): dict(outcome_of(Way.RECOVERED, store).named) for store in undamaged}
    once = "the index holds each entry once"
    assert {store: named for store, named in met.items() if named} == {
        "c1_killed/before": {once: 2},
        "c4_killed_settled/before": {once: 1},
        "5.5.0/c1_killed/before": {once: 4},
        "5.5.0/c4_killed_settled/before": {once: 7},
    }


# Invalid folders


def test_directories_empty_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(FixturesError, match="no fixtures there"):
        directories(tmp_path)
    with pytest.raises(FixturesError, match="no fixtures there"):
        directories(tmp_path / "missing")


def test_directories_fixture_without_tarball_raises(tmp_path: Path) -> None:
    whole = next(store for store in STORES if not store.damaged)
    shutil.copy(whole.golden / f"{whole.name}.expected.json.gz", tmp_path)
    with pytest.raises(FixturesError, match=rf"{whole.name}.tar.gz: missing"):
        directories(tmp_path)


def test_directories_damaged_fixture_without_base_raises(tmp_path: Path) -> None:
    expected = json.dumps({"base": "before", "changes": []}).encode()
    (tmp_path / "damaged.expected.json.gz").write_bytes(gzip.compress(expected))
    with pytest.raises(FixturesError, match="damaged needs one tarball with before/ and clean/"):
        directories(tmp_path)


# The summary line of a run


def run_suite(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run this test file on another folder."""
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


def test_suite_wrong_folder_fails(tmp_path: Path) -> None:
    """A run that compares nothing must not pass."""
    done = run_suite(tmp_path)
    assert done.returncode not in (0, 5)
    assert f"{FOLDER_VARIABLE}={tmp_path}: no fixtures there" in done.stdout
    assert "0 stores, 0 answers compared, 0 named differences" in done.stdout


def test_suite_other_folder_prints_its_counts(tmp_path: Path) -> None:
    store = min(Way.FILES.stores(STORES), key=lambda store: (store.golden / f"{store.name}.tar.gz").stat().st_size)
    for ending in ("expected.json.gz", "tar.gz"):
        shutil.copy(store.golden / f"{store.name}.{ending}", tmp_path)
    done = run_suite(tmp_path, "-k", "(as_rocketmq or same_queues or compared or occurs) and not folder")
    assert done.returncode == 0, done.stdout
    answers = 2 * len(store.expected["answers"])
    assert f"{len(directories(tmp_path))} stores, {answers:,} answers compared, " in done.stdout


COMPARING = """
from tests.interop import note

def test_first(record_property):
    note(record_property, "one/store", {answers}, {{"a difference"}})

def test_second(record_property):
    note(record_property, "two/store", {answers}, {{"a difference", "another"}})
"""


# With `-n` a report is created in one process and counted in another, after serialization by pytest. The hook
# serializes here without xdist, whose processes inside a test run have hung.
SERIALIZING = """
import json

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    hook = item.config.hook
    data = hook.pytest_report_to_serializable(config=item.config, report=(yield))
    return hook.pytest_report_from_serializable(config=item.config, data=json.loads(json.dumps(data)))
"""

XDIST_WORKER = """
def pytest_configure(config):
    config.workerinput = {}
"""


def run_with_plugin(folder: Path, suite: str, conftest: str) -> subprocess.CompletedProcess[str]:
    file = folder / "interop" / "test_conformance.py"
    file.parent.mkdir()
    file.write_text(suite)
    (file.parent / "conftest.py").write_text(conftest)
    return run_pytest(
        *("-p", "tests.interop", "-c", os.devnull, f"--rootdir={folder}", str(file)),
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


@pytest.mark.parametrize("conftest", ["", SERIALIZING], ids=["one process", "another process"])
@pytest.mark.parametrize(
    ("suite", "summary", "passes"),
    [
        (COMPARING.format(answers=700), "2 stores, 1,400 answers compared, 2 named", True),
        (COMPARING.format(answers=0), "2 stores, 0 answers compared, 2 named", False),
        ("raise RuntimeError", "0 stores, 0 answers compared, 0 named", False),
    ],
    ids=["answers", "no answer", "no store"],
)
def test_plugin_prints_totals_and_fails_without_answers(
    tmp_path: Path, suite: str, summary: str, passes: bool, conftest: str
) -> None:
    """The suite's tests pass; only the plugin fails the run."""
    done = run_with_plugin(tmp_path, suite, conftest)
    assert f"{summary} differences" in done.stdout, done.stdout + done.stderr
    assert (done.returncode == pytest.ExitCode.OK) is passes


def test_plugin_in_xdist_worker_prints_nothing(tmp_path: Path) -> None:
    done = run_with_plugin(tmp_path, COMPARING.format(answers=0), XDIST_WORKER)
    assert "compared" not in done.stdout
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


def test_compare_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed recorded answer is one failure, with the question and both answers."""
    store = Way.FILES.stores(STORES)[0]
    question = store.expected["answers"][0]
    monkeypatch.setitem(question, "result", {"never": "so"})
    outcome = compare_files(store)
    assert len(outcome.wrong) == 1
    assert str(question) in outcome.report()

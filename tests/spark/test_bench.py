"""`mqproc bench spark` on a small store measures every case and prints correct ratios."""

from __future__ import annotations

import pytest

from mqproc.bench.spark import GOALS
from tests.support.command_line import call

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("spark"),
]


def test_bench_measures_all_cases() -> None:
    small = ("--set", "mapped_file_size_commit_log=8388608", "--log-size", "2MiB", "--topics", 2, "--queues", 2)
    done = call("bench", "spark", *small, "--rounds", 1, "--json")
    assert done.code == 0, done.err
    found = done.json
    ours = {"all_columns", "all_columns_by_source", "counts", "filter", "range"}
    lines = {"json", "json_inferred", "json_counts", "json_filter"}
    assert found["seconds"].keys() == {"kernel", "nothing", "not_decoded", *ours, *lines}
    most = {"not_decoded", "not_decoded_times_json"}
    assert found["ratios"].keys() == {*GOALS, *most, *(f"times_{name}" for name in lines)}
    assert found["goals"] == GOALS
    assert found["messages"] > 1000
    # Each queue holds one in eight.
    assert found["json_messages"] == pytest.approx(found["messages"] / 8, abs=4)
    kernel = found["seconds"]["kernel"]
    for name in ("all_columns", "all_columns_by_source", "not_decoded"):
        assert found["ratios"][name] == pytest.approx(kernel / found["seconds"][name], rel=0.2, abs=0.002)

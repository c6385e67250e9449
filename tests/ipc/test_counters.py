"""Histograms in the control file: one bucket per value, disjoint words, exact quantiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.errors import ERROR_BY_CODE
from mqproc.ipc.control_words import Words
from mqproc.ipc.counters import Buckets, Histogram, error_counter, read_buckets, read_error_counters
from mqproc.layout import control as layout
from mqproc.layout import histograms


def words() -> Words:
    return Words(bytearray(layout.FILE_SIZE))


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1000)), max_size=20))
def test_histogram_counts_value_in_first_fitting_bucket(values: list[tuple[int, int]]) -> None:
    cells = words()
    histogram = Histogram(cells, histograms.APPENDS)
    for value, weight in values:
        histogram.observe(value, weight)
    found = read_buckets(cells, histograms.APPENDS)
    edges = [-1, *histograms.APPENDS.bounds, 1 << 62]
    for place, count in enumerate(found.counts):
        assert count == sum(weight for value, weight in values if edges[place] < value <= edges[place + 1])
    assert abs(found.total - sum(value * weight for value, weight in values) * 1e-9) <= 1e-6 * (1 + found.total)


def test_histogram_places_do_not_overlap() -> None:
    taken: set[int] = set()
    spans = [(place.owner, place.index, place.sum_index + 1) for place in histograms.HISTOGRAMS]
    spans += [(role, first, first + len(histograms.CODES)) for role, first in histograms.REJECTS.items()]
    spans.append((layout.WRITER, histograms.APPEND_STATE, histograms.APPEND_STATE + histograms.APPEND_STATE_WORDS))
    spans.append(
        (layout.DISPATCHER, histograms.DISPATCH_STATE, histograms.DISPATCH_STATE + histograms.DISPATCH_STATE_WORDS)
    )
    for owner, first, stop in spans:
        page = (layout.HISTOGRAMS_START + layout.ROLES.index(owner) * layout.PAGE_SIZE) // layout.WORD_SIZE
        assert page <= first < stop <= page + layout.PAGE_SIZE // layout.WORD_SIZE
        assert not taken & set(range(first, stop))
        taken |= set(range(first, stop))
    assert min(taken) * layout.WORD_SIZE >= max(word.index for word in layout.WORDS.values()) * layout.WORD_SIZE


def test_histogram_quantiles_are_bucket_upper_bounds() -> None:
    buckets = Buckets((1.0, 2.0, 4.0), (50, 49, 0, 1), 0.0)
    assert buckets.quantile(0.5) == 1.0
    assert buckets.quantile(0.99) == 2.0
    assert buckets.quantile(0.999) == float("inf")
    assert Buckets((1.0,), (0, 0), 0.0).quantile(0.5) == 0.0
    assert buckets.minus(Buckets((1.0, 2.0, 4.0), (50, 0, 0, 1), 0.0)).quantile(0.5) == 2.0


def test_histogram_quantiles_are_exact_to_a_bucket() -> None:
    """n samples of n ms for n from 1 to 1,000, as in RocketMQ's StoreStatsServiceTest."""
    cells = words()
    histogram = Histogram(cells, histograms.APPENDS)
    for number in range(1, 1001):
        histogram.observe(number * 1_000_000, number)
    found = read_buckets(cells, histograms.APPENDS)
    assert sum(found.counts) == 500_500
    assert found.total == pytest.approx(333_833.5)
    exact_s = {0.01: 0.1, 0.1: 0.316, 0.25: 0.5, 0.5: 0.707, 0.9: 0.949, 0.99: 0.995, 0.999: 1.0}
    for share, exact in exact_s.items():
        assert found.quantile(share) == min(bound for bound in found.bounds if bound >= exact)
    assert [found.quantile(share) for share in exact_s] == [0.1, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_error_counters_cover_every_code() -> None:
    cells = words()
    for code in ERROR_BY_CODE:
        error_counter(cells, layout.WRITER)(code)
    assert read_error_counters(cells, layout.WRITER) == dict.fromkeys(ERROR_BY_CODE, 1)
    assert not any(read_error_counters(cells, layout.QUERY).values())

"""Growth is what lasts: told by medians, beyond what a group of small files may differ by."""

from __future__ import annotations

import dataclasses

from tests.soak.watching import SAMPLES_MIN, Taken, grown, medians

STEADY = Taken(
    pss_bytes=200 << 20, descriptors=170, maps=5_700, shared_names=5, lasting_descriptors=40, lasting_maps=900
)


def test_a_figure_that_is_larger_for_good_is_told() -> None:
    much = {"pss_bytes": 300 << 20, "descriptors": 300, "maps": 8_000, "shared_names": 20}
    much |= {"lasting_descriptors": 43, "lasting_maps": 903}
    for name, more in much.items():
        larger = dataclasses.replace(STEADY, **{name: more})
        (told,) = grown([STEADY] * (SAMPLES_MIN // 2) + [larger] * (SAMPLES_MIN // 2))
        assert told == f"{name}: from {getattr(STEADY, name):,} to {more:,}"


def test_a_moment_and_the_beginning_tell_nothing() -> None:
    small, large = dataclasses.replace(STEADY, descriptors=20), dataclasses.replace(STEADY, descriptors=900)
    samples = [small] * (SAMPLES_MIN // 5) + [STEADY] * SAMPLES_MIN + [large]
    assert grown(samples) == []
    assert medians(samples) == (STEADY, STEADY)

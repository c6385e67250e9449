"""Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.

Written out here because a scrape with thousands of topics has to be quick: `prometheus_client` makes a dictionary and
several strings for each sample, five times as long as this. Its parser reads what this writes, which a test shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from mqproc.ipc.histogram import Buckets
from mqproc.metrics.catalogue import HISTOGRAM, METRICS, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]
Value = float | Buckets
Samples = Sequence[tuple[Labels, Value]]
"""Of one metric: label values in the catalogue's order, and the value."""

_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def render(samples: Mapping[str, Samples]) -> bytes:
    """Every metric of the catalogue with its samples, by name; one without any has its two comment lines."""
    parts: list[str] = []
    for metric in METRICS:
        parts.append(f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n")
        found = samples.get(metric.name, ())
        if len(metric.labels) == 1 and metric.kind != HISTOGRAM:
            parts += _lines_of_one_label(metric, found)
        else:
            parts += _lines(metric, found)
    return "".join(parts).encode()


def _lines_of_one_label(metric: Metric, samples: Samples) -> Iterable[str]:
    """What there are thousands of."""
    head = f'{metric.name}{{{metric.labels[0]}="'
    return [
        f'{head}{_escaped(values[0])}"}} {value if type(value) is int else number(cast("float", value))}\n'
        for values, value in samples
    ]


def _lines(metric: Metric, samples: Samples) -> Iterable[str]:
    name, keys = metric.name, metric.labels
    for values, value in samples:
        labels = ",".join([f'{key}="{_escaped(text)}"' for key, text in zip(keys, values, strict=True)])
        if isinstance(value, Buckets):
            yield from _histogram_lines(name, labels, value)
        elif labels:
            yield f"{name}{{{labels}}} {number(value)}\n"
        else:
            yield f"{name} {number(value)}\n"


def _escaped(text: str) -> str:
    """Few have anything to escape, and to look is several times quicker."""
    return text.translate(_ESCAPED) if "\\" in text or '"' in text or "\n" in text else text


def _histogram_lines(name: str, labels: str, buckets: Buckets) -> Iterable[str]:
    before = f"{labels}," if labels else ""
    behind = f"{{{labels}}}" if labels else ""
    count = 0
    for bound, more in zip(buckets.bounds, buckets.counts, strict=False):
        count += more
        yield f'{name}_bucket{{{before}le="{bound:g}"}} {count}\n'
    count += buckets.counts[-1]
    yield f'{name}_bucket{{{before}le="+Inf"}} {count}\n{name}_sum{behind} {buckets.total:.9g}\n'
    yield f"{name}_count{behind} {count}\n"


def number(value: float) -> str:
    """A sample's value: whole numbers without a point, as exact as they are."""
    if type(value) is int:
        return str(value)
    whole = int(value)
    return str(whole) if whole == value else repr(float(value))

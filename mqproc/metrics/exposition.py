"""/metrics by prometheus_client: text 0.0.4, OpenMetrics, gzip, `name[]`.

The application imports this module at the first scrape: importing prometheus_client takes longer than starting a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.asgi import make_asgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from mqproc.ipc.histogram import Buckets
from mqproc.metrics.catalogue import COUNTER, HISTOGRAM, METRICS, MetricSpec, Samples


class PrometheusCollector(Collector):
    """Every metric of the catalogue, with the samples that `read` returns at each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, Samples]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """The families without samples: the registry needs their names for `name[]`."""
        return [_family(spec, ()) for spec in METRICS]

    def collect(self) -> Iterator[Metric]:
        samples = self._read()
        for spec in METRICS:
            yield _family(spec, samples.get(spec.name, ()))


def make_metrics_app(read: Callable[[], Mapping[str, Samples]]) -> Callable[..., Any]:
    """prometheus_client's ASGI application over a registry of its own."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(read))
    return make_asgi_app(registry)


def _family(spec: MetricSpec, samples: Samples) -> Metric:
    # prometheus_client appends a counter's `_total` itself.
    name = spec.name.removesuffix("_total") if spec.kind == COUNTER else spec.name
    family = Metric(name, spec.help, spec.kind, spec.unit)
    if spec.kind == HISTOGRAM:
        family.samples = [
            sample
            for values, buckets in samples
            if isinstance(buckets, Buckets)
            for sample in _of_histogram(name, dict(zip(spec.labels, values, strict=True)), buckets)
        ]
    elif len(spec.labels) == 1:  # Thousands of topics have these.
        (label,) = spec.labels
        family.samples = [Sample(spec.name, {label: text}, value) for (text,), value in samples]  # type: ignore[arg-type]
    else:
        family.samples = [
            Sample(spec.name, dict(zip(spec.labels, values, strict=True)), value)  # type: ignore[arg-type]
            for values, value in samples
        ]
    return family


def _of_histogram(name: str, labels: dict[str, str], buckets: Buckets) -> Iterator[Sample]:
    bounds = (*map(floatToGoString, buckets.bounds), "+Inf")
    counts = list(accumulate(buckets.counts))
    for bound, count in zip(bounds, counts, strict=True):
        yield Sample(f"{name}_bucket", {**labels, "le": bound}, count)
    yield Sample(f"{name}_count", labels, counts[-1])
    yield Sample(f"{name}_sum", labels, buckets.total)

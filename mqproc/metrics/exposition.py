"""/metrics by prometheus_client: text 0.0.4, OpenMetrics, gzip, `name[]`.

The application imports this module at the first scrape: importing prometheus_client takes longer than starting a role.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from mqproc.ipc.counters import Buckets
from mqproc.metrics.catalogue import COUNTER, HISTOGRAM, METRICS, MetricSpec, Samples

_GZIP_LEVEL: Final = 4


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


class Exposition:
    """Encodes a scrape in the format, compression and selection that the request asks for."""

    def __init__(self, read: Callable[[], Mapping[str, Samples]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(PrometheusCollector(read))

    def response(self, request: Request) -> Response:
        names = request.query_params.getlist("name[]")
        registry: Any = self._registry.restricted_registry(names) if names else self._registry
        encode: Any
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # All names are valid in every escaping scheme; this one takes half the time in OpenMetrics.
        escaping = {"escaping": ALLOWUTF8} if content_type.startswith("application/openmetrics-text") else {}
        body: bytes = encode(registry, **escaping)
        headers = {"content-type": content_type}
        if gzip_accepted(request.headers.get("accept-encoding", "")):
            headers["content-encoding"] = "gzip"
            body = gzip.compress(body, _GZIP_LEVEL)
        return Response(body, headers=headers)


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

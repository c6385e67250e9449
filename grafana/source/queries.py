"""Queries of many panels, by metric name."""

from __future__ import annotations

from typing import Final

from grafana.source.panels import Query

RANGE: Final = "[$__rate_interval]"


def rate(metric: str, legend: str) -> Query:
    """Rate of a counter per second."""
    return Query(f"rate({metric}{{$S}}{RANGE})", legend)


def summed_rate(metric: str, legend: str, *, by: str = "instance") -> Query:
    """The sum of it by a label."""
    return Query(f"sum by ({by}) (rate({metric}{{$S}}{RANGE}))", legend)


def increase(metric: str, legend: str) -> Query:
    """Increase of a counter."""
    return Query(f"increase({metric}{{$S}}{RANGE})", legend)


def summed_increase(metric: str, legend: str, *, by: str = "instance") -> Query:
    """The sum of it by a label."""
    return Query(f"sum by ({by}) (increase({metric}{{$S}}{RANGE}))", legend)


def age(metric: str, legend: str = "{{instance}}") -> Query:
    """Age of a time at its scrape, if it is set, without the time since the scrape."""
    return Query(f"timestamp({metric}{{$S}}) - ({metric}{{$S}} > 0)", legend)


def rate_of_chosen(metric: str) -> str:
    """Rate of a counter of the selected topics."""
    return f'rate({metric}{{$S,topic=~"$topic"}}{RANGE})'


def ten_largest(value: str, *by: str, joined: str = "sum") -> Query:
    """The ten largest values with their labels."""
    return Query(f"topk(10, {joined} by ({', '.join(by)}) ({value}))", " ".join(f"{{{{{label}}}}}" for label in by))


def quantiles(metric: str, *, by: str = "") -> list[Query]:
    """Median, 99 % and 99.9 % of a histogram, by a label if given."""
    labels = f"le, instance, {by}" if by else "le, instance"
    name = f"{{{{{by}}}}} " if by else ""
    return [
        Query(f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{$S}}{RANGE})))", f"{name}{text}")
        for share, text in ((0.5, "50 %"), (0.99, "99 %"), (0.999, "99.9 %"))
    ]

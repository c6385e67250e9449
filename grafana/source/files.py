"""The generated files, by name: dashboards, rules, Prometheus' configuration, Grafana's provisioning, compose."""

from __future__ import annotations

from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana.source.internals import internals
from grafana.source.overview import overview
from grafana.source.rule_tests import rule_tests
from grafana.source.rules import rule_files
from grafana.source.settings import DATASOURCE_UID, JOB, SCRAPE_S, Durations

_NOTE = "# Made by `python -m grafana.source`; the source is in grafana/source.\n"


def generated_files(durations: Durations | None = None) -> dict[str, str]:
    """Text by name below `grafana/`."""
    durations = durations or Durations()
    dashboards = {"overview": overview(), "internals": internals()}
    documents: dict[str, Any] = {
        **{f"rules/{name}": rules for name, rules in rule_files(durations).items()},
        "rules/thresholds.yml": rule_tests(),
        "prometheus.yml": prometheus_config(durations, ["mqproc:5557"], "/etc/prometheus/rules"),
        "provisioning/datasources/prometheus.yaml": _datasource(),
        "provisioning/dashboards/mqproc.yaml": _provider(),
        "compose.yaml": _compose(),
    }
    return {
        **{
            f"dashboards/{name}.json": JSONEncoder(sort_keys=True, indent=2).encode(dashboard) + "\n"
            for name, dashboard in dashboards.items()
        },
        **{name: _NOTE + dump(document) for name, document in documents.items()},
    }


def dump(document: Any) -> str:
    """YAML in the order given, one line a text."""
    return str(yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True))


def prometheus_config(durations: Durations, targets: list[str], rules: str) -> dict[str, Any]:
    """A Prometheus that scrapes groups and evaluates the rules in a folder."""
    every = durations.of(SCRAPE_S)
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [f"{rules}/recording.yml", f"{rules}/alerts.yml"],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": targets}]}],
    }


def _datasource() -> dict[str, Any]:
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                "type": "prometheus",
                "uid": DATASOURCE_UID,
                "access": "proxy",
                "url": "http://prometheus:9090",
                "isDefault": True,
                "jsonData": {"timeInterval": f"{SCRAPE_S:g}s"},
            }
        ],
    }


def _provider() -> dict[str, Any]:
    return {
        "apiVersion": 1,
        "providers": [
            {
                "name": "mqproc",
                "type": "file",
                "folder": "mqproc",
                "disableDeletion": True,
                "allowUiUpdates": False,
                "options": {"path": "/var/lib/grafana/dashboards"},
            }
        ],
    }


def _compose() -> dict[str, Any]:
    return {
        "name": "mqproc",
        "services": {
            "mqproc": {
                "build": {"context": "..", "dockerfile": "supervisor/deploy/Dockerfile"},
                "command": ["up", "--store", "/store", "--set", "metrics_host=0.0.0.0"],
                "volumes": ["store:/store"],
                "shm_size": "64mb",
                "stop_grace_period": "2m",
                "ports": ["127.0.0.1:5557:5557"],
                "healthcheck": {
                    "test": ["CMD", "mqproc", "status", "--store", "/store"],
                    "interval": "10s",
                    "timeout": "5s",
                    "start_period": "2m",
                },
            },
            "prometheus": {
                "image": "prom/prometheus:v3.5.0",
                "volumes": [
                    "./prometheus.yml:/etc/prometheus/prometheus.yml:ro",
                    "./rules:/etc/prometheus/rules:ro",
                    "prometheus:/prometheus",
                ],
                "ports": ["127.0.0.1:9090:9090"],
            },
            "grafana": {
                "image": "grafana/grafana:11.6.0",
                "environment": {
                    "GF_AUTH_ANONYMOUS_ENABLED": "true",
                    "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
                    "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": "/var/lib/grafana/dashboards/overview.json",
                },
                "volumes": [
                    "./provisioning:/etc/grafana/provisioning:ro",
                    "./dashboards:/var/lib/grafana/dashboards:ro",
                ],
                "ports": ["127.0.0.1:3000:3000"],
                "depends_on": ["prometheus"],
            },
        },
        "volumes": {"store": {}, "prometheus": {}},
    }

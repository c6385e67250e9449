"""Source of the dashboards, rules and configuration that `python -m grafana.source` writes."""

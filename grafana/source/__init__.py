"""The source of everything in this folder that Grafana and Prometheus read: `python -m grafana.source` writes it."""

"""Metrics, alert rules and the Grafana dashboard, checked with Prometheus itself."""

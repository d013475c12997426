"""The service's HTTP pages: the dashboard, the history, and the metrics."""

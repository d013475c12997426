"""The dashboard, the same data as JSON, and the metrics, over HTTP."""

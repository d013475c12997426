"""Benchmarks; each prints a table, and with --json one JSON object on its last line."""

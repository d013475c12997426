"""Arbiter of the sessions that run on a GPU: a pure state machine with time as an argument and decisions as results.

See docs/explanation/arbiter.md.
"""

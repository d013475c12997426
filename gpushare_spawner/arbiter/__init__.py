"""Arbiter of the sessions on a GPU: a pure state machine that takes the time as an argument and returns decisions.

See docs/explanation/arbiter.md.
"""

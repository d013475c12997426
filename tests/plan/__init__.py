"""Tests of `gpushare plan`."""

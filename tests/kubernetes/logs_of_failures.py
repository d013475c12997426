"""Logs of processes beside the tests that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

import pytest


class _Plugin:
    def __init__(self, title: str, logs: Callable[[], str]) -> None:
        self._title, self._logs = title, logs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            report.sections.append((self._title, self._logs()))
        return report


@contextlib.contextmanager
def logs_of_failures(config: pytest.Config, title: str, logs: Callable[[], str]) -> Iterator[None]:
    """For as long as this is open, the report of a failed test has what ``logs`` gives."""
    plugin = _Plugin(title, logs)
    config.pluginmanager.register(plugin)
    try:
        yield
    finally:
        config.pluginmanager.unregister(plugin)

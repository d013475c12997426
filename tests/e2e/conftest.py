"""Shared by the end-to-end tests: stacks that always end, and their logs beside a failed test."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.e2e.running_stack import RunningStack

_STACKS: list[RunningStack] = []


@pytest.fixture(scope="module")
def start_stack() -> Iterator[Callable[..., RunningStack]]:
    """Makes and starts a stack (the arguments are those of RunningStack); it ends with the module, whatever happens."""

    def start(*arguments: Any, **named: Any) -> RunningStack:
        stack = RunningStack(*arguments, **named)
        _STACKS.append(stack)
        stack.start()
        return stack

    yield start
    while _STACKS:
        _STACKS.pop().close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the ends of the agent's and the hub's logs to the report of a failed test."""
    report = yield
    if report.failed:
        report.sections += [("agent and hub", stack.logs()) for stack in _STACKS]
    return report

"""A finding: the result of one check. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The weight of a finding."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not checked, for the reason in `what`."""
    NOTE = "note"
    """It works, but could be better."""
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    where: str
    """A path, a device, a program."""
    what: str
    remedy: str = ""
    """What to do; empty if there is nothing to do."""


def ok(where: str, what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Level.OK, where, what)


def skipped(where: str, what: str) -> Finding:
    """Return that something was not checked, and why."""
    return Finding(Level.SKIPPED, where, what)


def note(where: str, what: str, remedy: str) -> Finding:
    """Return something that could be better."""
    return Finding(Level.NOTE, where, what, remedy)


def problem(where: str, what: str, remedy: str) -> Finding:
    """Return something that does not work."""
    return Finding(Level.PROBLEM, where, what, remedy)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if any finding is a problem, else 0."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))

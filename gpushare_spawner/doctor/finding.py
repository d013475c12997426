"""What a check found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a finding counts."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not checked, for the reason in `what`."""
    NOTE = "note"
    """It works, and could be better."""
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    level: Level
    where: str
    """A path, a device, a program."""
    what: str
    remedy: str = ""
    """What to do; empty where nothing is wrong."""


def ok(where: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, where, what)


def skipped(where: str, what: str) -> Finding:
    """Not checked, and why."""
    return Finding(Level.SKIPPED, where, what)


def note(where: str, what: str, remedy: str) -> Finding:
    """Something to know or to improve."""
    return Finding(Level.NOTE, where, what, remedy)


def problem(where: str, what: str, remedy: str) -> Finding:
    """Something that does not work."""
    return Finding(Level.PROBLEM, where, what, remedy)


def exit_status(findings: Iterable[Finding]) -> int:
    """1 where anything is a problem, else 0."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))

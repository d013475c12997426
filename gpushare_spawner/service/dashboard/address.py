"""The address of the dashboard: filters, order and pages are in its query, so that links and the browser's history keep
them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from pydantic import ValidationError

from gpushare_spawner.service.api.session_list import SessionsQuery

_NODES_FROM = "nodes_from"
_LARGEST_OFFSET = 10**9
_COLUMNS = (
    ("Session", "user"),
    ("GPU", "node"),
    ("Tier and share", "tier"),
    ("GPU time", "delivered"),
    ("Last use", "-idle"),
    ("Memory", "-memory"),
    ("Next idle action", "next"),
)
"""Titles, and how a click on one sorts; a second click turns the order round."""


@dataclass(frozen=True)
class Column:
    """A column of the sessions' table."""

    title: str
    name: str
    link: str
    """Sorts by the column."""
    direction: str
    """`ascending` or `descending`; empty: the table is not sorted by it."""


@dataclass(frozen=True)
class DashboardAddress:
    """What the page is asked to show."""

    prefix: str
    query: SessionsQuery = field(default_factory=SessionsQuery)
    nodes_from: int = 0
    """How many nodes to leave out."""

    @classmethod
    def of(cls, prefix: str, arguments: Mapping[str, str]) -> DashboardAddress:
        """Return the address with these arguments. What is wrong or not known is left out: the page is shown."""
        number = arguments.get(_NODES_FROM, "")
        nodes_from = min(int(number), _LARGEST_OFFSET) if number.isascii() and number.isdigit() else 0
        wanted = {name: arguments[name] for name in SessionsQuery.model_fields if arguments.get(name)}
        wanted.pop("limit", None)
        try:
            query = SessionsQuery.model_validate(wanted)
        except ValidationError as error:
            wrong = {one["loc"][0] for one in error.errors()}
            query = SessionsQuery.model_validate({name: wanted[name] for name in wanted.keys() - wrong})
        return cls(prefix, query, nodes_from)

    @property
    def filtered(self) -> bool:
        """Whether sessions are left out."""
        return bool(self._fields().keys() - {"sort", "offset"})

    @property
    def unfiltered(self) -> str:
        """The address with all sessions, in the same order."""
        return self._address({name: value for name, value in self._fields().items() if name == "sort"})

    def link(self, **changes: Any) -> str:
        """Return the address with other arguments, less empty ones. Another list begins with its first page."""
        fields = self._fields() | changes
        if "offset" not in changes and _NODES_FROM not in changes:
            fields.pop("offset", None)
        if _NODES_FROM not in changes and "node" not in changes and self.nodes_from:
            fields[_NODES_FROM] = self.nodes_from
        return self._address(fields)

    def columns(self) -> Sequence[Column]:
        """Return the columns of the sessions' table."""
        return [self._column(title, sort) for title, sort in _COLUMNS]

    def _column(self, title: str, sort: str) -> Column:
        name, now = sort.removeprefix("-"), self.query.sort
        if now.removeprefix("-") != name:
            return Column(title, name, self.link(sort=sort), "")
        other = name if now.startswith("-") else f"-{name}"
        return Column(title, name, self.link(sort=other), "descending" if now.startswith("-") else "ascending")

    def _fields(self) -> dict[str, Any]:
        return self.query.model_dump(mode="json", exclude_defaults=True, exclude={"limit"})

    def _address(self, fields: Mapping[str, Any]) -> str:
        given = {name: "true" if value is True else value for name, value in fields.items() if value}
        return self.prefix + (f"?{urlencode(given)}" if given else "")

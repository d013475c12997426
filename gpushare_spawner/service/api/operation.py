"""One operation of the API as a declaration. Handlers: `router`; the document: `openapi`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.service.api.services import Services
from gpushare_spawner.service.hub.scopes import ACT, ACT_OWN, DRAIN
from gpushare_spawner.service.web.caller import Caller

Method = Literal["GET", "POST", "PUT", "DELETE"]


class Arguments(BaseModel):
    """What a client sends: an unknown field is an error, not an argument without effect."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Nothing(Arguments):
    """No arguments."""


class Needs(Enum):
    """What a caller needs beyond the access to the service. The value is the scope of a token."""

    LOGIN = ""
    """The caller is shown what they may see."""
    OWN = ACT_OWN
    """The session or spawn is the caller's own, or the caller may act on all."""
    ACT = ACT
    DRAIN = DRAIN

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes that a token can have for it, each of which is enough."""
        return (ACT_OWN, ACT) if self is Needs.OWN else (self.value,) if self.value else ()


class ApiError(Exception):
    """A request is refused: an HTTP status, a code for programs, a sentence for people.

    ``retry_after``: seconds after which the same request can succeed.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


@dataclass(frozen=True)
class Raw:
    """An answer that is text already."""

    text: str
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Q = TypeVar("Q", bound=BaseModel)
B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Call(Generic[Q, B]):
    """One request to an operation."""

    services: Services
    caller: Caller
    path: Mapping[str, str]
    query: Q
    body: B


@dataclass(frozen=True)
class Operation(Generic[Q, B]):
    """A method of an address, and the function that answers it."""

    method: Method
    path: str
    """Below the API's prefix, like ``sessions/{id}/keep``."""
    answered_by: Callable[[Call[Q, B]], Awaitable[BaseModel | Raw]] | Callable[[Call[Q, B]], AsyncIterator[str]]
    """Raises ApiError. An async iterator where the operation `streams`."""
    summary: str
    answer: type[BaseModel]
    query: type[Q]
    body: type[B]
    needs: Needs = Needs.LOGIN
    errors: Mapping[int, str] = field(default_factory=dict)
    """Statuses beyond those that every operation can answer with, and what they mean."""
    example: Mapping[str, Any] | None = None
    """Of the body."""
    streams: bool = False
    """The answer is a stream of server-sent events, each with the model as its data."""
    other_content: tuple[str, ...] = ()
    """Content types that the answer can have beside JSON."""

    @property
    def name(self) -> str:
        """Unique: the name of the function."""
        return self.answered_by.__name__

    @property
    def description(self) -> str:
        """The text of the function."""
        return self.answered_by.__doc__ or ""

    @property
    def acts(self) -> bool:
        """Whether the operation changes something."""
        return self.method != "GET"


AnyOperation = Operation[Any, Any]

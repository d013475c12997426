"""The declaration of operations, and the request handlers: login, rights, arguments, errors, rate limits.

`reading` and `acting` declare the operations; `api` generates the document from the same declarations.

If a client repeats a request with an idempotency key because it got no answer, the request is carried out only once.
The answers are stored in memory. After a restart of the service, a repeated request is carried out again; because all
actions are idempotent, this changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError
from tornado.iostream import StreamClosedError

from gpushare_spawner.background import cancel
from gpushare_spawner.clocks import Budget
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.api.answers import Refusal
from gpushare_spawner.service.api.snapshots import Events, ServiceSnapshots
from gpushare_spawner.service.budgets import Budgets
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.hub.caller import Caller, Owned
from gpushare_spawner.service.hub.roles import ACT, ACT_OWN, DRAIN
from gpushare_spawner.service.web.app import Page
from gpushare_spawner.wording import service as words


@dataclass(frozen=True)
class Services:
    """The parts of the service that the API shows and uses."""

    prefix: str
    """Prefix of the service's paths, with a trailing slash."""
    snapshots: ServiceSnapshots
    events: Events
    actions: ActionContext
    history: History | None = None
    """The history; None if there is none."""
    budgets: Budgets | None = None

    def changed(self) -> None:
        """Make the result of an action visible immediately, and notify the pages."""
        self.snapshots.outdated()
        self.events.poll_now()


Method = Literal["GET", "POST", "PUT", "DELETE"]


class Arguments(BaseModel):
    """Arguments from a client. An unknown field is an error, not an argument without effect."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Nothing(Arguments):
    """No arguments."""


class Needs(Enum):
    """The right that a caller needs in addition to access to the service. The value is a token's scope."""

    LOGIN = ""
    """No additional right. The answer is limited to the sessions that the caller may see."""
    OWN = ACT_OWN
    """The session or spawn belongs to the caller, or the caller may act on all."""
    ACT = ACT
    DRAIN = DRAIN

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes that satisfy it. A token needs one of them."""
        return (ACT_OWN, ACT) if self is Needs.OWN else (self.value,) if self.value else ()

    def check(self, caller: Caller, owned: Owned | None = None) -> None:
        """Raise ApiError unless the caller has the right. ``of``: the session or spawn to act on; None: not yet known.

        This is the only check of whether a caller may act; `service.actions` has none.
        """
        if (self is Needs.ACT and not caller.acts_on_all) or (self is Needs.DRAIN and not caller.drains):
            raise ApiError(403, "forbidden", words.scope_missing(self.scopes))
        if self is Needs.OWN and owned is not None and not caller.may_act_on(owned):
            raise ApiError(403, "forbidden", words.not_your_session(self.scopes))


class ApiError(Exception):
    """A refused request, with an HTTP status, a code for programs, and a sentence for people.

    ``retry_after``: seconds after which the same request may succeed.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


@dataclass(frozen=True)
class Raw:
    """An answer that is already text."""

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
    needs: Needs = Needs.LOGIN


Function = Callable[[Call[Any, Any]], Awaitable[BaseModel | Raw]] | Callable[[Call[Any, Any]], AsyncIterator[str]]
"""Function that answers an operation; an async iterator if the operation `streams`. Raises ApiError."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class Operation:
    """A method of a path, declared as the decorator of the function that answers it.

    The function's annotations define the models of the query, body and answer.
    """

    operations: list[Operation]
    """The module's operations, to which this operation is added."""
    method: Method
    path: str
    """Path below the API's prefix, like ``sessions/{id}/keep``."""
    summary: str
    needs: Needs = Needs.LOGIN
    answer: type[BaseModel] = Nothing
    """Model of the answer, if the annotation is not a model."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Meanings of statuses that are specific to this operation."""
    example: Mapping[str, Any] | None = None
    """An example of the body."""
    streams: bool = False
    """Whether the answer is a stream of server-sent events, each with the model as its data."""
    other_content: tuple[str, ...] = ()
    """Content types of the answer, in addition to JSON."""
    query: type[BaseModel] = field(init=False)
    body: type[BaseModel] = field(init=False)
    answered_by: Function = field(init=False)

    def __call__(self, function: F) -> F:
        hints = get_type_hints(function)
        self.query, self.body = get_args(hints["call"])
        self.answer = hints["return"] if self.answer is Nothing else self.answer
        self.answered_by = function
        self.operations.append(self)
        return function

    @property
    def name(self) -> str:
        """The function's name, which is unique."""
        return self.answered_by.__name__

    @property
    def description(self) -> str:
        """The function's docstring."""
        return self.answered_by.__doc__ or ""

    @property
    def acts(self) -> bool:
        """Whether the operation changes something."""
        return self.method != "GET"


KEPT_SECONDS = 600.0
"""Lifetime in seconds of an answer with a key. Our choice: longer than any client keeps repeating a request."""
MOST = 10_000
"""Maximum number of stored answers and of callers' budgets. The oldest are dropped first.

An answer is under 1 KiB. A budget is full again after a minute without actions, so a dropped budget benefits a caller
only if there are 10,000 callers within a minute."""
MOST_LETTERS = 200
"""Maximum characters of a key."""

A = TypeVar("A")


class KeyReused(Exception):
    """Error: the key was used with another request."""


@dataclass
class _Entry(Generic[A]):
    request: Hashable
    began: float
    answer: asyncio.Future[A]


class Idempotency(Generic[A]):
    """The answers to the last requests with keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry[A]] = OrderedDict()

    async def once(self, caller: str, key: str, request: Hashable, act: Callable[[], Awaitable[A]]) -> A:
        """Return the answer of ``act``, or the stored answer to the caller's same request.

        Wait for the same request if it is running. Discard a request that raises an error. Raises KeyReused.
        """
        self._forget()
        previous = self._entries.get((caller, key))
        if previous is not None:
            if previous.request != request:
                raise KeyReused
            return await asyncio.shield(previous.answer)
        entry = self._entries[caller, key] = _Entry(request, self._clock(), asyncio.get_running_loop().create_future())
        try:
            answer = await act()
        except BaseException as error:
            if self._entries.get((caller, key)) is entry:  # newer entries may have displaced it
                del self._entries[caller, key]
            entry.answer.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            entry.answer.exception()  # marks the exception as retrieved, because there may be no other waiter
            raise
        entry.answer.set_result(answer)
        return answer

    def _forget(self) -> None:
        oldest = self._clock() - KEPT_SECONDS
        while self._entries:
            entry = next(iter(self._entries.values()))
            if len(self._entries) < MOST and entry.began >= oldest:
                return
            self._entries.popitem(last=False)


AT_ONCE, PER_SECOND = 30, 0.5
"""Burst and rate of a user's actions. Our choice: more than a person does manually. Each action can cause requests to
all agents, and adds an entry to the history."""
AT_ONCE_FOR_ALL, PER_SECOND_FOR_ALL = 300, 10.0
"""Burst and rate of the actions of a service, or of a caller that may act on all users' sessions or nodes, because
these act for many users."""
_ENOUGH = 0.999
"""The fraction of one action that a budget must have left, because sums of floats are not exact."""


class ActionBudgets:
    """Rate limits of all callers. ``clock``: seconds on a monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budgets: OrderedDict[tuple[str, bool], Budget] = OrderedDict()

    def wait(self, account: str, caller: Caller) -> float:
        """Count one action and return 0, or return the seconds until the caller may act again, without counting it.

        ``account``: the same for all logins and tokens of one user or service.
        """
        for_all = caller.acts_on_all or caller.drains or not caller.name
        budget = self._budgets.pop((account, for_all), None) or self._new(for_all)
        self._budgets[account, for_all] = budget
        if len(self._budgets) > MOST:
            self._budgets.popitem(last=False)
        wait = budget.wait(reserve=_ENOUGH)
        if not wait:
            budget.spend()
        return wait

    def _new(self, for_all: bool) -> Budget:
        if for_all:
            return Budget(self._clock, PER_SECOND_FOR_ALL, AT_ONCE_FOR_ALL)
        return Budget(self._clock, PER_SECOND, AT_ONCE)


def account_of(user: Mapping[str, Any]) -> str:
    """Return a unique name for the hub's user or service. Users and services never have the same name."""
    return f"{user.get('kind')}:{user['name']}"


log = logging.getLogger("gpushare.service.api")

OF_LOGIN = ("_xsrf", "token")
"""Arguments that the hub's library handles."""

Rule = tuple[str, type[Page], dict[str, Any]]


def routes(operations: Sequence[Operation], services: Services, prefix: str) -> list[Rule]:
    """Return the routing rules under ``prefix``, which ends with a slash."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    repeated: Idempotency[str] = Idempotency()
    budgets = ActionBudgets()
    rules: list[Rule] = [
        (
            re.escape(prefix) + _pattern(path),
            OperationHandler,
            {"operations": methods, "services": services, "repeated": repeated, "budgets": budgets},
        )
        for path, methods in by_path.items()
    ]
    return [*rules, (re.escape(prefix) + ".*", UnknownAddress, {})]


def _pattern(path: str) -> str:
    return re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path))


class ApiPage(Page):
    """Handler for a path of the API. Errors are JSON objects of `answers.Refusal`."""

    def prepare_login(self) -> None:
        """Refuse a request without a login. Raises ApiError."""
        if self.current_user:
            return
        # the hub's library refuses a cookie without the token and reports that only in its log
        if self.hub_auth.get_session_id(self) and "Authorization" not in self.request.headers:
            raise ApiError(403, "xsrf", words.XSRF)
        raise ApiError(403, "login", words.LOG_IN)

    def refuse(self, error: ApiError) -> None:
        """Answer with the error."""
        self.set_status(error.status)
        self.set_header("Content-Type", "application/json")
        if error.retry_after is not None:
            self.set_header("Retry-After", str(error.retry_after))
        self.finish(Refusal(status=error.status, message=error.message, code=error.code).model_dump_json())

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with an error that tornado raised, or an unexpected error, as JSON."""
        code = {405: "method"}.get(status_code, "internal" if status_code >= 500 else "bad-request")
        self.refuse(ApiError(status_code, code, words.INTERNAL if status_code >= 500 else self._reason))


class UnknownAddress(ApiPage):
    """Handler for paths that do not exist."""

    async def prepare(self) -> None:
        self.refuse(ApiError(404, "unknown", words.UNKNOWN_ADDRESS))


class OperationHandler(ApiPage):
    """Handler for one path and its operations."""

    def initialize(
        self,
        operations: Mapping[str, Operation],
        services: Services,
        repeated: Idempotency[str],
        budgets: ActionBudgets,
    ) -> None:
        self._operations = operations
        self._services = services
        self._repeated = repeated
        self._budgets = budgets
        self._gone = asyncio.Event()

    def on_connection_close(self) -> None:
        self._gone.set()

    async def get(self, **path: str) -> None:
        """Answer a request with any method."""
        method = self.request.method or ""
        try:
            self.prepare_login()
            operation = self._operations.get(method)
            if operation is None:
                self.set_header("Allow", ", ".join(self._operations))
                raise ApiError(405, "method", words.wrong_method(method, list(self._operations)))
            call = self._call(operation, path)
            if operation.streams:
                await self._stream(cast("AsyncIterator[str]", operation.answered_by(call)))
            else:
                await self._finish(operation, call)
        except ApiError as error:
            self.refuse(error)

    post = put = delete = get

    def _call(self, operation: Operation, path: Mapping[str, str]) -> Call[Any, Any]:
        caller, needs = self.caller, operation.needs
        needs.check(caller)
        query = {name: self.get_query_argument(name) for name in self.request.query_arguments if name not in OF_LOGIN}
        return Call(self._services, caller, path, _valid(operation.query, query), self._body(operation), needs)

    def _body(self, operation: Operation) -> BaseModel:
        if operation.body is Nothing:
            return Nothing()
        try:
            sent = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "bad-request", words.not_json(str(error))) from None
        if not isinstance(sent, dict):
            raise ApiError(400, "bad-request", words.not_json(f"it is a {type(sent).__name__}"))
        # JSON has types: true is not a number of hours, and "4" is text
        return _valid(operation.body, sent, strict=True)

    async def _finish(self, operation: Operation, call: Call[Any, Any]) -> None:
        async def act() -> str:
            # counted here, so that the stored answer to a repeated request is not counted
            if operation.acts:
                self._count(call)
            answer = await cast("Any", operation.answered_by(call))
            if isinstance(answer, Raw):
                self.set_header("Content-Type", answer.content_type)
                for name, value in answer.headers.items():
                    self.set_header(name, value)
                return answer.text
            return str(answer.model_dump_json())

        self.set_header("Content-Type", "application/json")
        key = self.request.headers.get("Idempotency-Key", "")
        if not key or not operation.acts:
            self.finish(await act())
            return
        if len(key) > MOST_LETTERS:
            raise ApiError(400, "bad-request", words.wrong_argument("Idempotency-Key", "the key is too long"))
        request = (operation.name, tuple(sorted(call.path.items())), call.query, call.body)
        try:
            self.finish(await self._repeated.once(account_of(self.current_user), key, request, act))
        except KeyReused:
            raise ApiError(409, "key-reused", words.KEY_REUSED) from None

    def _count(self, call: Call[Any, Any]) -> None:
        """Count a caller's action. Raises ApiError."""
        wait = self._budgets.wait(account_of(self.current_user), call.caller)
        if wait:
            seconds = math.ceil(wait)
            raise ApiError(429, "too-many", words.too_many(seconds), retry_after=seconds)

    async def _stream(self, events: AsyncIterator[str]) -> None:
        gone = asyncio.create_task(self._gone.wait())
        try:
            while not gone.done():
                following = asyncio.ensure_future(anext(events))
                await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    await cancel(following)
                    return
                self.set_header("Content-Type", "text/event-stream")
                # otherwise nginx delays the events until a buffer is full
                self.set_header("X-Accel-Buffering", "no")
                self.write(following.result())
                await self.flush()
        except (StopAsyncIteration, StreamClosedError):
            pass
        finally:
            gone.cancel()
            await cast("Any", events).aclose()


def _valid(model: type[BaseModel], sent: Mapping[str, Any], strict: bool = False) -> BaseModel:
    try:
        return model.model_validate(sent, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ApiError(400, "bad-request", words.wrong_argument(name, first["msg"])) from None

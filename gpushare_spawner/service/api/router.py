"""Makes request handlers of the declarations: login, rights, arguments, errors."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from tornado.iostream import StreamClosedError

from gpushare_spawner.service.api.answers import Refusal
from gpushare_spawner.service.api.idempotency import MOST_LETTERS, Idempotency, KeyReused
from gpushare_spawner.service.api.operation import AnyOperation, ApiError, Call, Method, Needs, Nothing, Raw
from gpushare_spawner.service.api.services import Services
from gpushare_spawner.service.web.action_budgets import ActionBudgets, who
from gpushare_spawner.service.web.page import Page
from gpushare_spawner.wording import api as words
from gpushare_spawner.wording import dashboard as dashboard_words

log = logging.getLogger("gpushare.service.api")

OF_LOGIN = ("_xsrf", "token")
"""Arguments that the hub's library reads."""

Rule = tuple[str, type[Page], dict[str, Any]]


def routes(operations: Sequence[AnyOperation], services: Services, prefix: str) -> list[Rule]:
    """Return the rules of the addresses under ``prefix``, which ends with a slash."""
    by_path: dict[str, dict[str, AnyOperation]] = {}
    for one in operations:
        by_path.setdefault(one.path, {})[one.method] = one
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
    """An address of the API. Errors are JSON objects: `answers.Refusal`."""

    def prepare_login(self) -> None:
        """Refuse without a login. Raises ApiError."""
        if self.current_user:
            return
        # the hub's library takes no cookie without the token, and says so only in its log
        if self.hub_auth.get_session_id(self) and "Authorization" not in self.request.headers:
            raise ApiError(403, "xsrf", words.XSRF)
        raise ApiError(403, "login", dashboard_words.LOG_IN)

    def refuse(self, error: ApiError) -> None:
        """Answer with an error."""
        self.set_status(error.status)
        self.set_header("Content-Type", "application/json")
        if error.retry_after is not None:
            self.set_header("Retry-After", str(error.retry_after))
        self.finish(Refusal(status=error.status, message=error.message, code=error.code).model_dump_json())

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Called by tornado where something else fails."""
        code = {405: "method"}.get(status_code, "internal" if status_code >= 500 else "bad-request")
        self.refuse(ApiError(status_code, code, words.INTERNAL if status_code >= 500 else self._reason))


class UnknownAddress(ApiPage):
    """Answers for all addresses that do not exist."""

    async def prepare(self) -> None:
        self.refuse(ApiError(404, "unknown", words.UNKNOWN_ADDRESS))


class OperationHandler(ApiPage):
    """One address with its operations."""

    def initialize(
        self,
        operations: Mapping[str, AnyOperation],
        services: Services,
        repeated: Idempotency[str],
        budgets: ActionBudgets,
    ) -> None:
        self._operations = operations
        self._services = services
        self._repeated = repeated
        self._budgets = budgets
        self._gone = asyncio.Event()

    async def get(self, **path: str) -> None:
        await self._answer("GET", path)

    async def post(self, **path: str) -> None:
        await self._answer("POST", path)

    async def put(self, **path: str) -> None:
        await self._answer("PUT", path)

    async def delete(self, **path: str) -> None:
        await self._answer("DELETE", path)

    def on_connection_close(self) -> None:
        self._gone.set()

    async def _answer(self, method: Method, path: Mapping[str, str]) -> None:
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

    def _call(self, operation: AnyOperation, path: Mapping[str, str]) -> Call[Any, Any]:
        caller = self.caller
        allowed = {Needs.ACT: caller.acts_on_all, Needs.DRAIN: caller.drains}.get(operation.needs, True)
        if not allowed:
            raise ApiError(403, "forbidden", words.scope_missing(operation.needs.scopes))
        query = {name: self.get_query_argument(name) for name in self.request.query_arguments if name not in OF_LOGIN}
        return Call(self._services, caller, path, _valid(operation.query, query), self._body(operation))

    def _body(self, operation: AnyOperation) -> BaseModel:
        if operation.body is Nothing:
            return Nothing()
        try:
            sent = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "bad-request", words.not_json(str(error))) from None
        if not isinstance(sent, dict):
            raise ApiError(400, "bad-request", words.not_json(f"it is a {type(sent).__name__}"))
        # JSON has types: true is no number of hours, and "4" is text
        return _valid(operation.body, sent, strict=True)

    async def _finish(self, operation: AnyOperation, call: Call[Any, Any]) -> None:
        async def act() -> str:
            # here, so that an answer that is kept for a repeated request costs nothing
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
            self.finish(await self._repeated.once(who(self.current_user), key, request, act))
        except KeyReused:
            raise ApiError(409, "key-reused", words.KEY_REUSED) from None

    def _count(self, call: Call[Any, Any]) -> None:
        """Count an action of the caller. Raises ApiError."""
        wait = self._budgets.wait(who(self.current_user), call.caller)
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
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                    return
                self.set_header("Content-Type", "text/event-stream")
                # nginx would keep the events until a buffer is full
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

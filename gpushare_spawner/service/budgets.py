"""Budgets in the service: follows their use, tells users what is left, and keeps admins' grants.

`quota.budgets` computes; the history stores GPU time and grants, so that a restart loses nothing. The culler asks which
sessions have no units (`used_up`), and the pages, the API and the metrics ask for `states`. The hub's form reads the
file `model.quota.BUDGETS_FILE`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpushare_spawner.descriptors import replace_private
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, MessageRequest
from gpushare_spawner.model.controls import Message, MessageCause
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.quota import BudgetState, BudgetStates, Quotas
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.quota.accounts import Account, AccountKind, QuotaAccounts
from gpushare_spawner.quota.budgets import BudgetUse, GpuTimeUse, Grant, Owner
from gpushare_spawner.service.actions.context import (
    ActionContext,
    ActionOutcome,
    ActionRefused,
    Actor,
    RefusalCode,
    harmless,
)
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.history.store import HistoryFailed
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import ask_all
from gpushare_spawner.service.waiting import PendingServers, account_of
from gpushare_spawner.wording import service as words

log = logging.getLogger("gpushare.service.budgets")

EVERY = 10.0
"""Seconds between checks of the quotas file."""
NOTIFY_EVERY = 60.0
"""Seconds between messages to sessions, and between writes of the hub's file."""
MOST_MESSAGES = 100
"""Maximum number of messages in that time. Our choice: each is a request to an agent or to Kubernetes."""
STATES_OF_STEP = 500
"""Budgets whose state is computed at once: a few milliseconds."""
GRANT = "grant"
"""The name of a grant in the history."""


class Budgets:
    """The budgets of the quotas in force. Without a history, and until its database answers, no budget is used up."""

    def __init__(self, context: ActionContext, history: History | None, file: Path | None = None) -> None:
        """Create it. ``file``: the hub's file; None: none is written."""
        self._context = context
        self._history = history
        self._file = file
        self._use: BudgetUse | None = None
        self._grants: list[Grant] = []
        self._read_to = float("-inf")
        """Time of the last check. A clock that was ahead has made use leave its windows, so it is read again."""
        self._since: dict[Owner, float] = {}
        """When each used-up budget was first found to be used up, in seconds since the epoch."""
        self._states: tuple[tuple[BudgetUse, tuple[Grant, ...]], float, list[BudgetState]] | None = None
        self._notified_at = float("-inf")
        self._trouble = LogOnce(log, "Budgets are not in force", "Budgets are in force", each_reason=True)
        self._file_trouble = LogOnce(log, "The form shows no budgets", "The form shows budgets again")
        self.problem = ""
        """Why budgets are not in force, as a sentence for admins; empty: they are, or there are none."""
        if history is not None:
            history.counted = self._count

    async def run(self) -> None:
        """Follow the quotas file, and tell users what is left, until cancelled."""
        while True:
            try:
                await self.refresh()
                await self._renew_states()
                if self._context.clock() - self._notified_at >= NOTIFY_EVERY:
                    self._notified_at = self._context.clock()
                    await self.notify()
            except Exception:
                log.exception("Cannot update the budgets")
            await asyncio.sleep(EVERY)

    async def refresh(self) -> None:
        """Read the use from the history if the quotas have changed."""
        quotas = self._context.quotas()
        if quotas is None or not quotas.has_budgets:
            self._use, self.problem = None, ""
        elif self._history is None:
            self._not_in_force(words.BUDGETS_NEED_HISTORY)
        elif self._use is None or self._use.accounts.quotas != quotas or self._context.clock() < self._read_to:
            await self._load(quotas, self._history)
        self._read_to = self._context.clock()

    async def _load(self, quotas: Quotas, history: History) -> None:
        use, now = BudgetUse(QuotaAccounts(quotas)), self._context.clock()
        try:
            grants = await history.grants()
            await history.read_uses(use.earliest(now), use.add)
        except (HistoryFailed, TimeoutError) as error:
            self._not_in_force(words.budgets_unknown(str(error)))
        else:
            self._use, self._grants, self.problem = use, grants, ""
            self._trouble.resolved()

    def _not_in_force(self, why: str) -> None:
        self._use, self.problem = None, why
        self._trouble.about(why)

    def _count(self, uses: Sequence[GpuTimeUse]) -> None:
        if self._use is not None:
            self._use.add(uses)

    def used_up(self, sessions: Iterable[SessionReport]) -> Mapping[str, float] | None:
        """Return the sessions with a used-up budget by id, and since when, in seconds since the epoch.

        None: unknown, because the use is not read yet, or the database does not answer. Sessions on other layers than
        native have no tiers, so they keep their units.
        """
        if self._use is None:
            quotas = self._context.quotas()
            return None if quotas is not None and quotas.has_budgets and self._history is not None else {}
        now, by_owner = self._context.clock(), dict[Owner, list[str]]()
        for session in sessions:
            if session.confirmed and session.gpus and session.layer is LayerName.NATIVE:
                by_owner.setdefault((session.quota, session.user), []).append(session.id)
        over = self._use.used_up(by_owner, now, self._grants)
        still = self._use.still_used_up(self._since, now, self._grants)
        budgets = {*still, *(budget for owners in over.values() for budget in owners)}
        self._since = {budget: self._since.get(budget, now) for budget in budgets}
        since = {owner: min(self._since[budget] for budget in of) for owner, of in over.items()}
        return {session: since[owner] for owner in over for session in by_owner[owner]}

    def within(self, pending: PendingServers) -> PendingServers:
        """Return a function that returns the hub's pending servers without those with a used-up budget.

        No session makes way for these.
        """

        async def servers() -> Sequence[HubServer] | None:
            waiting = await pending()
            return None if waiting is None else [server for server in waiting if not self._is_used_up(server)]

        return servers

    def _is_used_up(self, server: HubServer) -> bool:
        account = account_of(self._use.accounts, server) if self._use is not None else None
        if self._use is None or account is None:
            return False
        return bool(self._use.used_up([(account.key, server.user)], self._context.clock(), self._grants))

    def states(self) -> list[BudgetState]:
        """Return the state of each budget: of all accounts in the file, and of users with any use.

        The result is some `EVERY` seconds old, because pages ask every second.
        """
        if self._use is None:
            return []
        now, key = self._context.clock(), (self._use, tuple(self._grants))
        if self._states is None or self._states[0] != key or not 0 <= now - self._states[1] < 3 * EVERY:
            self._states = key, now, list(self._use.all_states(now, self._grants))
        return self._states[2]

    async def _renew_states(self) -> None:
        """Make the result of `states` anew, in small steps: thousands of users' budgets take a tenth of a second."""
        if self._use is None:
            return
        now, key, states = self._context.clock(), (self._use, tuple(self._grants)), list[BudgetState]()
        for state in self._use.all_states(now, self._grants):
            states.append(state)
            if len(states) % STATES_OF_STEP == 0:
                await asyncio.sleep(0)
        self._states = key, now, states

    def of_session(self, session: SessionReport) -> list[BudgetState]:
        """Return the budgets that a session uses."""
        if self._use is None:
            return []
        account = self._use.accounts.find(session.quota, session.user)
        return self._use.states(account, session.user, self._context.clock(), self._grants)

    async def notify(self) -> None:
        """Write the hub's file, and tell the users of sessions what is left."""
        if self._file is not None:
            await asyncio.to_thread(self._write, self._file, self.states())
        sent = 0
        for snapshot in await ask_all(self._context.agents):
            report = snapshot.report
            await asyncio.sleep(0)  # a node's sessions take milliseconds
            for session in report.sessions if report is not None and report.supports_budgets else ():
                request = self._message(session) if session.confirmed else None
                if request is None or sent >= MOST_MESSAGES:
                    continue
                sent += 1
                try:
                    await snapshot.agent.send(request)
                except (AgentUnreachable, ControlRefused) as error:
                    log.debug("The user of session %s has no message about the budget: %s", session.id, error)

    def _message(self, session: SessionReport) -> MessageRequest | None:
        """Return the request by which the session shows what is left; None if it does."""
        shown, states = session.message_of(MessageCause.BUDGET), self.of_session(session)
        if not states:
            return None if shown is None else MessageRequest.withdraw(session.id, MessageCause.BUDGET)
        text = words.budget_message(states)
        if shown is not None and shown.text == text:
            return None
        message = Message(text=text, by="", at=self._context.clock(), cause=MessageCause.BUDGET)
        return MessageRequest(id=session.id, message=message)

    def _write(self, file: Path, states: Sequence[BudgetState]) -> None:
        if not states and not file.exists():
            return
        content = BudgetStates(written_at=self._context.clock(), budgets=tuple(states))
        try:
            # it names users
            replace_private(file, content.model_dump_json(exclude_defaults=True).encode())
        except OSError as error:
            self._file_trouble.about(error)
        else:
            self._file_trouble.resolved()

    async def grant(self, owner: Owner, actor: Actor, hours: float, until: float, reason: str = "") -> ActionOutcome:
        """Grant GPU-hours beyond the budgets of an account, or of a user in it. It replaces an earlier grant."""
        account, now = self._account(*owner), self._context.clock()
        if until <= now:
            raise ActionRefused(words.GRANT_IS_OVER, RefusalCode.BAD_REQUEST)
        grant = Grant(account.key, owner[1], hours, now, until, actor.name, reason)
        await self._store(grant)
        self._log(account, owner[1], GRANT, actor, f"{words.grant(hours, until)} {harmless(reason)}".strip())
        return ActionOutcome(True, words.granted(account, owner[1], hours, until))

    async def end_grant(self, owner: Owner, actor: Actor) -> ActionOutcome:
        """End the grant of an account, or of a user in it."""
        account, now = self._account(*owner), self._context.clock()
        standing = [grant for grant in self._grants if (grant.account, grant.user) == (account.key, owner[1])]
        if not any(grant.until > now for grant in standing):
            return ActionOutcome(False, words.NO_GRANT)
        await self._store(Grant(account.key, owner[1], 0.0, now, now))
        self._log(account, owner[1], f"{GRANT}-ended", actor, words.GRANT_ENDED)
        return ActionOutcome(True, words.GRANT_ENDED)

    def _log(self, account: Account, user: str, action: str, actor: Actor, reason: str) -> None:
        """Log an action. ``reason`` has no user names, which the history keeps for a shorter time."""
        group = account.name if account.kind is AccountKind.GROUP else ""
        self._context.log.budget(group, user or ("" if group else account.name), action, actor.name, reason)

    def _account(self, key: str, user: str) -> Account:
        """Return the account if it has budgets of its own or, for a user, of each user. Raises ActionRefused."""
        if self._use is not None:
            account = self._use.accounts.find(key, user)
            # a user's own account has no other users, and other keys than those listed have no sessions
            exists = (
                account.key == key
                and account.name
                and (account.kind is AccountKind.GROUP or user in ("", account.name))
            )
            if exists and (account.quota.per_user.budget if user else account.quota.budget):
                return account
        raise ActionRefused(self.problem or words.no_budget(key, user), RefusalCode.BAD_REQUEST)

    async def _store(self, grant: Grant) -> None:
        assert self._history is not None
        try:
            await self._history.grant(grant)
            self._grants = await self._history.grants()
            await self._renew_states()
        except HistoryFailed as error:
            raise ActionRefused(words.budgets_unknown(""), RefusalCode.CAPACITY, to_admins=str(error)) from error
        self._notified_at = float("-inf")

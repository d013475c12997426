"""Sentences of the service: the REST API, the dashboard, the history, and quotas.

The dashboard's static texts are in `service/web/pages`. The results of actions are in `wording.actions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpushare_spawner.model.layers import Layer, LayerName
from gpushare_spawner.model.quantity import MILLICORES
from gpushare_spawner.model.quota import WINDOWS, BudgetState, Quotas, Resource, ResourceAmounts
from gpushare_spawner.model.share import UNITS_PER_GPU, SizeAdvice, Tier
from gpushare_spawner.quota.accounts import Account, AccountKind
from gpushare_spawner.quota.order import Admission, Limit, LimitExceeded
from gpushare_spawner.wording.amounts import (
    duration,
    either,
    elapsed,
    gpu_hours,
    gpu_share,
    latency,
    memory,
    plural,
    utc,
)
from gpushare_spawner.wording.layers import NOT_MEASURED, kept_within, when_idle

UNKNOWN_ADDRESS = "The API has no such address. GET openapi.json lists all addresses."
XSRF = (
    "The request has a login cookie but no valid XSRF token. Reload the page. A program must send a token of the hub "
    "instead of the cookie."
)
INTERNAL = "The service failed. Its log says why."
KEY_REUSED = "This Idempotency-Key was already used for another request. Use a new key for each request."


def body_too_large(most: int) -> str:
    """Return that a request's body is too large. ``most``: maximum bytes."""
    return f"The body is too large: it may have {most:,} bytes."


def too_many(seconds: int) -> str:
    """Return that a caller acts too often. ``seconds``: time until the next action is allowed."""
    return f"You have sent many actions in a short time. Try again in {seconds} s."


def unknown_node(name: str) -> str:
    """Return that no node has this name."""
    return f"There is no node {name!r} with an agent that answers."


def unknown_gpu(uuid: str, node: str) -> str:
    """Return that a node has no GPU with this UUID."""
    return f"Node {node} has no GPU {uuid!r}."


def unknown_session(name: str) -> str:
    """Return that a session does not exist, or that the client may not see it."""
    return f"You have no session {name!r}."


def unknown_spawn(name: str) -> str:
    """Return that a spawn does not exist, or that the client may not see it. ``name``: of the user and server."""
    return f"You have no spawn {name!r}."


def scope_missing(scopes: Sequence[str]) -> str:
    """Return that a caller lacks the permission for an operation. ``scopes``: any of them is sufficient."""
    return f"You are not allowed to do this. It is for admins, and for tokens with the scope {' or '.join(scopes)}."


def not_your_session(scopes: Sequence[str]) -> str:
    """Return that a caller may see a session but may not act on it."""
    return (
        f"You are not allowed to act on this session: a token needs the scope {scopes[0]} for its user's own sessions, "
        f"and {scopes[-1]} for the sessions of all users."
    )


def wrong_method(method: str, allowed: Sequence[str]) -> str:
    """Return that an address does not support a method."""
    return f"This address does not support {method}: use {' or '.join(allowed)}."


def wrong_argument(name: str, problem: str) -> str:
    """Return the problem with an argument. ``problem``: pydantic's phrase."""
    return f"{name}: {problem[:1].lower()}{problem[1:]}." if name else f"{problem}."


def not_json(problem: str) -> str:
    """Return that a body is not a JSON object."""
    return f"The body is not a JSON object: {problem}."


AGENT_UNAVAILABLE = "An agent is unavailable, so sessions can be missing here."
LOG_IN = "Log in first, or send a token that may access this service."
MOST_NAMED = 5
"""Maximum unconfirmed sessions of a node that a sentence names. A report can have any number of them."""
LONGEST_NAME = 60
"""Maximum characters of each name."""


def unconfirmed_sessions(node: str, sessions: Sequence[str]) -> str:
    """Return that a node reports sessions without a pod. ``sessions``: their reported names, any text."""
    names = [repr(name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "…") for name in sessions[:MOST_NAMED]]
    more = f" and {len(sessions) - MOST_NAMED} more" if len(sessions) > MOST_NAMED else ""
    reported, count = ("a session", "It counts") if len(sessions) == 1 else (f"{len(sessions)} sessions", "They count")
    return (
        f"Unconfirmed: node {node} reports {reported} without a pod of this hub on that node: {', '.join(names)}"
        f"{more}. {count} for nothing. Check the node and its agent, and that the service may read the namespaces of "
        "all pods with a share."
    )


def not_durable(node: str, reason: str) -> str:
    """Return that an agent cannot write its records. ``reason``: the operating system's error, with the folder."""
    return (
        f"The agent of {node} cannot write its records. Changes of sessions and tiers are in its memory only, and are "
        f"lost if it stops: {reason}. Free space there; the agent tries again every second."
    )


def cannot_stop(node: str, reason: str, templates: Sequence[str]) -> str:
    """Return that an agent stops no process. ``templates``: names of templates with stops; ``reason``: a clause."""
    return (
        f"The agent of {node} cannot stop processes that bypass the library: {reason}. gpu.bypass of "
        f"{', '.join(templates)} only notifies there."
    )


def restart_offer(node: str) -> str:
    """Return the benefit of a restart after owners reclaimed borrowed units. ``node``: a node with free units."""
    return (
        "The owners of the borrowed units have reclaimed them. After a restart the server would own its full share: "
        f"node {node} has units that nobody owns."
    )


def metrics_refused(scope: str) -> str:
    """Return that a viewer may not read the metrics. ``scope``: the scope that a token needs."""
    return f"The metrics are for admins, and for tokens with the scope {scope}."


def server_name(user: str, server: str) -> str:
    """Return a server's name as shown on the dashboard: "ann", "bob / thesis"."""
    return f"{user} / {server}" if server else user


def session_terms(template: str, units: int, gpus: int, last: int = 0) -> str:
    """Return a session's template and share. ``template``: its title; ``units``: current units of each GPU.

    ``last``: units of the last GPU if these are fewer; 0: as many.
    """
    return f"template {template}, share {gpu_share(units, gpus, last)}" if units else f"template {template}"


def node_name(node: str) -> str:
    """Return a node's name for the text of an action."""
    return f"node {node}"


def gpu_name(index: int, node: str) -> str:
    """Return a GPU's name for the text of an action."""
    return f"GPU {index} of {node}"


def kept(seconds: float, by: str) -> str:
    """Return that a share is kept. ``seconds``: from now; ``by``: the user or admin."""
    return f"Kept for another {elapsed(seconds)}, by {by}."


def not_free(share: str) -> str:
    """Return the list entry of a share for which the session's GPUs have too few free units."""
    return f"{share} (not free now)"


def exempt(seconds: float | None, by: str, reason: str) -> str:
    """Return that a session is exempt from idle actions. ``seconds``: from now; None: indefinitely."""
    period = f"for another {elapsed(seconds)}" if seconds is not None else "indefinitely"
    return f"Exempt from idle actions {period}, by {by}" + (f": {reason}" if reason else ".")


def shared_by(layer: Layer, measured: bool) -> str:
    """Return which layer shares a session's GPU and which idle actions can apply; empty for our own layer.

    ``measured``: whether an agent measures its GPU work.
    """
    if layer.name is LayerName.NATIVE:
        return ""
    unmeasured = "" if measured else f" {NOT_MEASURED}"
    return f"{layer.title} shares its GPU. {kept_within(layer)}{unmeasured} {when_idle(layer)}"


NO_HISTORY = (
    "This service keeps no history. An admin can switch it on: leave out --history=false, or GPUSHARE_HISTORY=false in "
    "the hub's environment."
)

UNAVAILABLE = "The database of the history does not answer. The service keeps trying. Admins see the reason here."


def restored(was: Tier) -> str:
    """Return why an agent restored a share. ``was``: the previous tier."""
    return f"The session was {was.value}, and works on the GPU again."


def not_a_time(name: str, text: str) -> str:
    """Return that an instant in a request is not valid."""
    return f"{name}: {text!r} is not a time: write a date like 2026-11-01, or 2026-11-01T14:00:00Z."


def not_a_key(text: str, keys: str) -> str:
    """Return that sums cannot be grouped by this key. ``keys``: the valid keys."""
    return f"by: {text!r} is not a valid key: choose from {keys}."


PERIOD_ENDS_FIRST = "until: the period ends before it begins: give a later time than since."
NOT_YOURS = "user: the history of other users is for admins, and for tokens with the scope custom:gpushare:read."
LABEL = "Quota"
"""The label of the choice between several quotas on the form."""


def exceeds_cluster(quotas: Quotas, capacity: int) -> str | None:
    """Return the problem if the guarantees exceed the capacity of all GPUs; None otherwise.

    ``capacity``: units of all GPUs. The default quota is excluded, because its number of users is unknown.
    """
    guaranteed = quotas.guaranteed_units
    if guaranteed <= capacity:
        return None
    return (
        f"the guarantees add up to {gpu_share(guaranteed)}, and there are {gpu_share(capacity)}: lower some guarantees"
    )


def name_of(account: Account) -> str:
    """Return an account's name for use in a sentence: "the quota of group optics"."""
    match account.kind:
        case AccountKind.GROUP:
            return f"the quota of group {account.name}"
        case AccountKind.USER:
            return f"the quota of user {account.name}"
        case _:
            return f"the default quota of user {account.name}"


def quota_amount(resource: Resource, amount: int) -> str:
    """Return an amount of a resource as text: "0.50 GPU", "4 CPU cores", "16 GiB of memory"."""
    match resource:
        case Resource.GPU:
            return gpu_share(amount)
        case Resource.CPU:
            return f"{amount / MILLICORES:g} CPU core{'' if amount == MILLICORES else 's'}"
        case Resource.MEMORY:
            return f"{memory(amount)} of memory"


_SINGLE = {Resource.GPU: UNITS_PER_GPU, Resource.CPU: MILLICORES}


def exceeded(refused: LimitExceeded, needs: ResourceAmounts) -> str:
    """Return that a quota's limit refuses a server. ``needs``: on all its GPUs together."""
    most, used, owner = refused.most, refused.used, name_of(refused.account)
    match refused.limit:
        case Limit.MAXIMUM:
            resource = refused.resource
            needed = needs[list(Resource).index(resource)]
            left = f"a template with at most {quota_amount(resource, most - used)}" if most > used else ""
            smaller = "a smaller share" if resource is Resource.GPU else left
            verb = "is" if resource is Resource.MEMORY or used <= _SINGLE[resource] else "are"
            return (
                f"This needs {quota_amount(resource, needed)}, and {owner} is limited to "
                f"{quota_amount(resource, most)}, of which {quota_amount(resource, used)} {verb} in use. "
                f"{f'Choose {smaller}, or try' if smaller else 'Try'} again when a server of this quota has stopped."
            )
        case Limit.SERVERS:
            return (
                f"No more than {plural(most, 'server')} with a GPU can use {owner}, and {used} "
                f"{'is' if used == 1 else 'are'} running. Try again when one of them has stopped."
            )
        case Limit.USER_SERVERS:
            return (
                f"You have {plural(used, 'server')} with a GPU in {owner}, which allows {most} for each "
                "user. Stop one first, or choose a template without a GPU."
            )
        case Limit.PRIORITY:
            allowed = either(refused.account.quota.priorities)
            return f"This template's priority is not allowed with {owner}: choose one with priority {allowed}."
        case Limit.GUARANTEE:
            return (
                f"Servers of this template never yield their GPU, so the guarantee must cover them: this needs "
                f"{gpu_share(needs.units)}, and {gpu_share(most)} of {owner} is left for such servers. Choose another "
                "template, or try again when such a server of this quota has stopped."
            )


BUDGETS_NEED_HISTORY = "The quotas have budgets, which need the history: they are not in force with --history=false."
GRANT_IS_OVER = "until: the grant would be over already: give a time in the future."
NO_GRANT = "No grant is in force."
GRANT_ENDED = "The grant is ended."


def budgets_unknown(why: str) -> str:
    """Return that budgets have no effect. ``why``: the database's problem, a sentence or empty."""
    return f"Budgets are not in force, because their use is unknown. {why}".strip()


def no_budget(account: str, user: str) -> str:
    """Return that a budget does not exist."""
    whose = f"per_user budget for {user} in {account}" if user else f"budget of {account}"
    return f"The quotas have no {whose}: GET quotas lists all budgets."


def grant(hours: float, until: float) -> str:
    """Return a grant as a sentence without names."""
    return f"{gpu_hours(hours)} GPU-hours more until {utc(until)}."


def granted(account: Account, user: str, hours: float, until: float) -> str:
    """Return the effect of a grant, as a sentence."""
    whose = f"{user} in {name_of(account)}" if user else name_of(account)
    return f"{gpu_hours(hours)} GPU-hours more are granted to {whose} until {utc(until)}."


_WINDOWS = {WINDOWS["day"]: "24 h", WINDOWS["week"]: "7 days", WINDOWS["month"]: "30 days"}


def budget_window(state: BudgetState) -> str:
    """Return a budget's window as a phrase: "in 7 days", "until 2027-02-01 00:00 UTC"."""
    if state.window is None:
        return f"until {utc(state.ends_at or 0.0)}"
    days, rest = divmod(state.window, WINDOWS["day"])
    other = f"{days:g} days" if not rest else duration(state.window)
    return f"in {_WINDOWS.get(state.window, other)}"


def budget_left(state: BudgetState) -> str:
    """Return what is left of a budget, as a phrase: "1.5 of 4 GPU-hours left in 24 h (group optics)"."""
    kind, _, name = state.account.partition(":")
    whose = f" (group {name}{', for you' if state.user else ''})" if kind == AccountKind.GROUP else ""
    granted = f", {gpu_hours(state.granted)} of them granted by an admin" if state.granted else ""
    left = f"{gpu_hours(state.left) if state.left else 'none'} of {gpu_hours(state.hours)} GPU-hours"
    return f"{left} left {budget_window(state)}{whose}{granted}"


def budget_message(states: Sequence[BudgetState]) -> str:
    """Return what is left of a session's budgets, least first. The text changes in steps of 5 %."""
    parts = []
    for state in sorted(states, key=lambda state: (state.part_left, state.account)):
        step = state.hours / 20
        about = state.left and max(step, step * round(state.left / step))
        more = f", more from {utc(600 * math.ceil(state.more_at / 600))} on" if state.used_up and state.more_at else ""
        parts.append(budget_left(state.model_copy(update={"used": state.hours - about})) + more)
    return "; ".join(parts)


def budget_on_card(states: Sequence[BudgetState]) -> str:
    """Return what is left of the budget with the least left, as a phrase for a card; empty: there are no budgets."""
    if not states:
        return ""
    return budget_used_up(states[0]) if states[0].used_up else f"budget: {budget_left(states[0])}"


def budget_used_up(state: BudgetState) -> str:
    """Return that a budget is used up, what that means, and when something is left again, as a phrase."""
    more = f", more from {utc(state.more_at)} on" if state.more_at is not None else ""
    return f"budget used up: {budget_left(state)}{more}. The server starts, and works in GPU time that others leave"


def over_quota_waits(admission: Admission) -> str:
    """Return that a waiting spawn is over quota, and what would be in quota."""
    return f"Your spawn is {_over_quota(admission)}."


def on_card(admission: Admission) -> str:
    """Return a quota's current effect on a spawn, as a phrase for a card."""
    refused = admission.refused
    if refused is not None:
        resource, used = refused.resource, quota_amount(refused.resource, refused.used)
        limits = {
            Limit.MAXIMUM: f"{used} of at most {quota_amount(resource, refused.most)} in use",
            Limit.SERVERS: f"{refused.used} of at most {plural(refused.most, 'server')} in use",
            Limit.USER_SERVERS: f"you have {refused.used} of at most {plural(refused.most, 'server')}",
            Limit.PRIORITY: "the quota does not allow the template's priority",
            Limit.GUARANTEE: f"{gpu_share(refused.most)} of the guarantee left for servers that never yield",
        }
        account = f"{refused.account.name}: " if refused.account.key != admission.account.key else ""
        return f"you cannot start now: {account}{limits[refused.limit]}"
    if not admission.in_quota:
        return _over_quota(admission)
    amounts = zip(Resource, admission.needs, admission.left, strict=True)
    left = " and ".join(quota_amount(resource, rest) for resource, needed, rest in amounts if needed and rest)
    return f"in quota, {left} left" if left else "in quota"


def _over_quota(admission: Admission) -> str:
    left = dict(zip(Resource, admission.left, strict=True))
    lacking = [resource for resource in admission.lacking if left[resource] or resource is not Resource.GPU]
    most = " and ".join(quota_amount(resource, left[resource]) for resource in lacking)
    return "over quota: spawns in quota come first" + (f" (in quota: at most {most})" if most else "")


def choice(account: Account, admission: Admission | None) -> str:
    """Return an account as a choice on the form. ``admission``: its result for a spawn now; None: unknown."""
    name = account.name if account.kind is AccountKind.GROUP else "your own"
    return f"{name}: {on_card(admission)}" if admission is not None else name


def advice(size: SizeAdvice) -> str:
    """Return advice on the size of a share, as a sentence; empty: the share is right, or too little is known."""
    share = gpu_share(size.advised_units)
    if size.advised_units > size.units:
        days = max(1, math.ceil((size.until - size.since) / 86400))
        within = "a day" if days == 1 else f"{days} days"
        return f"{share} would have saved {duration(size.saved_seconds)} of waiting within {within}."
    if size.advised_units == size.units:
        return ""
    if not size.later:
        return f"{share} would have been enough: none of {size.bursts} bursts of GPU work would have ended later."
    return (
        f"{share} would have been enough: {size.later} of {size.bursts} bursts of GPU work would have ended later, by "
        f"{latency(size.later_seconds / size.later)} on average."
    )

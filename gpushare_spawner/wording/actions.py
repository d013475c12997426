"""Results and refusals of the actions of users and admins.

The actions are cordons and drains, keeps, exemptions, messages, changes of a tier or share, stops and restarts. The
sentences appear in JupyterLab, on the dashboard and in terminals. They state durations, because the reader's time zone
is unknown here. Sentences about idle actions are in `wording.idle_decisions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpushare_spawner.idle.keep import KeepRefusal, KeepsLeft, WhyNoKeep
from gpushare_spawner.model.layers import Layer
from gpushare_spawner.model.share import Share, Tier, chosen
from gpushare_spawner.wording.amounts import duration, gpu_share, guarantee, memory, plural, utc

UNREADABLE = "The file with the cordons of this node cannot be read."
"""Reason for a cordon of a node that no admin requested."""
NOT_CORDONED = "New servers are placed there already."


def cordoned(where: str, drain: bool, stop_after: float | None) -> str:
    """Return the result of a cordon. ``where``: like "GPU 0 of node a"; ``stop_after``: seconds, None: no stops."""
    text = f"{where} gets no new servers."
    if not drain:
        return text
    if stop_after is None:
        return f"{text} The users of its sessions are notified."
    when = f"after {duration(stop_after)}, and after their notice period" if stop_after else "after their notice period"
    return f"{text} The users of its sessions are notified. Servers that still run there are stopped {when}."


def cordoned_already(where: str, drain: bool) -> str:
    """Return that a GPU or node is already cordoned or drained."""
    return f"{where} is already {'drained' if drain else 'cordoned'}."


def uncordoned(where: str) -> str:
    """Return that new servers are placed on a GPU or node again."""
    return f"{where} gets new servers again."


def closed(drain: bool, by: str, reason: str) -> str:
    """Return why a GPU or node gets no new sessions: "Draining (admin: kernel update). No new sessions."."""
    return f"{'Draining' if drain else 'Cordoned'} ({by}{f': {reason}' if reason else ''}). No new sessions."


def drain_notice(where: str, reason: str, stop_at: float | None) -> str:
    """Return the notice for the user of a session on a drained GPU.

    ``stop_at``: seconds since the epoch; None if the server is not stopped.
    """
    end = "Please save your work and restart your server. It will run elsewhere."
    if stop_at is not None:
        end = (
            f"Your server will be stopped at {utc(stop_at)}. Save your work, and restart it before then. It will run "
            "elsewhere."
        )
    return f"{taken_out(where, reason)} {end}"


def taken_out(where: str, reason: str) -> str:
    """Return the first sentences of a drain's notice."""
    reason = reason.rstrip()
    end = "" if not reason or reason[-1] in ".!?" else "."
    return f"{where} is being taken out of service. {reason}{end}".rstrip()


def bypass_notice(pids: Sequence[int], limit: int, grace: float | None) -> str:
    """Return the notice for the user of a session that processes without the library make exceed its memory limit.

    ``pids``: those processes, on their node; ``limit``: bytes; ``grace``: seconds, None if they are not stopped.
    """
    shown = ", ".join(map(str, pids[:5])) + (f" and {len(pids) - 5} more" if len(pids) > 5 else "")
    single = len(pids) == 1
    end = "Please end it." if single else "Please end them."
    if grace is not None:
        subject = "It" if single else "They"
        end = f"{subject} will be stopped {duration(grace)} after this message if the session still does."
    return (
        f"{'Process' if single else 'Processes'} {shown} (as numbered on the node) {'uses' if single else 'use'} the "
        "GPU without GPU sharing: LD_PRELOAD was unset. The session holds more GPU memory than it may "
        f"({memory(limit)}). {end}"
    )


def process_stopped(pid: int, limit: int) -> str:
    """Return why a process of a session is stopped. ``limit``: the session's memory limit in bytes."""
    return (
        f"Process {pid} is stopped: it used the GPU without GPU sharing, and the session held more GPU memory than it "
        f"may ({memory(limit)})."
    )


NUMBER_REUSED = "Another request has the same number. Send the request again."
TOO_MANY_REQUESTS = "Too many requests. Try again in a minute."
ASK_NOT_SUPPORTED = "The service is older than your notebook server and does not know this request."

SESSION_ENDED = "The session has ended."
WORKED_MEANWHILE = "The session has used the GPU or has changed in the meantime. Nothing was done. Try again."
AGENT_FAILED = "Nothing was done: the GPU agent of this node could not do it. Try again in a minute, or ask the admin."
OLDER_AGENT = "The GPU agent of this node is older than the service and cannot do this. Ask the admin to update it."

NO_KEEPS = "Shares of this template cannot be kept. Ask the admin."
NO_KEEP = "The GPU share is not kept."
KEEP_NOT_IN_FUTURE = "A keep must end in the future. Give a duration, or a later time."
KEEP_ENDED = "The GPU share is no longer kept."
KEEP_WAS_OVER = "The keep expired."
EXEMPTION_WAS_OVER = "The exemption expired."
EXEMPTION_NOT_IN_FUTURE = "An exemption must end in the future. Give a later time, or none."
NOT_EXEMPT = "The session is not exempt from idle actions."
EXEMPTION_ENDED = "The session is no longer exempt from idle actions."
MESSAGE_SENT = "The message is shown to the user."
MESSAGE_SENT_ALREADY = "The user already has this message."
MESSAGE_WITHDRAWN = "The message is withdrawn."
NO_MESSAGE = "The user has no message from an admin."
NO_TEXT = "The message is empty. Enter a text."

RELEASED = "The GPU share is released. GPU work runs at once; some seconds of it restore the share."
NOT_NOTIFIED = "The user could not be notified."
RELEASED_ALREADY = "The GPU share is already released. GPU work runs at once; some seconds of it restore the share."
TIER_UNDER_WAY = (
    "The tier change is in progress: the GPU agent of this node has not confirmed it yet. GPU work that begins "
    "before then prevents it."
)
GPU_BUSY = "The session is using the GPU now. Try again when it is idle."
STOPS = "The server is being stopped."
STOPS_ALREADY = "The server is already being stopped."
NOT_RUNNING = "The server is not running."
STOP_IS_NO_TIER = "The tier can be active, downgraded or released. To stop the server, use the action stop."
RESTARTS_ALREADY = "The server is being restarted with another template. Try again when it is running."
RESTART_FINISHED = "The service was stopped meanwhile, and finished the restart when it started again."
RESTART_TOO_LATE = (
    "The service was stopped meanwhile, and started again more than 10 min later, so the server was not started. Start "
    "it on the hub's home page."
)
NOT_SETTLED = "The server is starting or stopping. Try again when it is running."
STOP_TAKES_LONG = (
    "The server did not stop within a minute, so it was not started again. When it has stopped, start it on the hub's "
    "home page."
)
GROUPS_UNKNOWN = (
    "Nothing was done: the hub does not tell the service your groups. Ask the admin to give the service's role the "
    "scope read:users:groups."
)
NOT_STARTING = "No server of this name is starting."
RUNS_ALREADY = "The server is already running. Stop it instead."
CANCELLED = "The spawn is cancelled."
REQUEUED = "The spawn is at the end of the queue."


def kept(seconds: float, tier: Tier) -> str:
    """Return that a share is kept for ``seconds`` from now. ``tier``: the session's tier."""
    text = f"The GPU share is kept for {duration(seconds)}."
    return text if tier is Tier.ACTIVE else f"{text} It is {tier} now: some seconds of GPU time restore it."


def kept_already(seconds: float) -> str:
    """Return that a share is already kept for another ``seconds``."""
    return f"The GPU share is already kept for another {duration(seconds)}."


def keep_refused(refusal: KeepRefusal, now: float) -> str:
    """Return why a user may not keep the share, and an alternative. ``now``: seconds since the epoch."""
    rule = refusal.rule
    match refusal.why:
        case WhyNoKeep.NOBODY:
            return NO_KEEPS
        case WhyNoKeep.TOO_LONG:
            return f"A share can be kept for at most {duration(rule.longest)}. Choose a shorter time."
        case WhyNoKeep.TOO_MANY:
            kept = plural(rule.at_once, "session")
            return f"You can keep {kept} at a time. End the keep of another session first."
        case WhyNoKeep.TOO_OFTEN:
            times = plural(rule.per_day, "time")
            wait = max(0.0, (refusal.again_at or now) - now)
            return f"You can keep shares {times} within 24 hours. You can keep a share again in {duration(wait)}."


def keeps_left(keeps: KeepsLeft, now: float) -> str:
    """Return a user's remaining keeps and their limits. ``now``: seconds since the epoch."""
    rule = keeps.rule
    if not keeps.left and keeps.again_at is None:
        return NO_KEEPS
    text = f"{keeps.left} of {plural(rule.per_day, 'keep')} left within 24 hours"
    if keeps.again_at is not None:
        return f"{text}. You can keep a share again in {duration(max(0.0, keeps.again_at - now))}."
    return f"{text}, each for at most {duration(rule.longest)}, {plural(rule.at_once, 'session')} at a time."


def exempted(seconds: float | None) -> str:
    """Return that a session is exempt from idle actions for ``seconds``; None: indefinitely."""
    return f"The session is exempt from idle actions{_for(seconds)}."


def exempt_already(seconds: float | None) -> str:
    """Return that a session is already exempt for ``seconds``; None: indefinitely."""
    return f"The session is already exempt from idle actions{_for(seconds)}."


def message_too_long(letters: int, most: int) -> str:
    """Return that a message has too many characters."""
    return f"The message has {letters} characters. At most {most} are allowed."


def tier_already(tier: Tier) -> str:
    """Return that a session is already in a tier."""
    return f"The session is already {tier}."


def tier_set(tier: Tier, units: int, gpus: int = 1) -> str:
    """Return that a session is now in a tier. ``units``: its units on each of its GPUs."""
    return f"The session is {tier} now and has {gpu_share(units, gpus)}." if units else RELEASED


def no_downgrade(template: str | None) -> str:
    """Return that a template defines no smaller share for a downgraded session.

    ``template``: the template's title; None if it was removed.
    """
    if template is None:
        return (
            "The session's template was removed, so the share of a downgraded session is unknown. Change its share "
            "instead."
        )
    return f"The template {template} has no downgrade_to, or it is not less than the session's share."


def agent_failed(why: str) -> str:
    """Return that a request to the session's agent failed. ``why``: a clause."""
    return f"Nothing was done: {why.rstrip('.')}. Try again in a minute."


def hub_failed(why: str) -> str:
    """Return that a request to the hub failed. ``why``: the hub's sentence."""
    return f"Nothing was done. {why}"


def restarts(template: str) -> str:
    """Return that a server restarts."""
    return f"The server restarts with the template {template}. It waits in the queue while no GPU is free for it."


def not_started(template: str, why: str) -> str:
    """Return that a server was stopped and could not start again. ``why``: the hub's sentence."""
    return (
        f"The server was stopped, and could not start with the template {template}. {why} Start it on the hub's home "
        "page."
    )


def started_as_before(template: str, why: str) -> str:
    """Return that a server was restarted with its old template. ``why``: the hub's sentence."""
    return f"The server could not start with the template {template}. It restarts with its previous template. {why}"


def would_refuse(user: str, why: str) -> str:
    """Return that the spawner would refuse the user's request. ``why``: the spawner's sentence to the user."""
    return f"Nothing was done. The spawner would say to {user}: {why}"


def not_queued_again(why: str) -> str:
    """Return that a spawn was cancelled and could not enter the queue again. ``why``: the hub's sentence."""
    return f"The spawn was cancelled, and could not enter the queue again. {why}"


def restarted_by(actor: str, template: str, reason: str = "") -> str:
    """Return why a server was restarted. ``reason``: the actor's text, or empty."""
    return f"{actor} restarted the server with the template {template}{because(reason)}"


def cancelled_by(actor: str, reason: str = "") -> str:
    """Return why a spawn was cancelled. ``reason``: the actor's text, or empty."""
    return f"{actor} cancelled the spawn{because(reason)}"


def requeued_by(actor: str, reason: str = "") -> str:
    """Return why a spawn is at the end of the queue. ``reason``: the actor's text, or empty."""
    return f"{actor} put the spawn at the end of the queue{because(reason)}"


def because(reason: str) -> str:
    """Return the end of a sentence with the reason, if there is one."""
    return f": {reason.rstrip('.')}." if reason else "."


def released_by(actor: str, reason: str = "") -> str:
    """Return why a share was released. ``reason``: the actor's text, or empty."""
    return f"{actor} released the share{because(reason)}"


def stopped_by(actor: str, reason: str = "") -> str:
    """Return why a server was stopped. ``reason``: the actor's text, or empty."""
    return f"{actor} stopped the server{because(reason)}"


def tier_set_by(tier: Tier, actor: str, reason: str = "") -> str:
    """Return why a session's tier was set. ``reason``: the actor's text, or empty."""
    return f"{actor} set the tier to {tier}{because(reason)}"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {duration(seconds)}"


def out_of_reach(layer: Layer) -> str:
    """Return that the sharing layer of a session's GPU cannot change its share or tier."""
    return f"{layer.title} provides this session's GPU and cannot change its share. You can stop the server."


NO_FRACTION = (
    "A share is a fraction of each of the session's GPUs, from 0.01 to 1 in steps of 0.01, like 0.25, or whole GPUs "
    "and a part of the last, like 1.5."
)
NO_GPU = "This session has no GPU, so it has no share to change. Restart the server with another template."
MAKES_WAY = "This session makes way for others, by their quotas. Its share cannot be changed now."


def other_gpus(share: Share, gpus: int) -> str:
    """Return that a share needs another number of GPUs than the session has."""
    return (
        f"A share of {share} is on {plural(share.count, 'GPU')}, and the session has {gpus}. The GPUs of a running "
        "server cannot change. Restart it with another template."
    )


def same(share: Share) -> str:
    """Return that a session already has this share."""
    return f"The share is already {share}."


def changed(before: Share, share: Share, borrowed: int, tier: Tier, memory_limit: int | None) -> str:
    """Return that a share was changed. ``borrowed``: borrowed units; ``memory_limit``: bytes, None: unchanged.

    Units are on each of the session's GPUs.
    """
    text = f"The share is now {share} (previously {before})."
    if borrowed:
        owned = gpu_share(share.units - borrowed, share.count, share.last_units) if share.units > borrowed else ""
        text += f" Guaranteed: {guarantee(owned, str(share))}."
    if memory_limit is not None:
        text += f" The server's programs can allocate {memory(memory_limit)} of GPU memory."
    return text if tier is Tier.ACTIVE else f"{text} It is {tier}: some seconds of GPU time restore it."


def not_allowed(choices: Iterable[int], gpus: int = 1) -> str:
    """Return which shares a user may change to. ``choices``: see `model.share.choice_of`, smallest first."""
    shares = [
        gpu_share(share.units, share.count, share.last_units) for share in (chosen(choice, gpus) for choice in choices)
    ]
    if not shares:
        return "No template that you may use has another share of this kind of GPU under the same rules. Ask the admin."
    listed = " or ".join([", ".join(shares[:-1]), shares[-1]]) if len(shares) > 1 else shares[0]
    return f"You can change this share to {listed}, as your templates say. Ask the admin for another share."


def too_many(title: str, most: int) -> str:
    """Return that a user already has the maximum number of servers with a template's share."""
    return f"You can have {plural(most, 'server')} with the share of {title} at a time. Stop one first."


def no_capacity(more: int, template: str | None) -> str:
    """Return that a session's GPU has too few free units. ``template``: title of one with the requested share."""
    return f"The session's GPU does not have {gpu_share(more)} more free now. Try again later{_or_queue(template)}"


def others_wait(spawns: int, template: str | None) -> str:
    """Return that waiting spawns get free units first."""
    waiting = f"{plural(spawns, 'server')} {'waits' if spawns == 1 else 'wait'}"
    return f"{waiting} for this kind of GPU, and free units go to the queue first. Try again later{_or_queue(template)}"


def changed_by(actor: str, before: Share, share: Share, reason: str = "") -> str:
    """Return the actor and the reason of a change of a share. ``reason``: the actor's text, or empty."""
    return f"{actor} changed the share from {before} to {share}{because(reason)}"


def _or_queue(template: str | None) -> str:
    if template is None:
        return "."
    return f", or restart the server with {template}: then it waits in the queue, and its kernels end."

"""Sentences about sessions of other sharing layers, and about requests that the service does not answer.

The sentences about a session state its terms and the layer's problems. The sentences about requests come from a
notebook server; the service's answers are in `wording.actions`. The sentences of the form and the queue are in
`wording.spawn_form`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.model.layers import LAYERS, IdleReach, Layer, LayerName
from gpushare_spawner.wording.amounts import utc

NOT_MEASURED = "Nothing measures this server's GPU work."
"""Text for a session without an agent that measures its GPU work."""


NO_AGENT = "No agent serves this server, so you cannot keep the share or stop the server from here. Use the dashboard."
"""Text for a server without a session socket in its pod."""


_REACH = {"downgraded": IdleReach.DOWNGRADE, "released": IdleReach.RELEASE}


def annotations_unreadable(why: str) -> str:
    """Return that the annotations of a server without an agent cannot be read."""
    return f"The annotations of this server's pod cannot be read: {why}. Tell the admin."


def other_layer(name: str) -> Layer | None:
    """Return the other sharing layer with that name; None: our own layer, or a layer known only to a newer agent."""
    return LAYERS[LayerName(name)] if name in LAYERS and name != LayerName.NATIVE else None


def kept_within(layer: Layer) -> str:
    """Return which limits keep a session within its share."""
    memory, compute = layer.memory.enforced, layer.compute.enforced
    if memory and compute:
        return "Each session is kept within its part of the GPU's memory and time."
    if memory:
        return "Each session is kept within its part of the GPU's memory. The GPU's time has no fixed parts."
    if compute:
        return "Each session is kept within its part of the GPU's time. The GPU's memory has no fixed parts."
    return "The share counts when GPUs are assigned. While sessions work, nothing keeps them within their shares."


def when_idle(layer: Layer) -> str:
    """Return which idle actions can apply to a server."""
    can = [name for name, needed in _REACH.items() if needed in layer.reach]
    does = f"be {', '.join([*can, 'stopped'])}" if can else "only be stopped"
    return f"When the server is idle, it can {does}."


INSTANCE_GONE = "The MIG instance of this server no longer exists. GPU work fails: stop the server and start it again."


def instance_failed(label: str, trouble: str) -> str:
    """Return that a session's MIG instance cannot be used. ``label``: its name; ``trouble``: the fault."""
    return f"{label} {trouble}. GPU programs of this server have failed: stop the server and start it again."


def daemon_down(gpu: int, why: str) -> str:
    """Return that a GPU's MPS daemon is not running. ``why``: a clause."""
    return f"The MPS daemon of GPU {gpu} is not running, and GPU work fails: {why}."


def daemon_restarted(gpu: int, ended_at: float) -> str:
    """Return that a GPU's MPS daemon ended and was restarted. ``ended_at``: seconds since the epoch."""
    return (
        f"The MPS daemon of GPU {gpu} ended at {utc(ended_at)} and was restarted. GPU programs that ran then have "
        "failed: restart their kernels."
    )


NO_SHARE = "This server has no GPU share: it was started without one."
NO_AGENT_FOR_CELLS = "No agent serves this server, so the GPU time of its cells is not known."
NO_CELLS = "The GPU agent of this machine is older than your notebook server and does not record the GPU time of cells."
ASK_UNKNOWN = "The GPU agent of this machine is older than your notebook server and does not know this request."


def no_answer(seconds: float) -> str:
    """Return that the service has not answered within ``seconds``, and the remedy."""
    why = "perhaps the idle culler is unavailable"
    return f"No answer within {seconds:g} s: {why}. Check the share before you try again."


def wrong_kind(kinds: Iterable[str]) -> str:
    """Return which kinds of requests are valid."""
    return f'"kind" must be one of {", ".join(kinds)}.'


def wrong_keep_time(given: str, end: str) -> str:
    """Return that ``given`` is not a valid length of a keep. ``end``: the word that ends a keep."""
    return (
        f"{given!r} is not a valid duration of a keep. Write at least a second, like 90m or 4h, or "
        f"{end!r} to end the keep."
    )


def wrong_value(kind: AskKind) -> str:
    """Return which value a request of this kind needs."""
    what = "the length of the keep in seconds" if kind is AskKind.KEEP else "the share in units of 1 %"
    return f'"value" must be a number of at least 1: {what}.'

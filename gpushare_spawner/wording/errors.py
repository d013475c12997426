"""Texts of errors: of an exception, an HTTP status, an agent that gives no answer, a GPU that two nodes report."""

from __future__ import annotations

from collections.abc import Sequence

_GOES_ON = "GPU work continues without the agent."
_REFUSALS = {
    1: "The agent could not read the request.",
    2: "The agent uses another version of the protocol. Restart the server to get the agent's version.",
    3: "The agent does not accept requests from this user.",
    4: "This session has ended. Restart the server to get a GPU share again.",
}

_EXTRAS = {
    "grpc": "kubernetes",
    "google": "kubernetes",
    "kubernetes_asyncio": "kubernetes",
    "kubespawner": "kubernetes",
    "systemdspawner": "systemd",
    "psycopg": "postgresql",
    "jupyterlab": "demo",
    "numpy": "demo",
    "cuda": "demo",
}
"""Top-level module -> the extra of gpushare-spawner in pyproject.toml that installs it."""

AGENT_NOT_YET = "The agent has not answered yet."
AGENT_CLOSED = f"The agent closed the connection. {_GOES_ON}"


def reason(error: BaseException) -> str:
    """Return the text of an exception; the name of its class where it has none, as a bare ``TimeoutError()``."""
    return str(error) or type(error).__name__


def belongs_to_extra(error: ImportError) -> bool:
    """Return whether an extra of gpushare-spawner installs the module that is missing."""
    return _module(error) in _EXTRAS


def missing_package(feature: str, error: ImportError) -> str:
    """Return which package a feature (an option, a class, a command) lacks, and the command that installs it."""
    module = _module(error)
    missing = f"{feature} needs the Python package {module}, which is not installed."
    if module not in _EXTRAS:
        return f"{missing} Install it in this Python environment."
    return f"{missing} Install it with: pip install 'gpushare-spawner[{_EXTRAS[module]}]'"


def _module(error: ImportError) -> str:
    return (error.name or "").partition(".")[0]


def http_status(code: int | None, phrase: str | None) -> str:
    """Return an HTTP status with the server's phrase, if it sent one: "503 Service Unavailable", "503"."""
    return f"{code} {phrase or ''}".strip()


def agent_refused(code: int) -> str:
    """Return what the code of an ERROR frame means to the session's user."""
    return _REFUSALS.get(code, f"The agent refused the request (code {code}).")


def agent_silent(timeout: float) -> str:
    """Return that the agent did not answer within some seconds."""
    return f"The agent did not answer within {timeout:g} s. {_GOES_ON}"


def agent_unavailable(reason: str) -> str:
    """Return that the agent cannot be reached, and why."""
    return f"The agent is unavailable ({reason}). {_GOES_ON}"


def doubled_gpu(uuid: str, nodes: Sequence[str]) -> str:
    """Return that several nodes report one GPU. ``nodes``: the first has it, since it was seen there first."""
    return (
        f"GPU {uuid} is reported by the nodes {', '.join(nodes[:-1])} and {nodes[-1]}. It counts for {nodes[0]} alone, "
        "and no server is placed on it elsewhere. Two GPUs never have one UUID: "
        "the agents run on one machine, machines with simulated GPUs were copied, or a node reports a GPU that it does "
        "not have."
    )

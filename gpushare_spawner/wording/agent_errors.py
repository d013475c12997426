"""Why a session's agent gave no answer, in sentences for the session's user."""

from __future__ import annotations

_GOES_ON = "GPU work continues without the agent."
_REFUSALS = {
    1: "The agent could not read the request.",
    2: "The agent uses another version of the protocol. Restart the server to get the agent's version.",
    3: "The agent does not accept requests from this user.",
    4: "This session has ended. Restart the server to get a GPU share again.",
}

NOT_YET = "The agent has not answered yet."
CLOSED = f"The agent closed the connection. {_GOES_ON}"


def refused(code: int) -> str:
    """Return what the code of an ERROR frame means to the user."""
    return _REFUSALS.get(code, f"The agent refused the request (code {code}).")


def no_answer(timeout: float) -> str:
    """Return that the agent did not answer within some seconds."""
    return f"The agent did not answer within {timeout:g} s. {_GOES_ON}"


def unavailable(reason: str) -> str:
    """Return that the agent cannot be reached, and why."""
    return f"The agent is unavailable ({reason}). {_GOES_ON}"

"""What one session's notebook server asks of the service: taken from observers, handed on in the report, answered.

Any process of the session's user can send asks, as many as it likes. Few wait at a time, and few reach the service in a
minute; the agent itself answers the others. Does not decide anything: that is the service's.
"""

from __future__ import annotations

from collections.abc import Callable

from gpushare_spawner.model.controls import ASK_SECONDS, MOST_ASKS, Ask, AskAnswer
from gpushare_spawner.model.protocol.frames import AskKind
from gpushare_spawner.rate_limit import Budget
from gpushare_spawner.wording.controls.session_controls import ASK_UNKNOWN, ASKED_BEFORE, ASKED_TOO_OFTEN

ASKS_AT_ONCE = 8
"""Asks that reach the service after a pause. Ours: nobody presses more buttons in a minute."""
ASKS_PER_SECOND = 1 / 15
"""And in the long run: each can change the session's tier, and is an entry of the history."""
READS_AT_ONCE, READS_PER_SECOND = 30, 1 / 2
"""Asks that only read have a budget of their own, so that a user who acts often can still read. Ours: JupyterLab reads
twice for each dialog that is opened and each change of the share; the service computes a list for it."""
_ALMOST_ONE = 0.999
"""An ask needs a whole one of the budget; sums of floats are not exact."""
MOST_ANSWERS = 16
"""Answers that are remembered, so that an ask that is sent again gets the same one."""


class Asks:
    """The asks of one session that wait, and its last answers."""

    def __init__(self, clock: Callable[[], float], steady: Callable[[], float]) -> None:
        """`clock` gives seconds since the epoch; `steady` seconds of a clock that nobody sets."""
        self._clock = clock
        self._steady = steady
        self._actions = Budget(steady, ASKS_PER_SECOND, ASKS_AT_ONCE)
        self._reads = Budget(steady, READS_PER_SECOND, READS_AT_ONCE)
        self._waiting: dict[int, tuple[float, Ask]] = {}
        """By number, the oldest first, each with the time of `steady` when it came."""
        self._answers: dict[int, tuple[float, Ask | None, AskAnswer]] = {}
        """By number, the oldest first, with the time of `steady` when it was given, and the ask if it waited."""

    def take(self, number: int, kind: int, value: float) -> AskAnswer | None:
        """Take an ask. Returns the answer where there is one already; None: it waits for the service's."""
        self._forget()
        ask = Ask(number=number, kind=kind, value=value, at=self._clock())
        if number in self._answers:
            _, asked, answer = self._answers[number]
            return answer if asked is None or _same(asked, ask) else self._refusal(number, ASKED_BEFORE)
        if number in self._waiting:
            return None if _same(self._waiting[number][1], ask) else self._refusal(number, ASKED_BEFORE)
        if kind not in list(AskKind):
            return self._refusal(number, ASK_UNKNOWN)
        reads = AskKind(kind).reads
        budget = self._reads if reads else self._actions
        waiting = sum(AskKind(one.kind).reads == reads for _, one in self._waiting.values())
        if waiting >= MOST_ASKS or budget.wait(keep=_ALMOST_ONE) > 0:
            return self._refusal(number, ASKED_TOO_OFTEN)
        budget.spend()
        self._waiting[number] = self._steady(), ask
        return None

    def waiting(self) -> tuple[Ask, ...]:
        """Return the asks that wait for the service's answer, the oldest first."""
        self._forget()
        return tuple(ask for _, ask in self._waiting.values())

    def answered(self, answer: AskAnswer) -> bool:
        """Take the service's answer. Returns whether it is new."""
        self._forget()
        if answer.number in self._answers:
            return False
        asked = self._waiting.pop(answer.number, None)
        self._answers[answer.number] = self._steady(), asked[1] if asked is not None else None, answer
        while len(self._answers) > MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return True

    def clock_was_set(self, by: float) -> None:
        """Move the instants of asks that wait by a step of the clock."""
        self._waiting = {
            number: (came, ask.model_copy(update={"at": max(0.0, ask.at + by)}))
            for number, (came, ask) in self._waiting.items()
        }

    def _refusal(self, number: int, text: str) -> AskAnswer:
        return AskAnswer(number=number, done=False, text=text, at=self._clock())

    def _forget(self) -> None:
        """Drop what is too old."""
        long_ago = self._steady() - ASK_SECONDS
        self._waiting = {number: one for number, one in self._waiting.items() if one[0] > long_ago}
        self._answers = {number: one for number, one in self._answers.items() if one[0] > long_ago}


def _same(one: Ask, other: Ask) -> bool:
    return (one.kind, one.value) == (other.kind, other.value)

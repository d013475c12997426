"""The right size of a share: replays recorded bursts under the arbiter with other shares, in virtual time. Pure.

The neighbours are those that were recorded, with their bursts and shares: a replay predicts what the same days with
another share would have been. Units that a smaller share frees stay unused. A session begins each burst as long after
the end of the burst before it as recorded, because a user waits for results; after a longer pause, it begins at the
recorded time. If the replay with the share that the session had does not agree with the record, there is no advice.

`advise` chooses the share. service/right_size.py reads the recorded bursts, calls it and stores the advice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from gpushare_spawner.arbiter.replay import VirtualClock, VirtualGpu, VirtualProcess
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.report import Burst
from gpushare_spawner.model.share import UNITS_PER_GPU, SizeAdvice

HOUR = 3600.0
MOST_OWN, MOST_OTHER, MOST_CONTENDED = 500, 800, HOUR
"""Maximum bursts of a session, and of its neighbours, that are replayed: the most recent. The session's may have
competed for so many seconds. A replay on a crowded GPU then takes about two seconds of CPU time."""
FEWEST_BURSTS, LEAST_WORK = 20, 1800.0
"""Fewer bursts with fewer GPU seconds than this are not evidence of a user's work. A training run has few bursts, of up
to 10 minutes."""
NEAR = 60.0
"""Seconds between two bursts from which one does not affect the other: leases end a second after the work, and a debt
begins to fade after `ArbiterSettings.long_pause`."""
THINKING = 300.0
"""Longest pause, in seconds, after which a user is taken to have waited for the result: three of four pauses are
shorter than 7 minutes (benchmarks/interactive.py)."""
NOTICED = 0.1
"""Seconds by which a burst must end later to count: 100 ms appear instantaneous (J. Nielsen, Usability Engineering,
1993)."""
ENOUGH = 0.02
"""A share is enough if the session waits for at most this part of its GPU time longer: a little less than the overhead
that the arbiter allows itself (`ArbiterSettings.overhead_bound`)."""
PREDICTION_ERROR = 0.2
"""Part by which a predicted wait can be wrong, as tests/arbiter/test_right_size.py measures. A gain below it is not
advised, and a record that deviates more from its own replay is not used."""
WORTH_GPU_SECONDS = 1.0 * HOUR
"""GPU time that a smaller share must free within the replayed time: an hour of a whole GPU, the length of a
colleague's experiment. Less is not worth a user's attention."""
WORTH_WAITING = 600.0
"""Seconds that a larger share must save within the replayed time: two minutes on each of five days. A user would not
notice less."""


@dataclass(frozen=True)
class RecordedSession:
    """A session's share of a GPU, and its recorded bursts there, earliest first."""

    units: int
    bursts: tuple[Burst, ...]


@dataclass(frozen=True)
class Recording:
    """One GPU's record: a session, and its neighbours at the time. Memory in bytes."""

    gpu_bytes: int
    own: RecordedSession
    neighbours: tuple[RecordedSession, ...]

    def recent(self) -> Recording:
        """Return the recording within the limits, without neighbours' bursts that cannot have affected the session."""
        own = self.own.bursts[-MOST_OWN:]
        contended = list(accumulate(burst.contended_seconds for burst in reversed(own)))
        own = own[-max(1, bisect_right(contended, MOST_CONTENDED)) :]
        begins, ends = [burst.began_at for burst in own], [burst.ended_at for burst in own]

        def near(burst: Burst) -> bool:
            first = bisect_left(ends, burst.began_at - NEAR)
            return first < bisect_right(begins, burst.ended_at + NEAR)

        kept = [tuple(filter(near, neighbour.bursts)) for neighbour in self.neighbours]
        latest = sorted((burst.ended_at for burst in chain(*kept)), reverse=True)[:MOST_OTHER]
        since = latest[-1] if len(latest) == MOST_OTHER else 0.0
        if since:
            # without its neighbours, the session's earlier work would appear undisturbed
            own = own[bisect_left(ends, since) :]
        neighbours = (
            RecordedSession(neighbour.units, tuple(burst for burst in bursts if burst.ended_at >= since))
            for neighbour, bursts in zip(self.neighbours, kept, strict=True)
        )
        return Recording(
            self.gpu_bytes,
            RecordedSession(self.own.units, own),
            tuple(neighbour for neighbour in neighbours if neighbour.bursts),
        )


@dataclass(frozen=True)
class OtherShare:
    """Another share that the session's user could have. Memory in bytes."""

    units: int
    guarantee_bytes: int
    limit_bytes: int


def waits(recording: Recording, units: int) -> list[float] | None:
    """Return how long each burst of the session would have waited with a share of `units`, in seconds.

    None if the session's work would not have come to an end in thrice the time.
    """
    clock = VirtualClock()
    gpu = VirtualGpu(clock, recording.gpu_bytes, _SETTINGS.bandwidth_guess, _SETTINGS)
    sessions = [RecordedSession(units, recording.own.bursts), *recording.neighbours]
    start = min(session.bursts[0].began_at for session in sessions)
    end = sessions[0].bursts[-1].ended_at
    players = [
        # a neighbour that was there to the end would also be there if the session's work took longer
        _Player(clock, gpu, str(number), session, start, number > 0 and session.bursts[-1].ended_at > end - THINKING)
        for number, session in enumerate(sessions)
    ]
    length = end - start
    while len(players[0].waited) < len(recording.own.bursts):
        if clock.now > 3 * length + HOUR:
            return None
        clock.run(clock.now + HOUR)
    return players[0].waited


_SETTINGS = ArbiterSettings(period=2.0, shortest_run=0.1, shortest_hold=0.15)
"""The shipped settings, but with coarser turns among sessions that run together: a tenth of the events, and the same
parts of the GPU."""


class _Player:
    """Plays the bursts of one session."""

    def __init__(
        self, clock: VirtualClock, gpu: VirtualGpu, name: str, recorded: RecordedSession, start: float, again: bool
    ) -> None:
        """Begin at the time of the first burst. `again`: begin anew after the last burst."""
        self._clock, self._gpu, self._start, self._again = clock, gpu, start, again
        self._units, self._bursts = recorded.units, recorded.bursts
        self._process = VirtualProcess(name, 0, done=self._done)
        self._began = 0.0
        self._place = 0
        self.waited: list[float] = []
        clock.at(self._bursts[0].began_at - start, self._join)

    def _join(self) -> None:
        self._process.memory = self._bursts[0].memory_bytes
        self._gpu.session(self._process.name, self._units)
        self._gpu.connect(self._process)
        self._submit()

    def _submit(self) -> None:
        burst = self._bursts[self._place]
        self._began, self._process.memory = self._clock.now, burst.memory_bytes
        demand = burst.gpu_seconds / burst.alone_seconds if burst.alone_seconds > 0 else 1.0
        self._gpu.submit(self._process, burst.gpu_seconds, max(_LEAST_DEMAND, demand))

    def _done(self) -> None:
        burst = self._bursts[self._place]
        self.waited.append(max(0.0, self._clock.now - self._began - burst.alone_seconds))
        self._place += 1
        if self._place < len(self._bursts):
            coming = self._bursts[self._place]
            pause = coming.began_at - burst.ended_at
            begin = self._clock.now + pause if pause <= THINKING else coming.began_at - self._start
        elif self._again:
            self._place, begin = 0, self._clock.now + self._pause
        else:
            self._clock.after(NEAR, lambda: self._gpu.leave(self._process.name))
            return
        self._clock.at(begin, self._submit)

    @property
    def _pause(self) -> float:
        pauses = sorted(then.began_at - burst.ended_at for burst, then in pairwise(self._bursts))
        return pauses[len(pauses) // 2] if pauses else NEAR


_LEAST_DEMAND = 0.01
"""NVML gives the time of a process in whole percent."""


def advise(recordings: Iterable[Recording], others: Iterable[OtherShare], held_seconds: float) -> SizeAdvice | None:
    """Return what a session's record says about the size of its share; None without bursts.

    There is no advice after too few bursts, or if the replay does not agree with the record. `recordings`: its bursts
    on each GPU that it has used, all with the same share. `others`: shares that its user could have instead.
    `held_seconds`: how long it held its share in the last `ADVICE_PERIOD`.
    """
    replayed = [recent for recording in recordings if (recent := recording.recent()).own.bursts]
    bursts = sorted(burst for recording in replayed for burst in recording.own.bursts)
    if not bursts:
        return None
    units, gpu_seconds = replayed[0].own.units, sum(burst.gpu_seconds for burst in bursts)
    recorded = sum(burst.waited_seconds for burst in bursts)
    memory = sorted(burst.memory_bytes for burst in bursts)
    p50, p95 = (memory[min(len(memory) - 1, int(part * len(memory)))] for part in (0.5, 0.95))
    result = SizeAdvice(
        units=units,
        advised_units=units,
        since=bursts[0].began_at,
        until=bursts[-1].ended_at,
        bursts=len(bursts),
        gpu_seconds=gpu_seconds,
        waited_seconds=recorded,
        memory_p50_bytes=p50,
        memory_p95_bytes=p95,
        memory_peak_bytes=memory[-1],
    )
    now = _waits(replayed, units) if is_evidence(bursts) else None
    if now is None or abs(sum(now) - recorded) > PREDICTION_ERROR * max(recorded, sum(now)) + ENOUGH * gpu_seconds:
        return result
    fitting = [other for other in others if other.guarantee_bytes >= p95 and other.limit_bytes >= memory[-1]]
    by_units = sorted({other.units for other in fitting} - {units})
    for choice in by_units:
        freed = (units - choice) / UNITS_PER_GPU * held_seconds
        if choice > units or freed < WORTH_GPU_SECONDS:
            break
        # the smallest share that is enough
        later = _later(now, _waits(replayed, choice))
        if later is not None and sum(later) <= ENOUGH * gpu_seconds:
            noticed = [seconds for seconds in later if seconds >= NOTICED]
            return replace(
                result, advised_units=choice, later=len(noticed), later_seconds=sum(noticed), freed_gpu_seconds=freed
            )
    worth = max(WORTH_WAITING, PREDICTION_ERROR * sum(now))
    for choice in by_units if sum(now) >= worth else ():
        then = _waits(replayed, choice) if choice > units else None
        if then is not None and sum(now) - sum(then) >= worth:
            return replace(result, advised_units=choice, saved_seconds=sum(now) - sum(then))
    return result


def is_evidence(bursts: Sequence[Burst]) -> bool:
    """Return whether the bursts are enough for advice."""
    return len(bursts) >= FEWEST_BURSTS or sum(burst.gpu_seconds for burst in bursts) >= LEAST_WORK


def _waits(recordings: Iterable[Recording], units: int) -> list[float] | None:
    """Return the waits of all recordings, see `waits`."""
    each = [waits(recording, units) for recording in recordings]
    return None if any(part is None for part in each) else [seconds for part in each if part for seconds in part]


def _later(now: Sequence[float], then: Sequence[float] | None) -> list[float] | None:
    """Return by how much later each burst would have ended."""
    return None if then is None else [max(0.0, after - before) for before, after in zip(now, then, strict=True)]

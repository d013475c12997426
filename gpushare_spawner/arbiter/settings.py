"""Constants of the arbiter, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ArbiterSettings:
    """How a GPU's arbiter weighs latency against overhead. Raises ValueError for what cannot work."""

    overhead_bound: float = 0.025
    """Part of the GPU's time that forced hand-offs may cost in the long run: e in Q >= s/e. Above 0, below 1."""
    interactive_overhead_bound: float = 0.20
    """The same while a session waits that has just returned from a pause, or has worked for at most `short_burst`
    since: a user waits for it. At least `overhead_bound`, below 1."""
    min_time_slice: float = 0.1
    """Seconds that an incomer may use the GPU, after its pages are in, before its time slice can end. Ending one costs
    about a millisecond even where nothing is paged; a hundred times that keeps the cost at 1 %."""
    bandwidth_guess: float = 8e9
    """Bytes per second of bulk paging, each way, until the first measurements are in. Below PCIe gen3 x16's 12e9: too
    low a guess makes the first time slices long, too high a guess makes them wasteful."""
    bandwidth_memory: float = 0.7
    """How much of the old estimate stays when a measurement comes in (exponentially weighted moving average)."""
    measured_from: int = 16 * 2**20
    """Bytes; smaller transfers say more about latency than about bandwidth and are not counted."""
    switch_seconds: float = 0.001
    """Cost of a hand-off beside the paging: shut one gate, drain the device, open the other."""
    hand_off_credit: float = 10.0
    """Seconds of hand-offs that may be saved up in quiet times, for sessions that return after a pause with a short
    burst. The credit refills at the rate `overhead_bound`, so the long-run bound holds with it."""
    pause: float = 1.0
    """Seconds without GPU work after which a session's next burst may spend credit."""
    surely_quiet: float = 0.2
    """Seconds after IDLE from which on a driver's sample shows no work that was done before: samples are averages over
    up to a sixth of a second."""
    longest_quiet: float = 1.5
    """Seconds after IDLE after which a client must return its lease where its session owes time and the driver shows no
    use of it: it may compute on. The library returns a lease after 1 s without work."""
    long_pause: float = 30.0
    """Seconds without GPU work after which a session is taken to be away: what it owes begins to fade, and its pages
    leave the GPU before those of others."""
    returning_pause: float = 10.0
    """Seconds without GPU work after which a session counts as returning even if its bursts are typically long.
    Programs pause for seconds between their phases; users often return within half a minute: 8 % of the pauses, where
    their median is two minutes (lognormal, sigma 1)."""
    unnoticed_page_in: float = 0.08
    """Seconds of paging in that a user who returns does not notice: idle sessions page out so much each, before one of
    them pages out all. 100 ms count as instantaneous (J. Nielsen, Usability Engineering, 1993); 20 ms of them are left
    for other sessions to give way."""
    short_burst: float = 5.0
    """Seconds of work since its last pause for which a session counts as interactive."""
    max_debt: float = 300.0
    """Seconds (with all sessions working) within which a session is served again, however far it overran its part: a
    kernel cannot be interrupted, and a hung holder must not be punished for ever. A kernel of 3 s of a session with one
    unit of a hundred is paid back in full."""
    period: float = 0.2
    """Seconds in which each of the sessions that run together gets its part. Long enough for few switches, too
    short for a user to notice."""
    shortest_run: float = 0.01
    """GPU seconds that a session that was held back gets at least: two slices of the hardware."""
    shortest_hold: float = 0.015
    """Seconds for which a session is held back at least: to stop it and to start it costs about a millisecond each."""
    pace: float = 0.02
    """Seconds of GPU work that a client may queue while others compete. After a REVOKE it runs on for so
    long; less than some milliseconds would leave the GPU idle between kernels."""
    pace_alone: float = 0.1
    """Seconds of GPU work that a client may queue while no other session has work, but has processes that may have some
    at any moment. A client of a session that has been the only one for `unpaced_after` is not bounded."""
    unpaced_after: float = 1.0
    """Seconds without competition after which clients may queue more again."""
    revoke_timeout: float = 10.0
    """Seconds after which waiting clients are granted at the latest, although a revoked client has not answered (its
    kernel still runs, or it hangs). Results stay right: the pages then compete."""
    usual_revoke_timeout: float = 4.0
    """GPU seconds that a session may receive between REVOKE and its answer. While several sessions run, the time-out is
    as many times as long. Kernels of 3 s end within it."""
    shortest_revoke_timeout: float = 1.0
    """The same for a session that has ignored REVOKEs: above 0, at most `usual_revoke_timeout`."""
    memory_timeout: float = 60.0
    """Seconds for which a client that is short of memory waits for it once it is its turn: others may ignore REVOKE, or
    take long to be suspended. Then the program gets the driver's error. A suspension of 80 GB was seen to take 15 s
    (NVIDIA/cuda-checkpoint, issue 29)."""
    longest_memory_wait: float = 600.0
    """Seconds for which a client that is short of memory waits for it at most, with the time before its turn. Turns
    come within minutes (the bound of a wait for a lease); this ends a wait also where the sessions before it do not
    come or go."""
    page_out_step: int = 256 * 2**20
    """Bytes; a holder that grows makes others page out in steps of this size, not in one order for each allocation."""
    look_after: float = 1.0
    """Seconds of undisturbed work after which a client is taken to use the memory that it was seen to use."""
    look_every: float = 0.1
    """Seconds between questions about the memory on the GPU while clients run together only because less of their
    memory was seen there than they allocated. At 20 GB/s on 16 GB they cannot fill the GPU's last eighth in less."""
    crowded: float = 0.875
    """Part of the memory for managed pages. Where clients that work together have more of it on the GPU, what was seen
    of them says no longer what they use: the driver may be moving their pages out."""
    tolerance: float = 1 / 64
    """Part of the GPU's memory by which a client may exceed what was proven without being doubted."""
    doubt_for: float = 60.0
    """Seconds for which new clients of a session are doubted after one of its clients was, so that a new
    connection gains nothing."""
    context_bytes: int = 0
    """Device memory that each connected process takes beside its allocations (its CUDA context: some hundred MiB on a
    real GPU, nothing on a simulated one)."""
    exclusive: bool = False
    """One session at a time, even where all fit: for benchmarks, and for GPUs whose tenants must not run side by
    side."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and not (
                isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
            ):
                raise ValueError(f"{field.name} must be a number of at least 0, not {value!r}")
        if not 0 < self.overhead_bound < 1:
            raise ValueError(f"overhead_bound must be above 0 and below 1, not {self.overhead_bound!r}")
        if not self.overhead_bound <= self.interactive_overhead_bound < 1:
            raise ValueError(
                f"interactive_overhead_bound must be at least overhead_bound ({self.overhead_bound!r}) and below 1, "
                f"not {self.interactive_overhead_bound!r}"
            )
        if not 0 < self.shortest_revoke_timeout <= self.usual_revoke_timeout:
            raise ValueError(
                f"shortest_revoke_timeout must be above 0 and at most usual_revoke_timeout "
                f"({self.usual_revoke_timeout!r}), not {self.shortest_revoke_timeout!r}"
            )
        if not 0 <= self.bandwidth_memory < 1:
            raise ValueError(f"bandwidth_memory must be at least 0 and below 1, not {self.bandwidth_memory!r}")
        for name in ("min_time_slice", "bandwidth_guess", "switch_seconds", "revoke_timeout", "period"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)!r}")

"""Settings of the arbiter, each with the reason of its value.

Benchmarks and tests scale them. Values that are the same everywhere are constants of the modules that use them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArbiterSettings:
    """Balance of latency and overhead in a GPU's arbiter."""

    overhead_bound: float = 0.025
    """Part of the GPU's time that forced hand-offs may cost in the long run: e in Q >= s/e. Above 0, below 1."""
    interactive_overhead_bound: float = 0.20
    """The same while an interactive session waits: it just returned from a pause, or has worked for at most
    `short_burst` since. At least `overhead_bound`, below 1."""
    min_time_slice: float = 0.1
    """Seconds for which an incoming session may use the GPU, after its page-in, before its time slice can end. The end
    costs about a millisecond even without paging; a hundred times that keeps the cost at 1 %."""
    bandwidth_guess: float = 8e9
    """Bytes per second of bulk paging, each way, until the first measurements are in. Below PCIe gen3 x16's 12e9: too
    low a guess makes the first time slices long, too high a guess makes them wasteful."""
    bandwidth_memory: float = 0.7
    """Weight of the old estimate at a new measurement (exponentially weighted moving average)."""
    measured_from: int = 16 * 2**20
    """Bytes below which transfers are not counted: they measure latency rather than bandwidth."""
    switch_seconds: float = 0.001
    """Cost of a hand-off without paging: close one gate, drain the device, open the other."""
    hand_off_credit: float = 10.0
    """Seconds of hand-offs that quiet times can save, for sessions that return after a pause with a short burst.
    The credit refills at the rate `overhead_bound`, so the long-run bound holds with it."""
    pause: float = 1.0
    """Seconds without GPU work after which a session's next burst may spend credit."""
    long_pause: float = 30.0
    """Seconds without GPU work after which a session counts as absent: its debt begins to fade, and its pages leave the
    GPU before others' pages."""
    returning_pause: float = 10.0
    """Seconds without GPU work after which a session counts as returning even if its bursts are typically long.
    Programs pause for seconds between their phases; users often return within half a minute: 8 % of the pauses, where
    their median is two minutes (lognormal, sigma 1)."""
    unnoticed_page_in: float = 0.08
    """Seconds of page-in that a returning user does not notice: idle sessions page out so much each before one of them
    pages out all. 100 ms count as instantaneous (J. Nielsen, Usability Engineering, 1993); 20 ms of them are left for
    other sessions to give way."""
    short_burst: float = 5.0
    """Seconds of work since its last pause for which a session counts as interactive."""
    max_debt: float = 300.0
    """Seconds (with all sessions working) within which a session is served again after any overrun: a kernel cannot be
    interrupted, and a hung holder must not be penalized without end. A kernel of 3 s of a session with one unit of a
    hundred is repaid in full."""
    period: float = 0.2
    """Seconds in which each of the sessions that run together gets its part. Long enough for few switches, too
    short for a user to notice."""
    shortest_run: float = 0.01
    """Minimum GPU seconds of a session after it was held back: two slices of the hardware."""
    shortest_hold: float = 0.015
    """Minimum seconds for which a session is held back: a stop and a start cost about a millisecond each."""
    revoke_timeout: float = 10.0
    """Seconds after which waiting clients are granted at the latest, although a revoked client has not answered (its
    kernel still runs, or it hangs). Results stay correct: the pages then compete."""
    usual_revoke_timeout: float = 4.0
    """GPU seconds that a session may receive between REVOKE and its answer. The time-out is multiplied by the number of
    running sessions. Kernels of 3 s end within it."""
    shortest_revoke_timeout: float = 1.0
    """The same for a session that has ignored REVOKEs: above 0, at most `usual_revoke_timeout`."""
    page_out_step: int = 256 * 2**20
    """Bytes of one page-out order for a growing holder, instead of one order for each memory allocation."""
    proven_after: float = 1.0
    """Seconds of undisturbed work after which the observed memory use of a client counts as its use."""
    memory_poll_interval: float = 0.1
    """Seconds between reads of the memory on the GPU while clients run together only because less of their memory was
    seen there than they allocated. At 20 GB/s on 16 GB they cannot fill the GPU's last eighth in less."""
    crowded: float = 0.875
    """Part of the memory for managed pages. If clients that work together have more on the GPU, the figures no longer
    show their use: the driver may be moving pages out."""
    tolerance: float = 1 / 64
    """Part of the GPU's memory by which a client may exceed its proven use without doubt."""
    doubt_for: float = 60.0
    """Seconds for which new clients of a session are doubted after a doubt of another client: a new connection must not
    help."""
    context_bytes: int = 0
    """Device memory that each connected process takes beside its allocations (its CUDA context: some hundred MiB on a
    real GPU, nothing on a simulated one)."""
    exclusive: bool = False
    """One session at a time, even where all fit: for benchmarks, and for GPUs whose tenants must not run side by
    side."""

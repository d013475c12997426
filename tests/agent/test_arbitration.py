"""The shell around the arbiter, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import NO_GPU, Frame, Kind, gpu_bytes
from tests.agent.peers import FIRST, GIB


class Timer:
    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due, self.callback, self.off = due, callback, False

    def cancel(self) -> None:
        self.off = True


class World:
    """A clock that stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def call_at(self, due: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(due, callback)
        self.timers.append(timer)
        return timer

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            self.timers = [timer for timer in self.timers if not timer.off]
            due = min(self.timers, key=lambda timer: timer.due, default=None)
            if due is None or due.due > end:
                break
            self.timers.remove(due)
            self.now = max(self.now, due.due)
            due.callback()
        self.now = end


class Recorder:
    """A client that remembers what it was told, and when."""

    def __init__(self, number: int, world: World) -> None:
        self.number = number
        self.world = world
        self.told: list[tuple[float, Kind, tuple[int, ...]]] = []

    def send(self, kind: Kind, *fields: int, gpu: bytes = NO_GPU, flags: int = 0) -> None:
        assert gpu == gpu_bytes(FIRST.uuid)
        self.told.append((self.world.now, kind, fields))

    def kinds(self) -> list[Kind]:
        return [kind for _, kind, _ in self.told]


def frame(kind: Kind, *fields: int) -> Frame:
    return Frame(kind, fields + (0,) * (12 - len(fields)), gpu_bytes(FIRST.uuid))


def two_sessions(**settings: Any) -> tuple[World, GpuArbitration, Recorder, Recorder]:
    """Two clients of 12 GiB each on 16 GiB."""
    world = World()
    shell = GpuArbitration(FIRST, ArbiterSettings(**settings), lambda: world.now, world.call_at)
    clients = Recorder(1, world), Recorder(2, world)
    for client, session in zip(clients, ("ada", "bob"), strict=True):
        shell.add_session(session, 25)
        shell.join(client, session)
    return world, shell, *clients


def test_who_waits_hears_from_us_every_ten_seconds() -> None:
    """Within the library's 30 s of patience, and no longer once it has its lease or is gone."""
    world, shell, holder, waiting = two_sessions(revoke_timeout=60.0, usual_revoke_timeout=60.0)
    shell.receive(holder, frame(Kind.REQUEST, 12 * GIB))
    assert holder.kinds() == [Kind.GRANT]
    shell.receive(waiting, frame(Kind.REQUEST, 12 * GIB))
    world.go_on(9.0)
    assert waiting.kinds() == []
    world.go_on(0.5)
    # the holder does not answer its REVOKE at all: by and by the arbiter stops waiting for it
    world.go_on(200.0)
    renewals = [(at, fields) for at, kind, fields in waiting.told if kind is Kind.GRANT and fields[0] == 0]
    leases = [at for at, kind, fields in waiting.told if kind is Kind.GRANT and fields[0] != 0]
    assert len(leases) == 1
    instants = [100.0, *(at for at, _ in renewals), leases[0]]
    assert all(later - earlier <= 10.001 for earlier, later in itertools.pairwise(instants))
    assert all(at < leases[0] for at, _ in renewals)


def test_time_alone_ends_a_turn() -> None:
    world, shell, holder, waiting = two_sessions()
    shell.receive(holder, frame(Kind.REQUEST, 12 * GIB))
    shell.receive(waiting, frame(Kind.REQUEST, 12 * GIB))
    world.go_on(300.0)
    revoke = next(fields for _, kind, fields in holder.told if kind is Kind.REVOKE)
    assert revoke[0] == holder.told[0][2][0]
    assert revoke[1] >= 8 * GIB


def test_nothing_is_polled_while_nobody_waits() -> None:
    world, shell, holder, _ = two_sessions()
    shell.receive(holder, frame(Kind.REQUEST, 12 * GIB))
    world.go_on(3600.0)
    assert holder.kinds() == [Kind.GRANT]
    assert [timer for timer in world.timers if not timer.off] == []


def test_times_beyond_the_lease_are_cut() -> None:
    world, shell, holder, _ = two_sessions()
    shell.receive(holder, frame(Kind.REQUEST, GIB))
    lease = holder.told[0][2][0]
    world.go_on(2.0)
    shell.receive(holder, frame(Kind.RELEASE, lease, 2**64 - 1, 0))
    assert shell.snapshot("ada").gpu_seconds <= 2.0


def test_being_told_again_of_a_lease_does_not_make_it_younger() -> None:
    world, shell, holder, _ = two_sessions()
    shell.receive(holder, frame(Kind.REQUEST, GIB))
    lease = holder.told[0][2][0]
    world.go_on(2.0)
    shell.receive(holder, frame(Kind.REQUEST, GIB))
    assert holder.told[1][2][0] == lease
    world.go_on(1.0)
    shell.receive(holder, frame(Kind.RELEASE, lease, 3_000_000_000, 0))
    assert shell.snapshot("ada").gpu_seconds > 2.9


def test_a_stale_lease_changes_nothing() -> None:
    _world, shell, holder, waiting = two_sessions()
    shell.receive(holder, frame(Kind.REQUEST, 12 * GIB))
    shell.receive(waiting, frame(Kind.REQUEST, 12 * GIB))
    for kind in (Kind.RELEASE, Kind.IDLE, Kind.BUSY):
        shell.receive(holder, frame(kind, 4711, 5, 5))
    assert shell.snapshot("ada").held
    assert shell.waiting() == ("bob",)


def test_leaving_twice_and_leaving_without_having_joined() -> None:
    _world, shell, holder, waiting = two_sessions()
    shell.receive(holder, frame(Kind.REQUEST, 12 * GIB))
    shell.receive(waiting, frame(Kind.REQUEST, 12 * GIB))
    shell.leave(holder)
    shell.leave(holder)
    assert Kind.GRANT in waiting.kinds()


def test_memory_beyond_all_reason_is_cut() -> None:
    _world, shell, holder, _ = two_sessions()
    shell.receive(holder, frame(Kind.MEMORY, 2**64 - 1, 2**64 - 1))
    assert shell.snapshot("ada").memory_bytes <= 128 * FIRST.memory_bytes


def run_side_by_side(gpu: Gpu, context_bytes: int) -> bool:
    """Whether two processes of 7.9 GiB each get leases at the same time on 16 GiB."""
    world = World()
    settings = ArbiterSettings(context_bytes=context_bytes)
    shell = GpuArbitration(gpu, settings, lambda: world.now, world.call_at)
    clients = Recorder(1, world), Recorder(2, world)
    for client, session in zip(clients, ("ada", "bob"), strict=True):
        shell.add_session(session, 25)
        shell.join(client, session)
        shell.receive(client, frame(Kind.REQUEST, GIB * 79 // 10))
    return all(Kind.GRANT in client.kinds() for client in clients)


def test_contexts_take_memory_of_a_real_gpu_and_none_of_a_simulated_one() -> None:
    real = replace(FIRST, simulated=False)
    assert run_side_by_side(real, context_bytes=0)
    assert not run_side_by_side(real, context_bytes=GIB // 2)
    assert run_side_by_side(FIRST, context_bytes=GIB // 2)

"""GPU memory of CUDA contexts, by what the driver shows of processes and what they claim."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.sessions.attribution import LARGEST, ContextMemory, stated_bytes
from gpushare_spawner.agent.sessions.session import Session
from tests.agent.peers import FIRST

MIB = 2**20


@dataclass(eq=False)
class Connection:
    """A connected process."""

    peer: Any


def session(**claims: int) -> Session:
    """A session with a process for each claim: `p7` is process 7."""
    connections = {Connection(SimpleNamespace(pid=int(name[1:]))): size for name, size in claims.items()}
    said = {one: {FIRST.uuid: size} for one, size in connections.items()}
    found = SimpleNamespace(cuda=set(connections), claims=said, gpus=(FIRST,), suspended=False, context_bytes=0)
    return cast(Session, found)


def shown(**sizes: int | None) -> dict[str, GpuState]:
    return {FIRST.uuid: GpuState(True, processes={int(name[1:]): size for name, size in sizes.items()})}


def of(contexts: ContextMemory, states: dict[str, GpuState], one: Any) -> int:
    contexts.update(states, [one], stated_bytes(states, [one]))
    return int(one.context_bytes)


def test_context_is_what_the_driver_shows_beyond_the_claims() -> None:
    contexts = ContextMemory()
    assert of(contexts, shown(p7=900 * MIB), session(p7=600 * MIB)) == 300 * MIB


def test_context_is_not_forgotten_while_managed_memory_is_paged_out() -> None:
    contexts, one = ContextMemory(), session(p7=600 * MIB)
    of(contexts, shown(p7=900 * MIB), one)
    assert of(contexts, shown(p7=350 * MIB), one) == 300 * MIB


def test_contexts_of_all_processes_add_up_and_a_suspended_session_has_none() -> None:
    contexts, one = ContextMemory(), session(p7=0, p8=0, p9=50 * MIB)
    assert of(contexts, shown(p7=300 * MIB, p8=200 * MIB, p9=None), one) == 500 * MIB
    one.suspended = True
    assert of(contexts, shown(), one) == 0


def test_memory_that_a_process_does_not_claim_is_no_context_beyond_a_bound() -> None:
    assert of(ContextMemory(), shown(p7=20 * LARGEST), session(p7=0)) == LARGEST

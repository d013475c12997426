"""A process is stopped only if it bypasses the library, makes its session exceed its limit, and its user knows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuState
from gpushare_spawner.agent.sessions import attribution, enforcer
from gpushare_spawner.agent.sessions.attribution import ProcessOwner, attributed
from gpushare_spawner.model.control import ConfirmRequest, MessageRequest, StopProcessesRequest
from gpushare_spawner.model.controls import Message, MessageCause
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.report import BypassingProcess, SessionReport
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST, GIB, SECOND

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); input()"
Child = subprocess.Popen[bytes]


def child(code: str = "print('ready', flush=True); input()") -> Child:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for process in made:
        process.kill()
        process.communicate()


def session(agent: Agent, id: str = "ada") -> SessionReport:
    found = agent.node.report().session(id)
    assert found is not None
    return found


def shows(agent: Agent, memory: dict[int, int], gpu: Gpu = FIRST) -> None:
    agent.source.states[gpu.uuid] = GpuState(healthy=True, processes=dict(memory))


def opened(agent: Agent, limit: str = "1Gi") -> str:
    """The session ada, whose server is this process."""
    path = agent.open(memory_limit=limit)
    agent.node.requests.confirm(ConfirmRequest(id="ada", pid=os.getpid()))
    return path


async def send_notice(agent: Agent, id: str = "ada", cause: MessageCause = MessageCause.BYPASS) -> None:
    message = Message(text="It exceeds the limit.", by="culler", at=1.0, cause=cause)
    await agent.node.requests.answer(MessageRequest(id=id, message=message))


async def stop(agent: Agent, *named: BypassingProcess, id: str = "ada") -> None:
    await agent.node.requests.answer(StopProcessesRequest(id=id, processes=named))


async def polls(agent: Agent) -> None:
    await asyncio.sleep(8 * agent.settings.rounds.poll_every)


async def over(agent: Agent, eventually: Eventually, *pids: int) -> tuple[BypassingProcess, ...]:
    await eventually(lambda: tuple(each.pid for each in session(agent).exceeding) == pids)
    return session(agent).exceeding


async def test_process_over_the_limit_is_stopped_after_the_notice_and_the_request(
    agent: Agent, children: list[Child], eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    opened(agent)
    children.append(child())
    shows(agent, {children[0].pid: 2 * GIB})
    named = await over(agent, eventually, children[0].pid)
    await stop(agent, *named)
    await send_notice(agent, cause=MessageCause.ADMIN)
    await stop(agent, *named)
    await polls(agent)
    assert children[0].poll() is None, "its user does not know"
    await send_notice(agent)
    await polls(agent)
    assert children[0].poll() is None, "nobody has named it since"
    await stop(agent, *named)
    await eventually(lambda: children[0].poll() is not None)
    assert children[0].returncode == -15
    assert f"SIGTERM to process {children[0].pid}" in caplog.text
    assert agent.node.report().stop_trouble is None


async def test_process_that_ignores_sigterm_is_killed_unless_it_frees_its_memory(
    agent: Agent, children: list[Child], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enforcer, "KILL_AFTER", 0.5)
    opened(agent, "3Gi")
    await send_notice(agent)
    children += [child(STUBBORN), child(STUBBORN)]
    shows(agent, {children[0].pid: 4 * GIB})
    await stop(agent, *await over(agent, eventually, children[0].pid))
    shows(agent, {children[0].pid: GIB})
    await asyncio.sleep(1.0)
    assert children[0].poll() is None
    shows(agent, {children[0].pid: GIB, children[1].pid: 4 * GIB})
    await stop(agent, *await over(agent, eventually, children[1].pid))
    await eventually(lambda: children[1].poll() is not None)
    assert (children[0].poll(), children[1].returncode) == (None, -9)


async def test_process_that_is_within_the_limit_again_has_a_new_notice_before_it_is_stopped(
    agent: Agent, children: list[Child], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enforcer, "KILL_AFTER", 0.5)
    opened(agent, "3Gi")
    await send_notice(agent)
    children += [child(STUBBORN), child()]
    first, second = (each.pid for each in children)
    shows(agent, {first: 4 * GIB})
    await stop(agent, *await over(agent, eventually, first))
    shows(agent, {first: GIB, second: 4 * GIB})
    await over(agent, eventually, second)
    await asyncio.sleep(1.0)
    await send_notice(agent)  # now it names the second process
    shows(agent, {first: 4 * GIB, second: 4 * GIB})
    await over(agent, eventually, *sorted((first, second)))
    await asyncio.sleep(1.0)
    assert [each.poll() for each in children] == [None, None]
    await stop(agent, *session(agent).exceeding)
    await eventually(lambda: children[0].poll() is not None)


async def test_largest_processes_are_named_until_the_session_is_within_its_limit(
    agent: Agent, children: list[Child], eventually: Eventually
) -> None:
    peer = await agent.peer(opened(agent, "4Gi"))
    peer.send(Kind.MEMORY, 2 * GIB, 0, gpu=FIRST.uuid)
    children += [child(), child(), child()]
    small, middle, large = (each.pid for each in children)
    shows(agent, {os.getpid(): 2 * GIB, small: GIB // 4, middle: GIB // 2, large: GIB})
    await eventually(lambda: len(session(agent).bypassing_pids) == 3)
    await polls(agent)
    assert session(agent).exceeding == (), "all of them together are within the limit"
    shows(agent, {os.getpid(): 2 * GIB, small: GIB // 4, middle: GIB // 2, large: 3 * GIB})
    await over(agent, eventually, large)
    shows(agent, {os.getpid(): 2 * GIB, small: GIB // 4, middle: 2 * GIB, large: 3 * GIB})
    await over(agent, eventually, large, middle)
    assert session(agent).bypassing_pids == tuple(sorted((small, middle, large)))


async def test_session_may_hold_nothing_on_the_gpu_of_others(
    agent: Agent, children: list[Child], eventually: Eventually
) -> None:
    opened(agent)
    children.append(child())
    shows(agent, {children[0].pid: 0}, SECOND)
    await eventually(lambda: session(agent).bypassing_pids == (children[0].pid,))
    await polls(agent)
    assert session(agent).exceeding == ()
    shows(agent, {children[0].pid: GIB // 4}, SECOND)
    await over(agent, eventually, children[0].pid)


async def test_context_and_loaded_code_of_a_real_gpu_do_not_count(agent: Agent) -> None:
    real = Gpu(0, FIRST.uuid, "NVIDIA L4", FIRST.memory_bytes, simulated=False)
    unstated = agent.node._unstated
    agent.node.gpus[FIRST.uuid] = real
    context = agent.settings.arbiter.context_bytes
    assert unstated.beyond_context(7, FIRST.uuid, context + GIB) == 0
    assert unstated.beyond_context(7, FIRST.uuid, context + 3 * GIB) == 2 * GIB


async def test_request_of_one_session_stops_no_process_of_another(
    agent: Agent, children: list[Child], eventually: Eventually
) -> None:
    opened(agent)
    agent.open("mallory", gpus=(SECOND.uuid,), memory_limit="1Gi")
    children.append(child())
    shows(agent, {children[0].pid: 2 * GIB})
    (named,) = await over(agent, eventually, children[0].pid)
    for id in ("ada", "mallory"):
        await send_notice(agent, id)
    await stop(agent, named, id="mallory")
    await stop(agent, BypassingProcess(pid=named.pid, started=named.started + 1))
    await stop(agent, BypassingProcess(pid=os.getpid(), started=named.started))
    await polls(agent)
    assert children[0].poll() is None
    assert session(agent, "mallory").exceeding == ()


async def test_process_that_is_a_sessions_by_its_uid_alone_is_reported_and_not_stopped(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's shell outside of JupyterHub."""
    children.append(child())
    monkeypatch.setattr(processes, "uid", lambda pid: 4711)
    monkeypatch.setattr(processes, "cgroup", lambda pid: "/")
    known = [ProcessOwner("ada", server=None, uid=4711)]
    assert attributed([children[0].pid], known) == {"ada": {children[0].pid}}
    assert attributed([children[0].pid], known, certain=True) == {}


async def test_memory_that_is_a_sessions_by_its_uid_alone_costs_it_no_process(
    agent: Agent, children: list[Child], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(agent, "4Gi")
    children += [child(), child()]
    outside, inside = (each.pid for each in children)

    def of_kernel(pids: Iterable[int], known: Iterable[ProcessOwner], certain: bool = False) -> dict[str, set[int]]:
        return attributed([pid for pid in pids if not certain or pid != outside], known, certain=certain)

    monkeypatch.setattr(attribution, "attributed", of_kernel)
    shows(agent, {outside: 2 * GIB, inside: 3 * GIB})
    await eventually(lambda: set(session(agent).bypassing_pids) == {outside, inside})
    await polls(agent)
    assert session(agent).exceeding == (), "the processes that are its own for certain are within its limit"
    shows(agent, {outside: 9 * GIB, inside: 5 * GIB})
    await over(agent, eventually, inside)


async def test_process_in_the_cgroup_of_a_hub_with_the_same_uid_is_not_stopped(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of other users, without a session, of a hub that runs as one user."""
    children += [child(), child()]
    server, other = (each.pid for each in children)
    hub_uid = 1000
    monkeypatch.setattr(processes, "cgroup", lambda pid: "/hub.service")
    monkeypatch.setattr(processes, "cgroup_of_self", lambda: "/agent.service")
    monkeypatch.setattr(processes, "uid", lambda pid: hub_uid if pid == os.getpid() else 1000)
    known = [ProcessOwner("ada", server, uid=1000)]
    assert attributed([server, other], known) == {"ada": {server, other}}
    assert attributed([server, other], known, certain=True) == {"ada": {server}}
    hub_uid = 0
    assert attributed([other], known, certain=True) == {"ada": {other}}, "only its own server starts such processes"


async def test_named_process_is_stopped_by_the_next_agent_too(
    agent: Agent, children: list[Child], eventually: Eventually
) -> None:
    opened(agent)
    await send_notice(agent)
    children.append(child())
    shows(agent, {children[0].pid: 2 * GIB})
    named = await over(agent, eventually, children[0].pid)
    await agent.stop()
    await agent.start()
    await stop(agent, *named)  # before the agent has found it again
    await eventually(lambda: children[0].poll() == -15)


async def test_agent_says_why_it_cannot_stop_processes(
    agent: Agent, children: list[Child], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    opened(agent)
    await send_notice(agent)
    children.append(child())
    shows(agent, {children[0].pid: 2 * GIB})
    await stop(agent, *await over(agent, eventually, children[0].pid))
    why = f"the kernel refuses a signal to process {children[0].pid}: Operation not permitted"
    await eventually(lambda: agent.node.report().stop_trouble == why)


def test_rights_that_are_missing_are_known_before_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Gpu(0, FIRST.uuid, "NVIDIA L4", FIRST.memory_bytes, simulated=False)
    monkeypatch.setattr(processes, "sees_the_host", lambda: False)
    monkeypatch.setattr(processes, "effective_capabilities", lambda: 1 << 5)
    assert "hostPID" in (enforcer.why_not([FIRST, real]) or "")
    assert enforcer.why_not([FIRST]) is None
    monkeypatch.setattr(processes, "sees_the_host", lambda: True)
    assert enforcer.why_not([real]) is None
    monkeypatch.setattr(processes, "effective_capabilities", lambda: 0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert enforcer.why_not([real]) == "it lacks the capability KILL"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert enforcer.why_not([real]) is None, "it stops only its own user's processes"

"""The spawner with a real agent on simulated GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from gpushare_spawner.model.control import TierRequest
from gpushare_spawner.model.share import Share, Tier
from tests.agent.agent_process import AgentProcess
from tests.native.session_program import Program
from tests.placement.reports import ledger_of
from tests.present import present
from tests.spawner.local.test_mixin import environment_of
from tests.spawner.running_hub import RunningHub, until


async def test_servers_start_wait_and_stop_with_a_real_agent_that_is_killed_once(
    tmp_path: Path, templates: Path
) -> None:
    agent = AgentProcess(tmp_path, gpus=1)
    await agent.start()

    def configure(config: object) -> None:
        config.JupyterHub.tornado_settings = {"slow_spawn_timeout": 5}  # type: ignore[attr-defined]

    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: agent.process and agent.process.poll() is None and agent.end())
        hub = await stack.enter_async_context(RunningHub(tmp_path, templates, agent.client.socket, configure))
        assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201
        session = (await agent.client.report()).session("ada")
        assert session is not None
        assert (session.share_units, session.tier, session.confirmed) == (50, Tier.ACTIVE, True)
        assert session.pid == hub.spawner("ada").pid

        environment = await environment_of(hub.spawner("ada"))
        assert Path(environment["GPUSHARE_SOCKET"]).is_socket()
        assert str(agent.preload) in environment["LD_PRELOAD"]
        assert environment["CUDA_VISIBLE_DEVICES"] == session.gpus[0]

        # no room for a whole GPU while half of the only one is taken
        hub.user("ada").settings["slow_spawn_timeout"] = 0
        await hub.start_server("bob", {"profile": "whole-gpu"})
        await until(lambda: len(hub.reservations.queue) == 1)

        # the agent is killed and comes back: it knows its session, the waiting start goes on waiting
        agent.end(signal.SIGKILL)
        await agent.start()
        assert (await agent.client.report()).session("ada") is not None
        assert await hub.spawner("ada").poll() is None

        await hub.stop_server("ada")
        await hub.started("bob")
        report = await agent.client.report()
        assert [(found.id, found.share_units) for found in report.sessions] == [("bob", 100)]

        # a server that dies gives everything back
        os.kill(hub.spawner("bob").pid, signal.SIGKILL)
        user = hub.user("bob")
        await until(lambda: not user.spawners[""].active)
        await until(lambda: not hub.reservations.closing)
        assert not (await agent.client.report()).sessions


async def test_rules_for_other_sessions_hold_after_a_restart_of_hub_and_agent(tmp_path: Path, templates: Path) -> None:
    (templates / "lone.yaml").write_text(
        "{name: lone, display_name: Lone, labels: [exam], gpu: {fraction: 0.25}, placement: {alone: true}}"
    )
    (templates / "quiet.yaml").write_text(
        "{name: quiet, display_name: Quiet, gpu: {fraction: 0.25}, placement: {apart_from: [exam]}}"
    )
    (templates / "exam.yaml").write_text("{name: exam, display_name: Exam, labels: [exam], gpu: {fraction: 0.25}}")
    agent = AgentProcess(tmp_path, gpus=2)
    await agent.start()

    async def gpu_of(hub: RunningHub, user: str, profile: str) -> str:
        assert (await hub.start_server(user, {"profile": profile})).code == 201
        await hub.started(user)
        session = (await agent.client.report()).session(user)
        assert session is not None
        return session.gpus[0]

    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: agent.process and agent.process.poll() is None and agent.end())
        first = RunningHub(tmp_path, templates, agent.client.socket, lambda config: None)
        await first.__aenter__()
        quiet = await gpu_of(first, "ada", "quiet")
        process = first.spawner("ada").proc
        await first.end(cleanup_servers=False)
        agent.end(signal.SIGKILL)
        await agent.start()
        second = await stack.enter_async_context(
            RunningHub(tmp_path, templates, agent.client.socket, lambda config: None)
        )
        # the other GPU, although the fullest would be taken; then no GPU is left for a session that is alone
        assert await gpu_of(second, "bob", "exam") != quiet
        second.answer_at_once()
        await second.start_server("cyd", {"profile": "lone"})
        await until(lambda: len(second.reservations.queue) == 1)
        (ticket,) = second.reservations.queue
        await until(lambda: "want" in ticket.hint)
        assert ticket.hint == "All suitable GPUs have sessions, and the template wants 0.25 GPU alone."
        process.send_signal(signal.SIGKILL)
        process.wait()
        await second.started("cyd")
        session = (await agent.client.report()).session("cyd")
        assert session is not None
        assert session.gpus == (quiet,)


def kernels(*programs: Program) -> list[int]:
    """Kernels of 10 ms that programs have run in 2 s, all at the same time."""
    for program in programs:
        program.spin(2.0)
    return [program.hear()[1] for program in programs]


@pytest.mark.parametrize(
    ("gpu", "share"), [("{count: 2, fraction: 0.6}", Share(60, 2)), ("{fraction: 1.6}", Share(100, 2, 60))]
)
async def test_a_part_of_each_of_two_gpus_gets_its_time_on_each_and_yields_on_each_while_idle(
    tmp_path: Path, templates: Path, gpu: str, share: Share
) -> None:
    (templates / "parts.yaml").write_text(f"{{name: parts, display_name: Parts, gpu: {gpu}}}")
    (templates / "one.yaml").write_text("{name: one, display_name: One, gpu: {fraction: 0.2}}")
    agent = AgentProcess(tmp_path, gpus=2)
    await agent.start()
    programs: list[Program] = []
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: agent.process and agent.process.poll() is None and agent.end())
        hub = await stack.enter_async_context(RunningHub(tmp_path, templates, agent.client.socket, lambda config: None))
        for user, profile in (("ada", "parts"), ("bob", "one")):
            assert (await hub.start_server(user, {"profile": profile})).code == 201
        environments = [await environment_of(hub.spawner(user)) for user in ("ada", "bob")]
        gpus = environments[0]["CUDA_VISIBLE_DEVICES"].split(",")
        shared = environments[1]["CUDA_VISIBLE_DEVICES"]
        assert len(set(gpus)) == 2
        assert shared in gpus
        report = await agent.client.report()
        assert [present(report.session(user)).share for user in ("ada", "bob")] == [share, Share(20)]
        alone = next(gpu for gpu in gpus if gpu != shared)
        assert gpus == [alone, shared] or not share.last_units, "the GPU with more units is CUDA's first"
        for environment, uuid in ((environments[0], alone), (environments[0], shared), (environments[1], shared)):
            programs.append(Program(os.environ | environment | {"CUDA_VISIBLE_DEVICES": uuid}))
            stack.callback(programs[-1].end)
        # wide bounds, and several rounds: a program without a core for a while asks for less than its share
        rounds = [kernels(*programs) for _ in range(2)]
        while not 2.0 <= rounds[-1][1] / rounds[-1][2] <= 4.5 and len(rounds) < 12:
            rounds.append(kernels(*programs))
        _, larger, smaller = rounds[-1]
        assert 2.0 <= larger / smaller <= 4.5, rounds
        got = present((await agent.client.report()).session("ada")).delivered
        assert got.delivered_seconds >= 0.8 * got.entitled_seconds > 0, got
        await agent.client.send(TierRequest(id="ada", tier=Tier.DOWNGRADED, effective_units=10, reason="idle"))

        async def free() -> list[int]:
            ledger = ledger_of([await agent.client.report()])
            return [ledger.free_units(gpu) for gpu in (alone, shared)]

        assert await free() == [90, 70]
        kernels(programs[0])
        session = present((await agent.client.report()).session("ada"))
        assert (session.tier, session.effective_units) == (Tier.ACTIVE, share.units), "work on one GPU"
        assert await free() == [100 - share.units, 20]

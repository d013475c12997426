"""A program without the library over real processes: an agent on a simulated GPU, and a service; both are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.controls import MessageCause
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.test_agent_process import Program
from tests.service.fake_hub import FakeHub
from tests.service.over_processes import OverProcesses

TEMPLATE = """
name: exam
display_name: Exam
gpu: {fraction: 0.25, memory: {limit: 1Mi, guarantee: 1Mi}, bypass: {action: stop, grace: 3s}}
"""


@pytest.mark.slow
async def test_program_that_exceeds_the_limit_is_stopped_after_its_notice(
    hub_server: FakeHub,
    short_folder: Path,  # noqa: F811
) -> None:
    stage = OverProcesses(short_folder, hub_server, TEMPLATE)
    program: Program | None = None
    try:
        await stage.start()
        stage.start_service("--cull-every=1s")
        environment = dict(
            await stage.open(
                lambda gpu: OpenRequest(
                    id="ann",
                    user="ann",
                    uid=os.getuid(),
                    template="exam",
                    gpus=(gpu,),
                    share_units=25,
                    memory_limit="1Mi",
                )
            )
        )
        del environment["LD_PRELOAD"]
        program = Program(environment)
        await program.work(1)
        told = await stage.until(lambda session: session.message_of(MessageCause.BYPASS) is not None)
        assert [process.pid for process in told.exceeding] == [program.process.pid]
        # the grace begins again with the next service, and the next agent finds the process anew
        stage.kill_service()
        stage.agent.end(signal.SIGKILL)
        await stage.agent.start()
        stage.start_service("--cull-every=1s")
        assert program.process.poll() is None
        assert await asyncio.to_thread(program.process.wait, 60) == -signal.SIGTERM
        after = await stage.until(lambda session: session.message_of(MessageCause.BYPASS) is None)
        message = after.message_of(MessageCause.ACTION)
        assert message is not None
        assert message.text.startswith(f"Process {program.process.pid} is stopped: ")
    finally:
        if program is not None:
            program.end()
        stage.close()

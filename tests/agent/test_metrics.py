"""Prometheus metrics over HTTP."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

from gpushare_spawner.agent.metrics import serve_metrics
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST


async def test_metrics_follow_the_report(agent: Agent) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stop = serve_metrics(port, agent.node.report)
    try:
        agent.open("ada")

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())

        text = await asyncio.to_thread(scrape)
        gpu = f'{{gpu="{FIRST.uuid}",model="{FIRST.model}"}}'
        assert f"gpushare_gpu_capacity_units{gpu} 100.0" in text
        assert f"gpushare_gpu_healthy{gpu} 1.0" in text
        assert 'gpushare_session_guaranteed_units{session="ada",template="quarter-gpu",user="ada"} 25.0' in text
        agent.node.end_session("ada", "closed")
        assert "ada" not in await asyncio.to_thread(scrape)
    finally:
        await asyncio.to_thread(stop)

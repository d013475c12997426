"""A cluster that is about half full, for the benchmarks of placement."""

from __future__ import annotations

import random

from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.node import NodeResources

GPUS_PER_NODE = 8
MODELS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "Tesla T4")
SHARES = [Share(10), Share(25), Share(25), Share(50), Share(), Share(count=2), Share(count=4)]
CPU_PER_GPU = 12_000
"""Millicores of a node for each of its GPUs; a session asks for 8,000 for each GPU that it has in all."""
GIB = 2**30


def cluster(gpus: int, seed: int, none_empty: bool = False) -> list[Report]:
    """Nodes of eight GPUs of four models, about half full. ``none_empty``: each has at least one session that works."""
    chance = random.Random(seed)
    reports = []
    for node in range((gpus + GPUS_PER_NODE - 1) // GPUS_PER_NODE):
        here = range(node * GPUS_PER_NODE, min(gpus, (node + 1) * GPUS_PER_NODE))
        model = MODELS[node % len(MODELS)]
        cards = [
            GpuReport(index=i % GPUS_PER_NODE, uuid=f"GPU-{i:06}", model=model, memory_bytes=80 * GIB) for i in here
        ]
        sessions: list[SessionReport] = []
        for card in cards:
            left = 100
            while chance.random() < 0.6 or (none_empty and not sessions):
                units = chance.choice((10, 25, 50, 100))
                if units > left:
                    break
                left -= units
                sessions.append(
                    SessionReport(
                        id=f"{card.uuid}-{left}",
                        user="somebody",
                        template="any",
                        gpus=(card.uuid,),
                        share_units=units,
                        tier_since=0,
                        effective_units=0 if chance.random() < 0.1 and (sessions or not none_empty) else units,
                        guaranteed_units=units,
                        opened_at=0,
                    )
                )
        reports.append(Report(node=f"node-{node:05}", published_at=0, gpus=tuple(cards), sessions=tuple(sessions)))
    return reports


def resources(report: Report) -> NodeResources:
    """What the sessions of a node leave of its CPU and memory."""
    gpus = len(report.gpus)
    used = sum(session.share_units for session in report.sessions) / 100
    return NodeResources(round(CPU_PER_GPU * gpus - 8000 * used), round(64 * GIB * gpus - 32 * GIB * used), 110)

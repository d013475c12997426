"""Checks that no two nodes of the cluster report one GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gpushare_spawner.agent.kubernetes.api import ApiFailure, ClusterApi
from gpushare_spawner.clients.service_account import NoCluster
from gpushare_spawner.doctor.finding import Finding, Machine, ok, problem, skipped
from gpushare_spawner.model.kubernetes.objects import REPORT_SELECTOR, misplaced_report, read_report
from gpushare_spawner.model.report import Report, doubled_gpus
from gpushare_spawner.wording.amounts import doubled_gpu, plural

WHERE = "GPUs of all nodes"
_REMEDY = (
    "Simulated GPUs: remove the folder simgpu-state in the agent's host folder (--host-dir) on all of these nodes but "
    "the first, and restart the agents there. Real GPUs: a second agent runs on the machine."
)


@dataclass(frozen=True)
class ClusterGpuFacts:
    """Facts that the probe has read."""

    reports: tuple[Report, ...] = ()
    """Of the nodes, as far as they can be read."""
    unread: str = ""
    """Why there are none."""


def check(machine: Machine) -> list[Finding]:
    """Return the findings."""
    if not machine.on_node:
        return findings(ClusterGpuFacts(unread="this machine is no node of a cluster"))
    return findings(asyncio.run(probe(machine.environment.get("POD_NAMESPACE") or "default")))


async def probe(namespace: str) -> ClusterGpuFacts:
    """Read the agents' reports from the API server. ``namespace``: the hub's."""
    try:
        api = await ClusterApi.connect()
    except NoCluster as error:
        return ClusterGpuFacts(unread=f"the API server cannot be asked: {error}")
    try:
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        config_maps = await api.list(path, labelSelector=REPORT_SELECTOR)
    except ApiFailure as failure:
        if failure.status == 403:
            # an agent may not read the reports of others
            return ClusterGpuFacts(
                unread="this account may not read the reports of other nodes: run `gpushare doctor` in the hub's pod"
            )
        return ClusterGpuFacts(unread=f"the API server does not say: {failure}")
    finally:
        await api.close()
    return ClusterGpuFacts(tuple(_reports(config_maps.get("items") or ())))


def _reports(config_maps: Iterable[Mapping[str, Any]]) -> Iterable[Report]:
    for config_map in config_maps:
        try:
            report = read_report(config_map)
        except ValidationError:
            continue
        if misplaced_report(config_map["metadata"]["name"], report) is None:
            yield report


def findings(facts: ClusterGpuFacts) -> list[Finding]:
    """Return the findings that follow from the facts."""
    if facts.unread:
        return [skipped(WHERE, facts.unread)]
    doubled = doubled_gpus(facts.reports)
    if not doubled:
        return [ok(WHERE, f"no two of {plural(len(facts.reports), 'node')} report the same GPU")]
    return [problem(WHERE, doubled_gpu(uuid, nodes), _REMEDY) for uuid, nodes in doubled.items()]

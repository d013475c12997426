"""Checks of the cluster: GPU shares allocated by claims, and GPUs that two nodes report.

For claims (the agent's `--kubernetes dra`), the checks show whether pods on this node can get shares by claims, and
whether they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from gpushare_spawner.agent.kubernetes.claims.probe import ClaimsUnavailable, ask, socket_paths
from gpushare_spawner.clients.api import ApiFailure, ClusterApi
from gpushare_spawner.clients.service_account import NoCluster
from gpushare_spawner.doctor.finding import Finding, Machine, note, ok, problem, skipped
from gpushare_spawner.model.kubernetes.objects import REPORT_SELECTOR, misplaced_report, read_report
from gpushare_spawner.model.report import Report, doubled_gpus
from gpushare_spawner.wording.amounts import doubled_gpu, plural

CLAIMS = "GPU shares by claims"
_CDI_FROM = (1, 7, 2)
"""First version of containerd that uses CDI names from DRA drivers and device plugins; older versions silently ignore
them (measured with 1.6.20).
"""
_CONTAINERD = re.compile(r"containerd://(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class ClaimFacts:
    """Facts that the probe has read."""

    no_answer: str = ""
    """Why the API server does not answer; empty if it answers."""
    in_use: bool | None = None
    """Whether the agent allocates GPUs by claims; None if the agent does not answer."""
    server: str = ""
    """The API server's version; empty: unknown."""
    runtime: str = ""
    """The node's container runtime and its version, as Kubernetes writes them; empty: unknown."""
    refused: str = ""
    """Why claims are not available, according to the agent's own probe; empty if they are available."""
    taints: bool = True
    """Whether the API server stores taints of devices."""
    missing: tuple[Path, ...] = ()
    """The missing sockets of the driver."""


def check_claims(report: Report | None, machine: Machine) -> list[Finding]:
    """Return the findings on claims. ``report``: the agent's report; None if the agent does not answer."""
    if not machine.on_node:
        return [skipped(CLAIMS, "this machine is not a node of a cluster")]
    return claim_findings(asyncio.run(probe(report, machine)))


async def probe(report: Report | None, machine: Machine) -> ClaimFacts:
    """Query the API server. Nothing is created: requests to create objects are dry runs."""
    in_use = None if report is None else report.claims is not None
    node = os.uname().nodename if report is None else report.node
    missing = tuple(path for path in socket_paths(machine.kubelet) if not path.exists())
    facts = ClaimFacts(in_use=in_use, missing=missing)
    try:
        api = await ClusterApi.connect()
    except NoCluster as error:
        return replace(facts, no_answer=str(error))
    try:
        return await ask_cluster(api, node, machine.namespace, facts)
    finally:
        await api.close()


async def ask_cluster(api: ClusterApi, node: str, namespace: str, facts: ClaimFacts) -> ClaimFacts:
    """Add the API server's answers. ``namespace``: the namespace of sessions' claims."""
    try:
        facts = replace(facts, server=str((await api.get("/version")).get("gitVersion", "")))
        try:
            info = (await api.get(f"/api/v1/nodes/{node}")).get("status", {}).get("nodeInfo", {})
            facts = replace(facts, runtime=str(info.get("containerRuntimeVersion", "")))
        except ApiFailure as failure:
            if failure.status not in (403, 404):
                raise
        return replace(facts, taints=await ask(api, node, namespace))
    except ApiFailure as failure:
        return replace(facts, no_answer=str(failure))
    except ClaimsUnavailable as error:
        return replace(facts, refused=str(error))


def claim_findings(facts: ClaimFacts) -> list[Finding]:
    """Return the findings that follow from the facts."""
    results = [ok("API server", f"Kubernetes {facts.server}")] if facts.server else []
    if facts.no_answer:
        return [*results, skipped(CLAIMS, f"the API server cannot be asked: {facts.no_answer}")]
    if facts.in_use:
        return [*results, *_in_use(facts), *_runtime(facts)]
    agent_state = "the agent uses the device plugin's API" if facts.in_use is False else "no agent answers"
    available = ok(CLAIMS, f"{agent_state}; claims are available with --kubernetes dra")
    if facts.refused:
        available = skipped(CLAIMS, f"{agent_state}; claims are not available: {facts.refused}")
    return [*results, available, *_runtime(facts)]


def _in_use(facts: ClaimFacts) -> list[Finding]:
    results = []
    if facts.refused:
        remedy = "See docs/guides/claims.md. Until then no new pod gets a share on this node."
        results.append(problem(CLAIMS, facts.refused, remedy))
    else:
        results.append(ok(CLAIMS, "the API server keeps shares of devices (gate DRAConsumableCapacity)"))
        if not facts.taints:
            what = "the API server drops taints of devices: unhealthy and cordoned GPUs leave the slice instead"
            remedy = "Enable the feature gate DRADeviceTaints; it is enabled by default from Kubernetes 1.36."
            results.append(note(CLAIMS, what, remedy))
    if facts.missing:
        what = f"{' and '.join(map(str, facts.missing))} are missing: the kubelet cannot call the driver"
        remedy = "The agent creates them again within 2 s. See its log, and mount the kubelet's folders into its pod."
        results.append(problem("DRA driver's sockets", what, remedy))
    else:
        results.append(ok("DRA driver's sockets", "the socket for registration and the driver's own socket exist"))
    return results


def _runtime(facts: ClaimFacts) -> list[Finding]:
    if not facts.runtime:
        return [skipped("container runtime", "unknown: the service account may not read this node")]
    version = _CONTAINERD.match(facts.runtime)
    if version is None or tuple(map(int, version.groups())) >= _CDI_FROM:
        return [ok("container runtime", facts.runtime)]
    what = f"{facts.runtime} silently ignores CDI names. The agent's claims need none; NVIDIA's DRA driver does"
    return [note("container runtime", what, "Use containerd 1.7.2 or later for the layer dra.")]


GPUS = "GPUs of all nodes"
_REMEDY = (
    "Simulated GPUs: remove the folder simgpu-state in the agent's host folder (--host-dir) on all of these nodes but "
    "the first, and restart the agents there. Real GPUs: a second agent runs on the machine."
)


def check_gpus(machine: Machine) -> list[Finding]:
    """Return the findings on GPUs that two nodes report."""
    if not machine.on_node:
        return [skipped(GPUS, "this machine is not a node of a cluster")]
    try:
        reports = asyncio.run(_reports(machine.namespace))
    except NoCluster as error:
        return [skipped(GPUS, f"the API server cannot be asked: {error}")]
    except ApiFailure as failure:
        # an agent may not read other agents' reports
        refused = "this account may not read the reports of other nodes: run `gpushare doctor` in the hub's pod"
        return [skipped(GPUS, refused if failure.status == 403 else f"the API server does not say: {failure}")]
    doubled = doubled_gpus(reports)
    if not doubled:
        return [ok(GPUS, f"no two of {plural(len(reports), 'node')} report the same GPU")]
    return [problem(GPUS, doubled_gpu(uuid, nodes), _REMEDY) for uuid, nodes in doubled.items()]


def reported_gpus(machine: Machine) -> frozenset[str]:
    """Return the UUIDs of the GPUs that the cluster's nodes report; empty if unknown."""
    try:
        reports = asyncio.run(_reports(machine.namespace)) if machine.on_node else []
    except (NoCluster, ApiFailure):
        return frozenset()
    return frozenset(gpu.uuid for report in reports for gpu in report.gpus)


async def _reports(namespace: str) -> list[Report]:
    """Return the agents' readable reports in the hub's namespace."""
    api = await ClusterApi.connect()
    try:
        config_maps = await api.list(f"/api/v1/namespaces/{namespace}/configmaps", labelSelector=REPORT_SELECTOR)
    finally:
        await api.close()
    reports = []
    for config_map in config_maps.items():
        with contextlib.suppress(ValidationError):
            report = read_report(config_map)
            if misplaced_report(config_map["metadata"]["name"], report) is None:
                reports.append(report)
    return reports

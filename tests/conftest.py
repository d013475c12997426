"""The order in which test files run, and the signals that their processes start with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A shell script that runs `make test &` has SIGINT ignored in all that it starts, notebook servers too. Hubs stop a
# server by SIGINT first, so it would run on for the 10 s of SimpleLocalProcessSpawner.interrupt_timeout.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, slowest first. `make test` gives whole files to two workers in this order, because a long
# file that starts last leaves one worker idle. The order comes from the times in reports by --junitxml, made on 2 cores
# that did other work too; .ci/test_times.py adds the times of each file. The places of notebook/test_extension.py
# and service/test_real_hub.py are estimates.
SLOWEST_FIRST = (
    "tests/e2e/test_faults.py",
    "tests/e2e/test_demo.py",
    "tests/kubernetes/test_hub_killed.py",
    "tests/test_wheels.py",
    "tests/e2e/test_main_job.py",
    "tests/kubernetes/test_spawner_many.py",
    "tests/e2e/test_browser.py",
    "tests/kubernetes/test_main_job.py",
    "tests/agent/test_session_limit.py",
    "tests/native/test_preload_memory.py",
    "tests/native/test_simgpu_residency.py",
    "tests/spawner/local/test_mixin_faults.py",
    "tests/kubernetes/test_spawner_faults.py",
    "tests/kubernetes/test_spawner_is_kubespawner.py",
    "tests/notebook/test_lab.py",
    "tests/agent/test_agent_process.py",
    "tests/native/test_preload_lease.py",
    "tests/native/test_simgpu_driver.py",
    "tests/native/test_simgpu_memory.py",
    "tests/kubernetes/test_agent_sessions.py",
    "tests/ci/test_make_venv.py",
    "tests/kubernetes/test_spawner_profiles.py",
    "tests/native/test_simgpu_processes.py",
    "tests/kubernetes/test_agent_plugin.py",
    "tests/kubernetes/test_spawner_places.py",
    "tests/kubernetes/test_spawner_unschedulable.py",
    "tests/service/test_real_hub.py",
    "tests/kubernetes/test_spawner_start.py",
    "tests/native/test_preload_patience.py",
    "tests/arbiter/test_time_slices_over_time.py",
    "tests/agent/test_touched_memory.py",
    "tests/kubernetes/test_standin_kubespawner.py",
    "tests/agent/test_hostile_peers.py",
    "tests/arbiter/test_weights.py",
    "tests/kubernetes/test_agent_process.py",
    "tests/notebook/test_extension.py",
    "tests/kubernetes/test_service_command.py",
    "tests/agent/test_connection_reader.py",
    "tests/kubernetes/test_spawner_same_calls.py",
    "tests/kubernetes/test_pod_folders.py",
    "tests/kubernetes/test_chart_admission.py",
    "tests/spawner/local/test_reservations_many.py",
    "tests/kubernetes/test_service_cluster.py",
    "tests/native/test_simgpu_nvml.py",
    "tests/kubernetes/test_chart_agent.py",
    "tests/kubernetes/test_standin_devices.py",
    "tests/agent/test_hostile_leases.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first; the others and the tests within a file keep their order."""
    rank = {ROOT / name: number for number, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))

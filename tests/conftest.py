"""The order in which test files run, and the environment and the signals that their processes start with."""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.machine import isolate

ROOT = Path(__file__).parents[1]

# until the tests are collected: what they import is kept
gc.disable()

# before anything of the product or of a library is imported: kubernetes_asyncio reads $KUBECONFIG at once
HOME = isolate()

# A shell script that runs `make test &` has SIGINT ignored in all that it starts, notebook servers too. Hubs stop a
# server by SIGINT first, so it would run on for the 10 s of SimpleLocalProcessSpawner.interrupt_timeout.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something of the machine, not of the code.
settings.register_profile(
    "any machine", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# The files that take longest, slowest first. `make test` gives whole files to its workers in this order, because a long
# file that starts last leaves one worker idle. The order comes from the times in a report by --junitxml, made on 2
# cores that did nothing else (2026-11-22, 10 min 16 s), that of the last 16 from CPU times of 2026-11-28;
# .ci/test_times.py adds the times of each file.
SLOWEST_FIRST = (
    "tests/e2e/test_faults.py",
    "tests/kubernetes/test_spawner_many.py",
    "tests/kubernetes/test_main_job.py",
    "tests/test_wheels.py",
    "tests/service/test_notices_end.py",
    "tests/kubernetes/test_spawner_faults.py",
    "tests/kubernetes/test_cluster_capacity.py",
    "tests/e2e/test_main_job.py",
    "tests/notebook/test_lab.py",
    "tests/e2e/test_demo.py",
    "tests/kubernetes/test_spawner_profiles.py",
    "tests/kubernetes/test_spawner_places.py",
    "tests/service/test_real_hub.py",
    "tests/spawner/test_hub_pages_in_a_browser.py",
    "tests/arbiter/test_gpu_time_limits.py",
    "tests/kubernetes/test_release_after_work.py",
    "tests/placement/test_random_events.py",
    "tests/agent/test_agent_process.py",
    "tests/spawner/local/test_mixin_real_agent.py",
    "tests/kubernetes/test_agent_sessions.py",
    "tests/kubernetes/test_spawner_unschedulable.py",
    "tests/agent/test_share_changes_process.py",
    "tests/kubernetes/test_spawner_start.py",
    "tests/kubernetes/test_agent_plugin.py",
    "tests/test_extras.py",
    "tests/service/test_dashboard_in_a_browser.py",
    "tests/kubernetes/test_hub_killed.py",
    "tests/agent/test_hostile_peers.py",
    "tests/native/test_preload_patience.py",
    "tests/native/test_preload_lease.py",
    "tests/doctor/test_command.py",
    "tests/spawner/local/test_mixin_faults.py",
    "tests/native/test_tree.py",
    "tests/native/test_preload_memory.py",
    "tests/service/test_end_with_hub.py",
    "tests/kubernetes/test_observing_agent.py",
    "tests/agent/test_suspend.py",
    "tests/demo/test_processes.py",
    "tests/kubernetes/test_spawner_is_kubespawner.py",
    "tests/service/test_dashboard.py",
    "tests/spawner/local/test_mixin.py",
    "tests/kubernetes/test_agent_claims.py",
    "tests/kubernetes/test_standin_kubespawner.py",
    "tests/native/test_simgpu_checkpoint.py",
    "tests/arbiter/test_parts.py",
    "tests/ci/test_make_venv.py",
    "tests/service/test_asks_over_processes.py",
    "tests/native/test_preload_nvml.py",
    "tests/agent/test_hostile_leases.py",
    "tests/service/test_short_work.py",
    "tests/native/test_sanitized_programs.py",
    "tests/kubernetes/test_service_command.py",
    "tests/service/test_culler.py",
    "tests/kubernetes/test_standin_devices.py",
    "tests/kubernetes/test_service_cluster.py",
    "tests/agent/test_connection_reader.py",
    "tests/agent/test_touched_memory.py",
    "tests/kubernetes/test_agent_process.py",
    "tests/kubernetes/test_share_changes.py",
    "tests/native/test_simgpu_residency.py",
    "tests/kubernetes/test_spawner_same_calls.py",
    "tests/notebook/test_extension.py",
    "tests/agent/test_enforcer.py",
    "tests/spawner/test_cancelled_spawns.py",
    "tests/kubernetes/test_agent_report.py",
    "tests/monitoring/test_dashboard_and_rules.py",
    "tests/idle/test_idleness_benchmark.py",
    "tests/ci/test_benchmarks.py",
    "tests/spawner/queue/test_placement_errors.py",
    "tests/placement/test_fragmentation.py",
    "tests/kubernetes/test_agent_grants.py",
    "tests/native/test_simgpu_driver.py",
    "tests/native/test_preload_pace.py",
    "tests/agent/test_session_limit.py",
    "tests/idle/test_policy_properties.py",
    "tests/service/test_clock_steps.py",
    "tests/native/test_simgpu_nvml.py",
    "tests/spawner/queue/test_reservations.py",
    "tests/kubernetes/layers/test_nvidia.py",
    "tests/kubernetes/test_agent_watch.py",
    "tests/test_cli.py",
    "tests/native/test_simgpu_processes.py",
    "tests/docs/test_reference.py",
    "tests/arbiter/test_time_slices_over_time.py",
    "tests/quota/test_reclaim.py",
    "tests/agent/test_gpu_time_samples.py",
    "tests/arbiter/test_weights.py",
)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Keep the level of the product's log, which the service's command sets, from the tests that follow in a worker."""
    logger = logging.getLogger("gpushare")
    level = logger.level
    yield
    logger.setLevel(level)


def pytest_configure(config: pytest.Config) -> None:
    """Compile packages, the tests' helpers and C libraries once, before each of pytest's workers would do it."""
    if "PYTEST_XDIST_WORKER" in os.environ or config.getoption("dist", "no") == "no":
        return
    from gpushare_spawner.native.build import BuildError
    from tests.libraries import preload_library, simulated_driver

    # the tests that need a library say why there is none
    with contextlib.suppress(BuildError):
        preload_library()
        simulated_driver()
    if not sys.dont_write_bytecode:
        for folder in (ROOT / "gpushare_spawner", ROOT / "packages" / "gpushare-simgpu", ROOT / "tests"):
            # pytest compiles those itself
            compileall.compile_dir(folder, quiet=2, workers=0, rx=re.compile(r"/(test_\w+|conftest)\.py$"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without slow tests where only these run: importing the others takes each worker 7 s."""
    if config.getoption("markexpr") != "slow" or not collection_path.match("test_*.py"):
        return None
    return True if b"mark.slow" not in collection_path.read_bytes() else None


def pytest_collection(session: pytest.Session) -> None:
    """Import the files of all tests. Each worker begins with others, and finds the rest compiled by its neighbours."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    config = session.config
    if not worker or config.args != config.getini("testpaths") or config.getoption("markexpr") == "slow":
        return
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    start = len(files) * int(worker) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for path in files[start:] + files[:start]:
        # pytest imports what failed again, and reports it
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first; the others and the tests within a file keep their order."""
    rank = {ROOT / name: number for number, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections: with 7,000 tests each full one would take half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()

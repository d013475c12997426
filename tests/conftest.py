"""The order in which test files run, and the environment and the signals that their processes start with."""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import os
import re
import signal
import sys
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

# The files that take longest, slowest first. `make test` gives whole files to two workers in this order, because a long
# file that starts last leaves one worker idle. The order comes from the times in a report by --junitxml, made on 2
# cores that did nothing else (2026-11-22, 10 min 16 s), that of the last 16 from CPU times of 2026-11-28;
# .ci/test_times.py adds the times of each file.
SLOWEST_FIRST = (
    "tests/e2e/test_faults.py",
    "tests/e2e/test_demo.py",
    "tests/native/test_preload_memory.py",
    "tests/e2e/test_main_job.py",
    "tests/kubernetes/test_spawner_many.py",
    "tests/kubernetes/test_main_job.py",
    "tests/notebook/test_lab.py",
    "tests/kubernetes/test_spawner_faults.py",
    "tests/test_wheels.py",
    "tests/kubernetes/test_hub_killed.py",
    "tests/agent/test_agent_process.py",
    "tests/arbiter/test_time_slices_over_time.py",
    "tests/arbiter/test_weights.py",
    "tests/kubernetes/test_agent_plugin.py",
    "tests/native/test_preload_lease.py",
    "tests/agent/test_session_limit.py",
    "tests/kubernetes/test_spawner_is_kubespawner.py",
    "tests/kubernetes/test_agent_sessions.py",
    "tests/spawner/local/test_mixin_faults.py",
    "tests/kubernetes/test_spawner_unschedulable.py",
    "tests/native/test_preload_patience.py",
    "tests/service/test_real_hub.py",
    "tests/spawner/test_hub_pages_in_a_browser.py",
    "tests/ci/test_make_venv.py",
    "tests/agent/test_connection_reader.py",
    "tests/kubernetes/test_chart_agent.py",
    "tests/kubernetes/test_standin_kubespawner.py",
    "tests/kubernetes/test_agent_process.py",
    "tests/agent/test_hostile_peers.py",
    "tests/kubernetes/test_cluster_capacity.py",
    "tests/agent/test_touched_memory.py",
    "tests/kubernetes/test_service_cluster.py",
    "tests/native/test_simgpu_residency.py",
    "tests/kubernetes/test_service_command.py",
    "tests/demo/test_processes.py",
    "tests/test_extras.py",
    "tests/kubernetes/test_spawner_profiles.py",
    "tests/spawner/local/test_mixin.py",
    "tests/service/test_dashboard_in_a_browser.py",
    "tests/service/test_short_work.py",
    "tests/notebook/test_extension.py",
    "tests/agent/test_suspend.py",
    "tests/native/test_simgpu_checkpoint.py",
    "tests/doctor/test_command.py",
    "tests/native/test_tree.py",
    "tests/native/test_simgpu_driver.py",
    "tests/spawner/queue/test_placement_errors.py",
    "tests/arbiter/test_parts.py",
    "tests/service/test_dashboard.py",
    "tests/service/test_culler.py",
    "tests/service/test_notices_end.py",
)


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

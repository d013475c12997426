"""The environment that tests and their processes have, whatever the machine's own is.

conftest.py calls `isolate` before anything else is imported, so that fixtures of every scope and all processes get the
same. A test that is about one of these variables sets it itself.
"""

from __future__ import annotations

import contextlib
import locale
import os
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "GPUSHARE_": "the product's settings: sockets, templates, the history",
        "SIMGPU_": "the simulated GPUs' settings",
        "CUDA_": "which GPUs a CUDA program sees, and an MPS daemon's pipes",
        "NVIDIA_": "which GPUs a container sees",
        "XLA_": "frameworks' settings, of which the product sets those that are missing",
        "TF_": "the same",
        "PYTORCH_": "the same",
        "JUPYTER": "the tests run in a notebook's terminal, or as a service of a hub",
        "CONFIGPROXY_": "the token of a running hub's proxy",
        "KUBE": "a pod's variables, and the cluster of whoever runs the tests (but see RENAMED)",
        "POD_": "a pod's name, namespace and uid",
        "NODE_NAME": "the node of a pod",
        "LD_PRELOAD": "libraries below ours, or our own in a session's terminal",
        "LD_AUDIT": "the same",
        "LD_LIBRARY_PATH": "folders with a driver before the simulated one",
        "ASAN_OPTIONS": "options of the sanitizers, which change what a program says and how it ends",
        "LSAN_OPTIONS": "the same",
        "TSAN_OPTIONS": "the same",
        "UBSAN_OPTIONS": "the same",
        "LC_": "the locale; LANG is C.UTF-8 instead",
        "LANG": "the locale, and LANGUAGE",
        "TZ": "the time zone; it is UTC instead",
        "http_proxy": "a proxy does not lead to 127.0.0.1",
        "https_proxy": "the same",
        "ftp_proxy": "the same",
        "grpc_proxy": "the same",
        "all_proxy": "the same",
        "no_proxy": "the same",
        "PG": "defaults of PostgreSQL's clients: PGHOST, PGPORT, PGUSER",
        "XDG_": "where programs keep sockets, settings and data",
        "GIT_": "a commit hook says by GIT_DIR which checkout git has to look at",
        "NODE_OPTIONS": "options of the hub's proxy",
        "NODE_PATH": "modules of the hub's proxy",
        "NOTIFY_SOCKET": "systemd's, where a unit runs the tests",
        "LISTEN_": "the same",
        "PYTHONUNBUFFERED": "a program that does not flush its output looks as if it did",
        "PYTHONIOENCODING": "encodings other than the locale's",
        "PYTHONUTF8": "the same",
        "COLUMNS": "the width of help texts and tables",
        "LINES": "the same",
        "NO_COLOR": "colours in output that is no terminal",
        "FORCE_COLOR": "the same",
        "CLICOLOR": "the same",
    }
)
"""Beginnings of names, in any case, and why a test's result would depend on such a variable."""

TOLD = frozenset({"GPUSHARE_Z2JH", "GPUSHARE_PROMETHEUS", "GPUSHARE_OPENB", "KUBEBUILDER_ASSETS"})
"""What whoever runs the tests tells them: folders with data and programs."""

RENAMED: Mapping[str, str] = MappingProxyType(
    {"KUBECONFIG": "GPUSHARE_TEST_KUBECONFIG", "https_proxy": "PIP_PROXY", "HTTPS_PROXY": "PIP_PROXY"}
)
"""What only some programs need: tests/kubernetes a cluster, and pip, which alone downloads something, a proxy."""

_SHORT_FOLDER = len("/var/tmp")
"""Paths of sockets have at most 107 bytes. A temporary folder with a longer name leaves too few for tests' names."""


def removed(name: str) -> bool:
    """Return whether tests run without the variable."""
    kept = name in TOLD or name in RENAMED.values()
    return not kept and name.lower().startswith(tuple(beginning.lower() for beginning in REMOVED))


def isolate(environment: MutableMapping[str, str] = os.environ) -> tempfile.TemporaryDirectory[str]:
    """Give this process and its children the same environment on every machine; return their home folder.

    The home folder is empty: ~/.kube/config, ~/.jupyter and ~/.ipython change results too. It goes with the object.
    Caches and pip's settings stay: compilers would take minutes without theirs, and pip may need an index of its own.
    """
    for name, new_name in RENAMED.items():
        if name in environment:
            environment.setdefault(new_name, environment[name])
    former_home = Path(environment.get("HOME") or Path.home())
    caches = Path(environment.get("XDG_CACHE_HOME") or former_home / ".cache")
    pip = Path(environment.get("XDG_CONFIG_HOME") or former_home / ".config") / "pip/pip.conf"
    for name in [name for name in environment if removed(name)]:
        del environment[name]
    if len(tempfile.gettempdir()) > _SHORT_FOLDER:
        environment["TMPDIR"] = tempfile.tempdir = "/tmp"
    home = tempfile.TemporaryDirectory(prefix="gpushare-tests-", ignore_cleanup_errors=True)
    environment.update({"LANG": "C.UTF-8", "TZ": "UTC", "HOME": home.name})
    # pytest names its folder after the user: spaces and quotes of a name would get into command lines of tests
    environment["LOGNAME"] = f"tests-{os.getuid()}"
    # git reads a checkout of another user only where a setting of the home folder, or of these, allows it
    environment.update(GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
    if os.access(caches, os.W_OK):
        environment["XDG_CACHE_HOME"] = str(caches)
    if os.access(pip, os.R_OK):
        environment.setdefault("PIP_CONFIG_FILE", str(pip))
    time.tzset()
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
    os.umask(0o022)
    return home

"""A real Jupyter server in a process of its own, with our extensions where an installation puts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOKEN = "a-token"
WITHOUT_PAGES = "--ServerApp.jpserver_extensions=" + repr(
    dict.fromkeys(("jupyter_lsp", "jupyter_server_terminals", "jupyterlab", "notebook", "notebook_shim"), False)
)
"""An argument of a server whose pages nobody opens: it starts in half of the time."""


def install_shared_data(prefix: Path) -> None:
    """Link what pyproject.toml says is installed under the prefix, as an installer would copy it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for source, target in project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"].items():
        assert (ROOT / source).exists(), f"pyproject.toml names {source}, which is not there"
        # a folder's files one by one: pyproject.toml can add a file to an installed folder
        files = (ROOT / source).iterdir() if (ROOT / source).is_dir() else [ROOT / source]
        for file in files:
            link = prefix / target / file.name if (ROOT / source).is_dir() else prefix / target
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)


class Jupyter:
    """A running server."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log

    def get(self, path: str, token: str | None = TOKEN) -> tuple[int, Any]:
        """Status code and body of a GET."""
        request = urllib.request.Request(self.url + path)
        if token is not None:
            request.add_header("Authorization", f"token {token}")
        return _send(request)

    def post(
        self,
        path: str,
        body: dict[str, Any],
        token: str | None = TOKEN,
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
    ) -> tuple[int, Any]:
        """Status code and body of a POST. `data`: these bytes in the place of the body's JSON."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        if token is not None:
            sent["Authorization"] = f"token {token}"
        data = json.dumps(body).encode() if data is None else data
        return _send(urllib.request.Request(self.url + path, data, sent, method="POST"))

    def login(self) -> str:
        """The cookies of a browser that has opened a page with the token in its address."""
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar := CookieJar()))
        opener.open(f"{self.url}login?token={TOKEN}", timeout=20).close()
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)


def _send(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def running(folder: Path, module: str = "jupyter_server", **environment: str) -> Iterator[Jupyter]:
    """Start ``python -m module`` on a port of its own, with base URL /user/ada/; ends it in the end.

    jupyter_server has the API alone, jupyterlab and notebook their pages too.
    """
    install_shared_data(folder / "prefix")
    runtime = folder / "runtime"
    work = folder / "work"
    for made in (runtime, work):
        made.mkdir()
    around = os.environ | {
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "JUPYTER_PATH": str(folder / "prefix/share/jupyter"),
        "JUPYTER_CONFIG_PATH": str(folder / "prefix/etc/jupyter"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        **environment,
    }
    options = {
        "ServerApp.port": "0",
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.open_browser": "False",
        "ServerApp.base_url": "/user/ada/",
        "ServerApp.root_dir": str(work),
        "ServerApp.allow_root": "True",
        "IdentityProvider.token": TOKEN,
        "LabApp.news_url": "None",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }
    log = folder / "jupyter.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", module, *(f"--{name}={value}" for name, value in options.items())]
        if module == "jupyter_server":
            command.append(WITHOUT_PAGES)
        process = subprocess.Popen(command, env=around, stdout=output, stderr=output, cwd=work)
        try:
            yield Jupyter(_address(process, runtime, log), log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return _send(urllib.request.Request(url + "api"))[0] == 200
    except urllib.error.URLError:
        return False


def _address(process: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        for file in runtime.glob("jpserver-*.json"):
            text = file.read_text()
            # the file may be there a moment before the port answers
            if text.endswith("}") and _answers(url := str(json.loads(text)["url"])):
                return url
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")

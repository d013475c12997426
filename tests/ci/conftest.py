"""The scripts of .ci, which are no package, and a small package index."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / ".ci"


def script(name: str) -> Iterator[ModuleType]:
    """The script of .ci as a module, while the fixture lasts."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def fetch_pip() -> Iterator[ModuleType]:
    """The module .ci/fetch_pip.py."""
    yield from script("fetch_pip")


@pytest.fixture
def c_layers() -> Iterator[ModuleType]:
    """The module .ci/c_layers.py."""
    yield from script("c_layers")


@pytest.fixture
def helm_values() -> Iterator[ModuleType]:
    """The module .ci/helm_values.py."""
    yield from script("helm_values")


class Index:
    """A package index on this machine: ``pages`` by path; ``asked`` keeps the requests' paths and credentials."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append((self.path, self.headers.get("Authorization")))
                content = index.pages.get(self.path)
                self.send_response(404 if content is None else 200)
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def offer(self, name: str, content: bytes, *, attributes: str = "", sha256: str | None = None) -> None:
        """Add a file of pip to the index."""
        digest = sha256 or hashlib.sha256(content).hexdigest()
        line = f'<a href="../../files/{name}#sha256={digest}" {attributes}>{name}</a>\n'.encode()
        self.pages["/simple/pip/"] = self.pages.get("/simple/pip/", b"") + line
        self.pages[f"/files/{name}"] = content


@pytest.fixture
def index() -> Iterator[Index]:
    """An empty package index."""
    index = Index()
    yield index
    index.server.shutdown()
    index.server.server_close()


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No settings of pip but those that a test makes; the home folder."""
    import os

    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return home

"""Somebody who logs in with a name, as a browser does, and uses the hub's API with the cookies of the login."""

from __future__ import annotations

import http.cookiejar
import json
import time
import urllib.parse
import urllib.request
from typing import Any


class Visitor:
    """One login; synchronous."""

    def __init__(self, url: str, name: str, password: str = "") -> None:
        self.url, self.name, self.password = url, name, password
        self._cookies = http.cookiejar.CookieJar()
        # never through a proxy of the environment: the hub is on this machine
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self._cookies)
        self._opener = urllib.request.build_opener(*handlers)

    def log_in(self) -> None:
        """Log in with the name and the password."""
        self._open("/hub/login")
        form = {"username": self.name, "password": self.password, "_xsrf": self._xsrf("/hub/")}
        self._open("/hub/login", urllib.parse.urlencode(form).encode())

    def start_server(self, profile: str, within: float = 60.0) -> None:
        """Start the own server with the template and wait until it is ready."""
        self.call("POST", f"/hub/api/users/{self.name}/server", {"profile": profile})
        deadline = time.monotonic() + within
        while not self.call("GET", f"/hub/api/users/{self.name}")["servers"][""]["ready"]:
            assert time.monotonic() < deadline, f"no server after {within:.0f} s"
            time.sleep(0.2)

    def start_kernel(self) -> None:
        """A kernel in the own server, as an open notebook has one."""
        # the page first: it brings the login to the server, by way of the hub
        self._open(f"/user/{self.name}/lab")
        self.call("POST", f"/user/{self.name}/api/kernels", {"name": "python3"})

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the API answers with."""
        headers = {
            "X-XSRFToken": self._xsrf(path),
            "Referer": f"{self.url}/hub/home",
            "Content-Type": "application/json",
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with self._opener.open(request, timeout=60) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def _open(self, path: str, data: bytes | None = None) -> None:
        with self._opener.open(self.url + path, data, timeout=30) as answer:
            answer.read()

    def _xsrf(self, path: str) -> str:
        fitting = [cookie for cookie in self._cookies if cookie.name == "_xsrf" and path.startswith(cookie.path)]
        return max(fitting, key=lambda cookie: len(cookie.path)).value or ""

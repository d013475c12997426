"""Fetches pip's wheel the way pip itself would: from the index and the folders that pip's settings name.

For a Python without ensurepip and pip, as Debian's is. The standard library only. Read: the environment
(PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, PIP_CERT, PIP_PROXY, PIP_CONFIG_FILE) and pip.conf
in its usual places.
The index speaks the simple repository API (PEP 503).
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

WHEEL = re.compile(r"pip-(\d+(?:\.\d+)*)-py3-none-any\.whl")
"""Final releases only: 26.0b1 does not match."""
TIMEOUT = 60.0


class NoPip(Exception):
    """No usable wheel of pip was found; the message says where it was looked for and what came back."""


@dataclass(frozen=True)
class Wheel:
    version: tuple[int, ...]
    url: str
    sha256: str | None


def fetch_pip(into: Path) -> Path:
    """Download the newest pip that this Python can run into the folder; its path. Raises NoPip."""
    settings = pip_settings()
    opener = make_opener(settings)
    wheels: list[Wheel] = []
    failures: list[str] = []
    for url in sources(settings):
        try:
            wheels += links(opener, url)
        except (OSError, ValueError) as error:
            failures.append(f"{without_password(url)} ({getattr(error, 'reason', None) or error})")
    if not wheels:
        raise NoPip("; ".join(failures) or "no index is set and no folder has it")
    # the first of equal versions: the order of the sources is pip's
    newest = max(wheels, key=lambda wheel: wheel.version)
    try:
        content = read(opener, newest.url)
    except OSError as error:
        raise NoPip(f"{without_password(newest.url)} ({getattr(error, 'reason', None) or error})") from None
    if newest.sha256 and hashlib.sha256(content).hexdigest() != newest.sha256:
        raise NoPip(f"{without_password(newest.url)} is not what the index says it is (sha256)")
    path = into / unquote(urlsplit(newest.url).path).rsplit("/", 1)[-1]
    path.write_bytes(content)
    return path


def pip_settings() -> dict[str, str]:
    """pip's own settings: the files first, the machine's before the user's, then the environment."""
    home = Path.home()
    roots = os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(root) / "pip/pip.conf" for root in roots if root]
    files += [Path("/etc/pip.conf"), home / ".pip/pip.conf", config_home / "pip/pip.conf"]
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        files = []
    elif named:
        files.append(Path(named))
    settings: dict[str, str] = {}
    for path in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except configparser.Error:
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                settings.update({key.replace("_", "-"): value for key, value in parser.items(section)})
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            settings[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return settings


def sources(settings: dict[str, str]) -> Iterator[str]:
    """Where pip would look, in its order: folders and pages of links, then the index, then the further ones."""
    for place in settings.get("find-links", "").split():
        yield as_url(place)
    if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = [settings.get("index-url") or "https://pypi.org/simple", *settings.get("extra-index-url", "").split()]
        for index in indexes:
            yield as_url(index).rstrip("/") + "/pip/"


def as_url(place: str) -> str:
    return place if re.match(r"[a-z]+://", place) else Path(place).expanduser().absolute().as_uri()


def make_opener(settings: dict[str, str]) -> urllib.request.OpenerDirector:
    cert = settings.get("cert")
    context = ssl.create_default_context(cafile=cert) if cert else ssl.create_default_context()
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if proxy := settings.get("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    return urllib.request.build_opener(*handlers)


def links(opener: urllib.request.OpenerDirector, url: str) -> list[Wheel]:
    """The wheels of pip behind one source, those that this Python can run. Raises OSError where it cannot be read."""
    if url.startswith("file:"):
        folder = Path(unquote(urlsplit(url).path))
        if folder.is_dir() and not (folder / "index.html").is_file():
            return [
                Wheel(numbers(match[1]), path.as_uri(), None)
                for path in folder.glob("pip-*.whl")
                if (match := WHEEL.fullmatch(path.name))
            ]
        url = url.rstrip("/") + "/index.html" if folder.is_dir() else url
        if not Path(unquote(urlsplit(url).path)).exists():
            return []
    page = _Links()
    page.feed(read(opener, url).decode(errors="replace"))
    found = []
    for href, requires in page.found:
        address, fragment = urldefrag(urljoin(url, href))
        match = WHEEL.fullmatch(unquote(urlsplit(address).path).rsplit("/", 1)[-1])
        if match and runs_here(requires):
            sha256 = re.search(r"sha256=([0-9a-f]{64})", fragment)
            found.append(Wheel(numbers(match[1]), address, sha256[1] if sha256 else None))
    return found


class _Links(HTMLParser):
    """The links of a page of the simple API: (href, the Pythons that the file is for). Withdrawn files are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href") and "data-yanked" not in given:
            self.found.append((str(given["href"]), given.get("data-requires-python") or ""))


def runs_here(requires: str) -> bool:
    """Whether this Python satisfies ">=3.8, !=3.9.0": the lower bounds are what pip uses, the rest is taken as met."""
    bounds = re.findall(r">=\s*(\d+(?:\.\d+)*)", requires)
    return all(numbers(bound) <= sys.version_info[:3] for bound in bounds)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def read(opener: urllib.request.OpenerDirector, url: str) -> bytes:
    parts = urlsplit(url)
    request = urllib.request.Request(url)
    if parts.username:
        # urllib takes no name and password from the address
        secret = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
        request = urllib.request.Request(without_password(url), headers={"Authorization": f"Basic {secret}"})
    with opener.open(request, timeout=TIMEOUT) as answer:
        content: bytes = answer.read()
    return content


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1]))

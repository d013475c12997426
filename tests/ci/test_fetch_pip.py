"""pip's wheel is found where pip's own settings say, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.ci.conftest import Index

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "into"
    folder.mkdir()
    return folder


def test_the_newest_final_release_that_runs_here_is_taken(
    fetch_pip: ModuleType, index: Index, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.offer("pip-9.0.3-py2.py3-none-any.whl", b"for Python 2 too")
    index.offer("pip-24.2-py3-none-any.whl", b"older")
    index.offer("pip-24.10-py3-none-any.whl", b"this one", attributes='data-requires-python="&gt;=3.8"')
    index.offer("pip-25.0b1-py3-none-any.whl", b"a beta")
    index.offer("pip-26.0-py3-none-any.whl", b"withdrawn", attributes='data-yanked="broken"')
    index.offer("pip-99.0-py3-none-any.whl", b"for a later Python", attributes='data-requires-python="&gt;=3.99"')
    index.offer("pip-99.1.tar.gz", b"sources")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    wheel = fetch_pip.fetch_pip(into)
    assert wheel == into / "pip-24.10-py3-none-any.whl"
    assert wheel.read_bytes() == b"this one"


def test_a_wheel_that_is_not_what_the_index_says_is_refused(
    fetch_pip: ModuleType, index: Index, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.offer("pip-24.2-py3-none-any.whl", b"something else", sha256="0" * 64)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    with pytest.raises(fetch_pip.NoPip, match="sha256"):
        fetch_pip.fetch_pip(into)
    assert list(into.iterdir()) == []


def test_a_folder_of_wheels_is_enough(
    fetch_pip: ModuleType, into: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels with a space".replace(" ", "_")
    wheels.mkdir()
    (wheels / "pip-24.1-py3-none-any.whl").write_bytes(b"from the folder")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert fetch_pip.fetch_pip(into).read_bytes() == b"from the folder"


def test_settings_come_from_the_files_and_the_environment_wins(
    fetch_pip: ModuleType, no_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_CONFIG_FILE")
    config = no_settings / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text(
        "[global]\nindex-url = http://file/simple\ncert = /ca.pem\n"
        "[install]\nfind-links =\n    /one\n    /two\nextra_index_url = http://more/simple\n"
    )
    monkeypatch.setenv("PIP_INDEX_URL", "http://environment/simple/")
    settings = fetch_pip.pip_settings()
    assert settings["cert"] == "/ca.pem"
    assert list(fetch_pip.sources(settings)) == [
        "file:///one",
        "file:///two",
        "http://environment/simple/pip/",
        "http://more/simple/pip/",
    ]


def test_a_name_and_password_in_the_address_are_used_and_never_shown(
    fetch_pip: ModuleType, index: Index, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:s%40cret@127.0.0.1:{index.port}/simple")
    with pytest.raises(fetch_pip.NoPip) as raised:
        fetch_pip.fetch_pip(into)
    assert "cret" not in str(raised.value)
    assert f"http://127.0.0.1:{index.port}/simple/pip/" in str(raised.value)
    assert index.asked == [("/simple/pip/", "Basic bWU6c0BjcmV0")]


def test_an_index_that_is_away_is_named(fetch_pip: ModuleType, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(fetch_pip.NoPip, match=r"127\.0\.0\.1:1/simple/pip/ \(.*refused\)"):
        fetch_pip.fetch_pip(into)

"""A scripted agent for the tests of the notebook's side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.scripted_agent import ScriptedAgent


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedAgent]:
    """An agent that listens on $GPUSHARE_SOCKET."""
    path = tmp_path / "s.sock"
    monkeypatch.setenv("GPUSHARE_SOCKET", str(path))
    with ScriptedAgent(path) as agent:
        yield agent

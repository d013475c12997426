"""A user can connect to the session's socket and write nothing; what was written anyhow stops nobody."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpushare_spawner.agent.session_records import SessionRecord, short_name
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.state_folder import Discarded, SessionFolder
from gpushare_spawner.model.control import ControlRefused
from tests.agent.conftest import Agent, Eventually, request_for
from tests.agent.peers import Peer

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")

TRIES = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
path = sys.argv[1]
folder = os.path.dirname(path)
done = []
def attempt(name, what):
    try:
        what()
        done.append(name)
    except OSError:
        pass
attempt("file", lambda: open(folder + "/file", "w"))
attempt("folder", lambda: os.mkdir(folder + "/folder"))
attempt("unlink", lambda: os.unlink(path))
attempt("rename", lambda: os.rename(path, folder + "/other"))
attempt("link", lambda: os.link(path, folder + "/other"))
attempt("beside", lambda: os.mkdir(os.path.dirname(folder) + "/beside"))
attempt("list", lambda: os.listdir(os.path.dirname(folder)))
attempt("connect", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(path))
print(*done)
"""


@as_root
async def test_user_can_connect_and_make_nothing(agent: Agent) -> None:
    agent.path.chmod(0o711)
    path = agent.open(uid=NOBODY)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", TRIES, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["connect"]


def nested(folder: Path, depth: int) -> None:
    """Folders inside folders, deeper than any path is long."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(folder)
    for _ in range(depth):
        os.mkdir("d")
        os.chown("d", NOBODY, -1)
        os.chdir("d")
    os.fchdir(before)
    os.close(before)


@as_root
@pytest.mark.slow
async def test_nested_folders_in_an_older_agents_folder_stop_neither_end_nor_start(
    agent: Agent, eventually: Eventually
) -> None:
    agent.open("ada", uid=NOBODY)
    agent.open("bob", uid=NOBODY)
    for name in ("ada", "bob"):
        folder = agent.path / "s" / short_name(name)
        os.chown(folder, NOBODY, -1)
        await asyncio.to_thread(nested, folder, 3000)
    agent.node.registry.end("ada", "closed")
    assert not (agent.path / "s" / short_name("ada")).exists()
    await agent.stop()
    begun = time.monotonic()
    await agent.start()
    assert time.monotonic() - begun < 2
    folder = agent.path / "s" / short_name("bob")
    assert (folder.stat().st_uid, [one.name for one in folder.iterdir()]) == (0, ["gpu"])
    agent.peers.append(peer := Peer(folder / "gpu"))
    await peer.connect()
    while not agent.state.discarded.empty:
        await asyncio.to_thread(agent.state.discarded.drain)


@pytest.mark.slow
async def test_many_files_in_a_sessions_folder_do_not_stall_the_agent(agent: Agent) -> None:
    """Of an agent that runs as the user itself, too: it can write to its own folder."""
    path = agent.open("ada")
    folder = Path(path).parent
    for number in range(20_000):
        os.close(os.open(folder / str(number), os.O_CREAT | os.O_WRONLY))
    begun = time.monotonic()
    agent.node.registry.end("ada", "closed")
    assert time.monotonic() - begun < 0.1
    assert not folder.exists()
    longest = 0.0
    while not agent.state.discarded.empty:
        begun = time.monotonic()
        await asyncio.to_thread(agent.state.discarded.drain)
        longest = max(longest, time.monotonic() - begun)
    assert longest < 1.0


async def test_what_was_discarded_goes_by_itself_and_follows_no_link(
    agent: Agent, short_folder: Path, eventually: Eventually
) -> None:
    treasure = short_folder / "treasure"
    (treasure / "inside").mkdir(parents=True)
    folder = Path(agent.open("ada")).parent
    (folder / "below").mkdir()
    (folder / "below" / "file").touch()
    (folder / "link").symlink_to(treasure)
    (folder / "below" / "link").symlink_to(treasure)
    agent.node.registry.end("ada", "closed")
    await eventually(lambda: agent.state.discarded.empty)
    assert (treasure / "inside").is_dir()


def test_folder_in_the_sockets_place_is_moved_away(short_folder: Path) -> None:
    discarded = Discarded(short_folder / "discarded")
    folder = SessionFolder(short_folder, "ada", discarded)
    (folder.socket_path / "below").mkdir(parents=True)
    folder.listen(os.getuid()).close()
    assert folder.socket_path.is_socket()
    folder.remove()
    assert not folder.path.exists()


@as_root
async def test_uid_that_no_user_can_have_is_refused(agent: Agent) -> None:
    for uid in (-1, 2**32 - 1, 2**33):
        with pytest.raises(ControlRefused, match="is not a user") as refused:
            agent.open(uid=uid)
        assert refused.value.code == "bad-request"
    assert agent.node.report().sessions == ()


@as_root
async def test_session_whose_socket_cannot_be_made_keeps_no_other_from_starting_or_ending(
    agent: Agent, eventually: Eventually
) -> None:
    agent.open("ada")
    await agent.stop()
    agent.state.records.replace(SessionRecord.opened(request_for("odd", uid=2**33), 1000.0))
    await agent.start()
    assert {one.id for one in agent.node.report().sessions} == {"ada", "odd"}
    await agent.peer(str(agent.path / "s" / short_name("ada") / "gpu"))
    agent.node.registry.end("odd", "closed")
    agent.node.registry.end("ada", "closed")
    assert agent.node.report().sessions == ()


async def test_record_that_breaks_the_agent_is_left_out(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.open("ada")
    agent.open("bob")
    await agent.stop()
    enter = SessionRegistry._enter

    def breaks(registry: SessionRegistry, session: object) -> None:
        if session.id == "ada":  # type: ignore[attr-defined]
            raise RuntimeError("the unforeseen")
        enter(registry, session)  # type: ignore[arg-type]

    monkeypatch.setattr(SessionRegistry, "_enter", breaks)
    await agent.start()
    assert [one.id for one in agent.node.report().sessions] == ["bob"]


async def test_socket_that_could_not_be_made_is_made_later(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    path = agent.open("ada")
    await agent.stop()
    with monkeypatch.context() as full:

        def no_space(*_: object) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(SessionFolder, "listen", no_space)
        await agent.start()
        assert agent.node.sessions["ada"].socket is None
    await eventually(lambda: agent.node.sessions["ada"].socket is not None)
    await agent.peer(path)


async def test_fifo_among_the_records_does_not_stop_the_start(agent: Agent) -> None:
    agent.open("ada")
    await agent.stop()
    records = agent.path / "records"
    for name in (f"{'0' * 16}.json", f"{short_name('ada')}.new", f"{'0' * 16}.reason"):
        os.mkfifo(records / name)
    (records / f"{'1' * 16}.json").symlink_to("/dev/zero")
    (records / f"{'2' * 16}.json").mkdir()
    await asyncio.wait_for(agent.start(), 5)
    assert [one.id for one in agent.node.report().sessions] == ["ada"]
    assert "not a regular file" in (records / f"{'0' * 16}.reason").read_text()
    await agent.node.requests.answer(request_for("bob"))

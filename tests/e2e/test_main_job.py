"""The main job over real processes: hub, proxy, agent, service, notebook servers, kernels, NVIDIA's bindings, preload.

One simulated GPU is full: carol holds 75 %, alice 25 %. While alice is idle she loses her share but not her kernel;
bob is placed on the units that she released; her next cell has them again, and her buffer is intact. The tests are the
steps of this story: each goes on where the one before it stopped.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from aiosmtpd.controller import Controller

from gpushare_spawner.demo.command import NOTEBOOK
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Tier
from tests.e2e import gpu_cells
from tests.e2e.kernel import Kernel
from tests.e2e.running_stack import RunningStack, session_when
from tests.ports import free_port
from tests.service.notifiers.inbox import Inbox

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

QUARTER = """
name: quarter-gpu
display_name: 0.25 GPU
gpu: {fraction: 0.25}
idle: {downgrade_after: DOWN, downgrade_to: 0.10, release_after: AWAY, warn_before: 2s, min_use: 0}
"""
# nobody may be idle while servers start; later the admin edits the file
PATIENT = QUARTER.replace("DOWN", "1h").replace("AWAY", "2h")
QUICK = QUARTER.replace("DOWN", "4s").replace("AWAY", "7s")
THREE_QUARTERS = """
name: three-quarters
display_name: 0.75 GPU
gpu: {fraction: 0.75}
"""
HALF = """
name: half-gpu
display_name: 0.50 GPU
gpu: {fraction: 0.5}
"""
# carol's share is released after a notice of 10 minutes, which stands at once: she has never used it
NOTIFIED = "idle: {release_after: 10m, warn_before: 10m, min_use: 0}\n"
NOTIFIED_OF_STOP = "idle: {stop_after: 10m, warn_before: 10m, min_use: 0}\n"
GPU = {"SIMGPU_DEVICES": "1", "SIMGPU_MEMORY": "96MiB", "SIMGPU_MODEL": "Simulated GPU 96 MiB"}
BUFFER = gpu_cells.WRITE_BUFFER.format(mebibytes=48, seed=1)


class Posted:
    """What the notifiers of the service send, to an SMTP server and a webhook that listen in threads of their own."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "notifiers.yaml"
        self.inbox = Inbox()
        self.webhook: list[dict[str, str]] = []
        self._smtp = Controller(self.inbox, hostname="127.0.0.1", port=free_port())
        self._smtp.start()
        posted = self.webhook

        class Hook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.write()

    def write(self) -> None:
        """Write the admin's file."""
        mail = {"host": "127.0.0.1", "port": self._smtp.port, "security": "none", "sender": "hub@example.org"}
        content = {
            "email": mail | {"address": "{{ user }}@example.org"},
            "webhooks": [{"url": f"http://127.0.0.1:{self._http.server_port}/"}],
            "actions": ["release", "stop"],
            "closed_after": "5s",
        }
        self.file.write_text(yaml.safe_dump(content))

    def to(self, user: str) -> tuple[list[str], list[str]]:
        """The subjects of the user's mails, and the texts of what came to the webhook."""
        mails = [str(mail["Subject"]) for to, mail in self.inbox.mails if to == [f"{user}@example.org"]]
        return mails, [one["text"] for one in self.webhook if one["text"].startswith(f"{user}: ")]

    async def until(self, user: str, messages: int, within: float = 20.0) -> None:
        """Wait until the user has got so many messages on both ways."""
        deadline = time.monotonic() + within
        while min(map(len, self.to(user))) < messages:
            assert time.monotonic() < deadline, (self.inbox.mails, self.webhook)
            await asyncio.sleep(0.1)

    def close(self) -> None:
        self._smtp.stop()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture(scope="module")
def posted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Posted]:
    listening = Posted(tmp_path_factory.mktemp("notifiers"))
    yield listening
    listening.close()


@pytest.fixture(scope="module")
def stack(start_stack: Callable[..., RunningStack], posted: Posted) -> RunningStack:
    templates = {"quarter.yaml": PATIENT, "three-quarters.yaml": THREE_QUARTERS, "half.yaml": HALF}
    return start_stack(templates, GPU, {"GPUSHARE_NOTIFIERS": str(posted.file)})


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """The users' kernels, kept from one step to the next."""
    return {}


async def page_when(stack: RunningStack, text: str, within: float = 20.0) -> str:
    """The text of the dashboard as soon as it says this."""
    deadline = time.monotonic() + within
    while text not in (page := (await stack.hub.dashboard_text()).replace("\u00a0", " ")):
        assert time.monotonic() < deadline, f"{text!r} is not there after {within:.0f} s: {page}"
        await asyncio.sleep(0.2)
    return page


def used_units(report: Report) -> int:
    return sum(session.guaranteed_units for session in report.sessions)


async def test_alice_gets_a_quarter_and_writes_a_buffer(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    await asyncio.gather(stack.hub.start("carol", "three-quarters"), stack.hub.start("alice", "quarter-gpu"))
    session = await session_when(stack, "alice", lambda session: session.confirmed)
    assert (session.share_units, session.tier, session.effective_units) == (25, Tier.ACTIVE, 25)
    assert used_units(await stack.agent.report()) == 100

    kernels["alice"] = alice = await stack.hub.kernel("alice")
    await alice.run(gpu_cells.SETUP)
    total = await alice.run("print(check(cuda.cuDeviceTotalMem(device)))")
    assert int(total) == 96 * 2**20
    assert await alice.run(BUFFER) == "written"
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"
    session = await session_when(stack, "alice", lambda session: session.processes == 1)
    assert session.memory_bytes >= 48 * 2**20
    assert session.last_gpu_activity is not None


async def test_while_idle_she_is_told_then_downgraded_then_released(stack: RunningStack) -> None:
    (stack.folder.templates / "quarter.yaml").write_text(QUICK)
    told = await session_when(stack, "alice", lambda session: session.notice is not None)
    assert told.notice is not None
    assert (told.tier, told.notice.tier) == (Tier.ACTIVE, Tier.DOWNGRADED)
    assert told.notice.at > time.time() - 1

    smaller = await session_when(stack, "alice", lambda session: session.tier is Tier.DOWNGRADED)
    assert (smaller.share_units, smaller.effective_units) == (25, 10)

    released = await session_when(stack, "alice", lambda session: session.tier is Tier.RELEASED)
    assert (released.share_units, released.effective_units, released.guaranteed_units) == (25, 0, 0)
    carol = await session_when(stack, "carol", lambda _: True)
    assert carol.tier is Tier.ACTIVE, "her template has no idle steps"


async def test_bob_is_placed_on_the_units_that_she_released(stack: RunningStack, kernels: dict[str, Kernel]) -> None:
    (stack.folder.templates / "quarter.yaml").write_text(PATIENT)
    await stack.hub.start("bob", "quarter-gpu")
    bob = await session_when(stack, "bob", lambda session: session.confirmed)
    alice = await session_when(stack, "alice", lambda _: True)
    assert bob.gpus == alice.gpus
    assert bob.borrowed_units == 25, "everything that is free on this GPU is lent by alice"
    assert bob.guaranteed_units == 25
    assert used_units(await stack.agent.report()) == 100

    kernels["bob"] = kernel = await stack.hub.kernel("bob")
    await kernel.run(gpu_cells.SETUP)
    # more than fits beside alice's buffer: hers must leave the GPU
    assert await kernel.run(gpu_cells.WRITE_BUFFER.format(mebibytes=80, seed=2)) == "written"
    assert await kernel.run(gpu_cells.READ_BUFFER) == "intact"


async def test_her_next_cell_restores_the_share_and_the_buffer_is_intact(
    stack: RunningStack, kernels: dict[str, Kernel]
) -> None:
    before = await session_when(stack, "alice", lambda session: session.tier is Tier.RELEASED)
    alice = kernels["alice"]
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"
    assert await alice.run(gpu_cells.WORK_ON_BUFFER) == "worked"
    after = await session_when(stack, "alice", lambda session: session.tier is Tier.ACTIVE)
    assert (after.effective_units, after.guaranteed_units) == (25, 25)
    assert after.pid == before.pid, "the same notebook server"
    assert await alice.run(gpu_cells.READ_BUFFER) == "intact"

    bob = await session_when(stack, "bob", lambda session: session.guaranteed_units < 25)
    assert bob.borrowed_units == 25
    assert used_units(await stack.agent.report()) <= 100


async def test_the_borrower_keeps_working_and_its_data_is_intact(
    stack: RunningStack, kernels: dict[str, Kernel]
) -> None:
    bob, alice = kernels["bob"], kernels["alice"]
    for _ in range(3):
        assert (
            list(await asyncio.gather(bob.run(gpu_cells.WORK_ON_BUFFER), alice.run(gpu_cells.WORK_ON_BUFFER)))
            == ["worked"] * 2
        )
    read = await asyncio.gather(bob.run(gpu_cells.READ_BUFFER), alice.run(gpu_cells.READ_BUFFER))
    assert list(read) == ["intact"] * 2


async def test_a_share_that_does_not_fit_waits_and_the_dashboard_says_how_long(stack: RunningStack) -> None:
    await stack.hub.add_user("dave")
    await stack.hub.request_start("dave", "half-gpu")
    await page_when(stack, "dave waits for 0.50 GPU")
    waiting = await stack.hub.server("dave")
    assert waiting is not None
    assert waiting["pending"] == "spawn"
    assert (await stack.agent.report()).session("dave") is None, "nothing is reserved while it waits"

    assert "Estimated wait" not in await stack.hub.dashboard_text(), "nothing is known of the end of carol's server"
    (stack.folder.templates / "three-quarters.yaml").write_text(THREE_QUARTERS + NOTIFIED)
    text = await page_when(stack, "Estimated wait: about 10 min")
    assert "this needs 0.50 GPU, and none is free." in text
    assert "the spawn is cancelled." in text
    (spawn,) = (await stack.hub.dashboard("GET", "queue"))["spawns"]
    assert (spawn["user"], spawn["position"], spawn["estimated_minutes"]) == ("dave", 1, 10)
    assert spawn["waits_for"].startswith("Not enough free capacity")
    assert 500 < spawn["cancelled_at"] - time.time() < 601


async def test_a_user_without_an_open_tab_is_told_by_mail_and_webhook(stack: RunningStack, posted: Posted) -> None:
    # carol's notice came with the step before; nobody has a tab of hers open
    await posted.until("carol", 1)
    (subject,), (text,) = posted.to("carol")
    assert subject.startswith("Your GPU share will be released at ")
    assert text.startswith("carol: Hello carol,\n\nthe GPU share of your notebook server will be released at ")

    # a second notice is a message of its own
    (stack.folder.templates / "three-quarters.yaml").write_text(THREE_QUARTERS + NOTIFIED_OF_STOP)
    told = await session_when(
        stack, "carol", lambda session: session.notice is not None and session.notice.tier is Tier.STOPPED
    )
    assert told.notice is not None
    await posted.until("carol", 2)
    (_, subject), (_, text) = posted.to("carol")
    assert subject.startswith("Your notebook server will stop at ")
    assert text.startswith("carol: Hello carol,\n\nyour notebook server will stop at ")


async def test_a_cordon_holds_a_spawn_back_until_it_is_ended(stack: RunningStack) -> None:
    (node,) = (await stack.hub.dashboard("GET", "nodes"))["nodes"]
    done = await stack.hub.dashboard("PUT", f"nodes/{node['name']}/cordon", {"reason": "The fan is replaced."})
    assert done["changed"]
    await stack.hub.stop("carol")
    sentence = "An admin keeps new servers away from the GPUs that could take 0.50 GPU: they are cordoned."
    text = await page_when(stack, sentence)
    assert "The fan is replaced." in text
    (spawn,) = (await stack.hub.dashboard("GET", "queue"))["spawns"]
    assert spawn["waits_for"].startswith(sentence)
    assert spawn["estimated_minutes"] is None
    assert used_units(await stack.agent.report()) == 50, "there is capacity, and it is not used"
    await stack.hub.dashboard("DELETE", f"nodes/{node['name']}/cordon")
    await stack.hub.until_ready("dave", within=40)
    dave = await session_when(stack, "dave", lambda session: session.confirmed)
    assert (dave.share_units, dave.borrowed_units) == (50, 0)
    bob = await session_when(stack, "bob", lambda session: session.borrowed_units == 0)
    assert bob.guaranteed_units == 25, "what he had borrowed is his own now, of what carol left"
    assert used_units(await stack.agent.report()) == 100
    await page_when(stack, "No spawn waits for a GPU.")


async def test_the_demo_notebook_runs_from_top_to_bottom(stack: RunningStack) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    # smaller and quicker: this GPU has 96 MiB, and nobody waits for minutes here
    quick = {"2**26": "2**20", "time.monotonic() + 60": "time.monotonic() + 1", "+ 240": "+ 3", "range(20)": "range(2)"}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for before, after in quick.items():
        assert any(before in cell for cell in cells), f"{before} is no longer in the notebook"
        cells = [cell.replace(before, after) for cell in cells]
    kernel = await stack.hub.kernel("dave")
    said = [await kernel.run(cell) for cell in cells]
    # JupyterLab's terminals are login shells
    shell = "import subprocess; print(subprocess.check_output(['bash', '-lc', '{}'], text=True))"
    terminal, view = [await kernel.run(shell.format(program)) for program in ("gpushare status", "nvidia-smi")]
    assert "share           0.50 GPU" in terminal
    assert "tier            active" in terminal
    assert "Simulated GPU 96 MiB" in view
    kernel.close()
    assert "share           0.50 GPU" in said[0]
    assert "Simulated GPU 96 MiB" in said[1]
    assert not any("WRONG" in text for text in said)
    assert sum("the buffer is correct" in text for text in said) == 4
    assert ": 50 % of a GPU" in said[4]


async def test_stopping_frees_everything(stack: RunningStack) -> None:
    await asyncio.gather(*(stack.hub.stop(user) for user in ("alice", "bob", "dave")))
    deadline = time.monotonic() + 15
    while (report := await stack.agent.report()).sessions:
        assert time.monotonic() < deadline, report.sessions
        await asyncio.sleep(0.2)
    assert used_units(report) == 0
    # a kernel whose server is gone ends by itself, a moment later
    servers = {"ipykernel_launcher", "jupyterhub.singleuser"}
    while left := [words for words in stack.processes().values() if servers & {*words}]:
        assert time.monotonic() < deadline + 15, left
        await asyncio.sleep(0.2)

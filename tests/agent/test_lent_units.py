"""A share on lent units: its card before the start and its session's status after it say the same guarantee."""

from __future__ import annotations

import re

import pytest

from gpushare_spawner.model.control import TierRequest
from gpushare_spawner.model.frames import Role
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.share_status import ShareStatus
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.strategy import BestFit
from gpushare_spawner.spawner.form import Form
from gpushare_spawner.spawner.options import profiles
from gpushare_spawner.spawner.queue.availability import AvailabilityNow
from gpushare_spawner.spawner.queue.queue import PlacementCheck, SpawnQueue
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot
from gpushare_spawner.wording.share_status import explanation, guaranteed, terms
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST, SECOND

QUARTER = Template.model_validate({"name": "quarter", "display_name": "Quarter", "gpu": {"fraction": 0.25}})


def check(agent: Agent) -> PlacementCheck:
    """The ledger that a hub makes of the agent's report."""
    report = agent.node.report()
    inventory = GpuInventory()
    inventory.put(report.node, report.gpus)
    held = [allocation for one in report.sessions if (allocation := Allocation.of(one)) is not None]
    return PlacementCheck(GpuSnapshot(inventory), LedgerFeed().follow((report,), held), BestFit())


def card(agent: Agent) -> tuple[str, str]:
    """How a card's spawn would start now, and what is guaranteed to it, in the amounts of a status."""
    now = AvailabilityNow(check(agent), SpawnQueue(5), "this machine", lambda template: frozenset())
    html = Form().render(profiles([QUARTER], []), {}, now).replace("\u00a0", " ").replace("&#39;", "'")
    kind = re.search(r'class="gs-now gs-([a-z-]+)"', html)
    said = re.search(r"<dt>Guaranteed</dt><dd>(.*?)</dd>", html)
    assert kind is not None
    assert said is not None
    return kind[1], re.sub(r"(\d+) % of one GPU's time and [\d.]+ [MG]iB of memory", r"0.\1 GPU", said[1])


def start(agent: Agent) -> str:
    """Open a session where the ledger places it; return its socket's path."""
    ledger = check(agent)
    placement = ledger.verdict(ledger.snapshot.request(QUARTER)).placement
    assert placement is not None
    return agent.open("new", gpus=placement.gpus, borrowed_units=placement.borrowed)


async def status(agent: Agent, path: str) -> ShareStatus:
    observer = await agent.peer(path, Role.NOTEBOOK)
    return await observer.status()


def idle(agent: Agent, id: str) -> None:
    agent.node.requests.tier(TierRequest(id=id, tier=Tier.RELEASED, effective_units=0, reason="idle"))


@pytest.mark.parametrize(
    ("owned", "kind", "said"),
    [
        (40, "now-free", "0.25 GPU"),
        (90, "lent", "0.10 GPU while the rest is borrowed from idle sessions; 0.25 GPU after these have stopped"),
        (
            100,
            "lent",
            "no GPU time and no GPU memory while all units are borrowed from idle sessions; "
            "0.25 GPU after these have stopped",
        ),
    ],
)
async def test_card_and_status_say_the_same_guarantee(agent: Agent, owned: int, kind: str, said: str) -> None:
    for number, gpu in enumerate((FIRST, SECOND)):
        agent.open(f"owner-{number}", gpus=(gpu.uuid,), share_units=owned)
        idle(agent, f"owner-{number}")
    assert card(agent) == (kind, said)
    path = start(agent)
    now = await status(agent, path)
    assert guaranteed(now) == said
    assert {term.name: term.text for term in terms(now)}["guaranteed now"] == said
    assert (f"Guaranteed: {said}." in explanation(now)) == (kind == "lent")
    # the owners are back: the same is guaranteed, from the same instant on
    for number in range(2):
        agent.node.requests.tier(
            TierRequest(id=f"owner-{number}", tier=Tier.ACTIVE, effective_units=owned, reason="GPU work")
        )
    back = said.replace("the rest is borrowed from idle sessions", "the rest is reclaimed by its owners")
    back = back.replace("all units are borrowed from idle sessions", "all units are reclaimed by their owners")
    assert guaranteed(await status(agent, path)) == back
    # the owners have stopped
    for number in range(2):
        agent.node.registry.end(f"owner-{number}", "test")
    assert guaranteed(await status(agent, path)) == "0.25 GPU"


async def test_a_spawn_that_waited_has_the_guarantee_that_its_card_has_when_it_starts(agent: Agent) -> None:
    for number, gpu in enumerate((FIRST, SECOND)):
        agent.open(f"owner-{number}", gpus=(gpu.uuid,), share_units=90)
    assert card(agent) == ("wait", "0.25 GPU")
    idle(agent, "owner-1")
    kind, said = card(agent)
    assert (kind, said.split(" while ")[0]) == ("lent", "0.10 GPU")
    path = start(agent)
    assert guaranteed(await status(agent, path)) == said
    # an own idle tier is not a matter of lent units: GPU work restores it
    idle(agent, "new")
    assert guaranteed(await status(agent, path)) == "0 GPU"


async def test_half_of_the_lent_units_reclaimed_leaves_the_guarantee(agent: Agent) -> None:
    for gpu in (FIRST, SECOND):
        agent.open(f"owner-{gpu.index}", gpus=(gpu.uuid,), share_units=90)
        idle(agent, f"owner-{gpu.index}")
    said = card(agent)[1]
    path = start(agent)
    for index in range(2):
        agent.node.requests.tier(
            TierRequest(id=f"owner-{index}", tier=Tier.DOWNGRADED, effective_units=82, reason="other units")
        )
    now = await status(agent, path)
    assert (now.guaranteed_units, now.borrowed_now) == (18, 8)
    assert guaranteed(now) == said

"""The form: what it says, that it is sound HTML, and the way back from what was submitted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.quota import BudgetState, BudgetStates, Quotas
from gpushare_spawner.model.template import Template
from gpushare_spawner.quota.accounts import Account, QuotaAccounts
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.form import Form
from gpushare_spawner.spawner.hub import ServiceAdvice, ShareAdvice
from gpushare_spawner.spawner.local.process import GPUShareLocalSpawner, GPUShareSimpleSpawner
from gpushare_spawner.spawner.local.reservations import AgentReservations
from gpushare_spawner.spawner.local.systemd import GPUShareSystemdSpawner
from gpushare_spawner.spawner.options import Profile, profiles
from gpushare_spawner.spawner.queue.quotas import QuotaChoice, WrittenBudgets
from gpushare_spawner.templates.folder import Policy
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.options.test_validation import PAGES
from tests.spawner.running_hub import Browser, RunningHub, until

EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{7*7}}"
VOID = {"input", "br", "img", "meta", "link", "hr"}


class Page(HTMLParser):
    """Checks that elements nest, and collects what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.open: list[str] = []
        self.inputs: list[dict[str, str | None]] = []
        self.labels: list[str | None] = []
        self.selected: list[str | None] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id is used twice"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "input":
            self.inputs.append(found)
        if tag == "label":
            self.labels.append(found.get("for"))
        if tag == "option" and "selected" in found:
            self.selected.append(found.get("value"))
        assert not any(name.startswith("on") for name in found), found
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(word for word in self.words if word).replace("\u00a0", " ")

    @property
    def checked(self) -> list[str | None]:
        return [field["value"] for field in self.inputs if "checked" in field]


def offered(*templates: dict[str, Any]) -> list[Profile]:
    return profiles([Template.model_validate({"display_name": "X", **template}) for template in templates], [])


QUARTER = {
    "name": "quarter",
    "display_name": "0.25 GPU",
    "gpu": {"fraction": 0.25},
    "resources": {"cpu": {"guarantee": 1, "limit": 4}, "memory": {"guarantee": "4Gi", "limit": "16Gi"}},
    "idle": {"downgrade_after": "15m", "downgrade_to": 0.1, "release_after": "45m", "stop_after": "8h"},
}


@pytest.fixture
def reservations(agent: FakeAgent) -> AgentReservations:
    return AgentReservations(AgentClient(agent.socket), logging.getLogger("test"))


async def test_a_card_says_what_its_template_promises(reservations: AgentReservations, agent: FakeAgent) -> None:
    page = Page(Form().render(offered(QUARTER), {}, await reservations.availability_now()))
    for sentence in (
        "Starts now",
        "Guaranteed 25 % of one GPU's time and 4 GiB of memory",
        "Maximum 100 % of one GPU's time while others are idle, and 16 GiB of memory",
        "GPU 1 of 2 × Simulated GPU 16 GiB",
        "Server 1 to 4 CPU cores · 4 GiB to 16 GiB memory",
        "If idle after 15 min, downgraded to 0.10 GPU; after 45 min, released and lent; "
        "after 8 h, the server is stopped",
        "Your kernel keeps running. GPU cells run at once, and some seconds of GPU time restore the full share.",
    ):
        assert sentence in page.text
    assert page.checked == ["quarter"]
    # every radio has its label, and nothing comes from elsewhere
    assert [field["id"] for field in page.inputs if field["type"] == "radio"] == page.labels
    assert "http" not in page.html
    assert "url(" not in page.html
    assert "script" not in page.tags


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        ({"count": 1}, "Guaranteed one whole GPU, with 16 GiB of memory GPU"),
        (
            {"count": 2, "memory": {"limit": "200%"}},
            "2 whole GPUs, with 16 GiB of memory each Maximum 32 GiB of memory",
        ),
        (
            {"fraction": 0.5, "memory": {"guarantee": "2Gi", "limit": "8Gi"}},
            "50 % of one GPU's time and 2 GiB of memory",
        ),
        (
            {"count": 2, "fraction": 0.5},
            "Guaranteed 50 % of the time of 2 GPUs and 8 GiB of memory each Maximum 100 % of each GPU's time while "
            "others are idle, and 16 GiB of memory each",
        ),
        (
            {"fraction": 1.5},
            "Guaranteed one whole GPU, with 16 GiB of memory, and 50 % of another GPU's time and 8 GiB of memory "
            "Maximum 100 % of each GPU's time",
        ),
    ],
)
async def test_a_card_words_shares_of_every_kind(
    reservations: AgentReservations, agent: FakeAgent, gpu: dict[str, Any], says: str
) -> None:
    profile = offered({"name": "t", "gpu": gpu})
    assert says in Page(Form().render(profile, {}, await reservations.availability_now())).text


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"alone": True}, "Beside no other session"),
        (
            {"near": ["lab", "course"], "apart_from": ["exam"]},
            "Beside sessions labelled course or lab, if any run; never sessions labelled exam",
        ),
    ],
)
async def test_a_card_says_beside_which_sessions_its_own_are(
    reservations: AgentReservations, placement: dict[str, Any], says: str
) -> None:
    page = Page(Form().render(offered({**QUARTER, "placement": placement}), {}, await reservations.availability_now()))
    assert says in page.text
    assert "Beside" not in Page(Form().render(offered(QUARTER), {}, await reservations.availability_now())).text


async def test_a_card_says_the_priority_of_its_spawns(reservations: AgentReservations) -> None:
    for given, says in (("low", "low: later in the queue"), ("high", "high: earlier in the queue")):
        form = Form().render(offered({**QUARTER, "priority": given}), {}, await reservations.availability_now())
        assert f"Priority {says}" in Page(form).text
    assert "Priority" not in Page(Form().render(offered(QUARTER), {}, await reservations.availability_now())).text


async def test_a_card_of_a_gpu_that_no_agent_reports_cannot_be_chosen(reservations: AgentReservations) -> None:
    uuid = "GPU-8f6b2c1e-0000-5000-8000-0123456789ab"
    page = Page(
        Form().render(offered({**QUARTER, "placement": {"gpu": uuid}}), {}, await reservations.availability_now())
    )
    assert f"No suitable GPU This server needs GPU {uuid}, and no agent reports it." in page.text
    assert not page.checked


async def test_a_card_says_what_is_free_now(reservations: AgentReservations, agent: FakeAgent) -> None:
    agent.occupy("there-0", 60, 0)
    agent.occupy("there-1", 100, 1)
    cards = offered(
        {"name": "cpu"},
        QUARTER,
        {"name": "half", "gpu": {"fraction": 0.5}},
        {"name": "a100", "gpu": {"fraction": 0.1, "models": ["*A100*"]}},
        {"name": "three", "gpu": {"count": 3}},
    )
    text = Page(Form().render(cards, {}, await reservations.availability_now())).text
    assert text.count("Starts now") == 2
    assert (
        "First in queue Not enough free capacity: this needs 0.50 GPU, and at most 0.40 GPU is free on any GPU." in text
    )
    assert "No suitable GPU" in text
    assert "Too large for this machine" in text


@pytest.mark.parametrize(
    ("default", "chosen", "checked"),
    [
        ("three", {}, ["cpu"]),
        ("quarter", {"profile": "three"}, ["quarter"]),
        ("three", {"profile": "a100"}, ["cpu"]),
        ("three", {"profile": "quarter"}, ["quarter"]),
    ],
)
async def test_a_card_that_can_never_start_cannot_be_chosen_and_is_not_preselected(
    reservations: AgentReservations, agent: FakeAgent, default: str, chosen: dict[str, str], checked: list[str]
) -> None:
    cards = (
        {"name": "three", "gpu": {"count": 3}},
        {"name": "cpu"},
        {"name": "a100", "gpu": {"fraction": 0.1, "models": ["*A100*"]}},
        QUARTER,
    )
    marked = offered(*({**card, "default": card["name"] == default} for card in cards))
    page = Page(Form().render(marked, chosen, await reservations.availability_now()))
    assert page.checked == checked
    # the attribute holds for the keyboard, and without JavaScript
    assert [field["value"] for field in page.inputs if "disabled" in field] == ["three", "a100"]
    only = Page(Form().render(offered(*cards[::2]), {}, await reservations.availability_now()))
    assert only.checked == []
    assert "This needs 3 GPUs on one node, and no node has more" in only.text, (
        "the reason is shown although nothing is chosen"
    )
    unknown = Page(Form().render(marked, {"profile": "three"}, None))
    assert unknown.checked == ["three"], "nothing is known to be impossible while the agent is silent"


async def test_a_form_without_the_agent_says_that_free_capacity_is_unknown(reservations: AgentReservations) -> None:
    page = Page(Form().render(offered({"name": "cpu"}, QUARTER), {}, None))
    assert "Free capacity is unknown" in page.text
    assert "Unknown" in page.text
    assert "Guaranteed 25 % of one GPU's time and 25 % of its memory" in page.text
    assert "Starts now" in page.text


async def test_cpu_and_memory_are_on_the_card_only_where_the_spawner_enforces_them(
    reservations: AgentReservations,
) -> None:
    now = await reservations.availability_now()
    assert "CPU cores" in Page(Form().render(offered(QUARTER), {}, now)).text
    assert "CPU cores" not in Page(Form().render(offered(QUARTER), {}, now, enforces_resources=False)).text


def test_process_spawners_enforce_no_cpu_and_memory() -> None:
    assert not GPUShareSimpleSpawner.enforces_resources
    assert not GPUShareLocalSpawner.enforces_resources
    assert GPUShareSystemdSpawner.enforces_resources


async def test_a_form_without_templates_says_so(reservations: AgentReservations) -> None:
    assert "No compute template is available to you" in Page(Form().render([], {}, None)).text


async def test_text_of_templates_is_never_html(reservations: AgentReservations, agent: FakeAgent) -> None:
    agent.gpus = tuple(gpu.model_copy(update={"model": EVIL}) for gpu in agent.gpus)
    evil = {
        "display_name": EVIL,
        "choices": {EVIL: {"display_name": EVIL}},
        "unlisted_choice": {
            "enabled": True,
            "display_name": EVIL,
            "display_name_in_choices": EVIL,
            "validation_message": EVIL,
        },
    }
    cards = offered(
        {
            "name": "evil",
            "display_name": EVIL[:80],
            "description": EVIL,
            "gpu": {"fraction": 0.1},
            "profile_options": {"o": evil, EVIL: evil},
        }
    )
    cards += profiles([], [{"display_name": EVIL, "description": EVIL, "slug": EVIL}])
    chosen = {"profile": "evil", "o--unlisted-choice": EVIL, "x": EVIL}
    page = Page(Form().render(cards, chosen, await reservations.availability_now()))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count("{{7*7}}") > 5
    assert [field["value"] for field in page.inputs if field["type"] == "text"] == [EVIL, ""]


async def test_a_card_says_when_units_are_lent_and_what_that_means(
    reservations: AgentReservations, agent: FakeAgent
) -> None:
    for gpu in (0, 1):
        agent.occupy(f"idle-{gpu}", 100, gpu, tier="released", effective_units=0, guaranteed_units=0)
    page = Page(Form().render(offered(QUARTER), {}, await reservations.availability_now()))
    assert "Starts now on lent units" in page.text
    # another colour than that of a card whose full share is free
    assert 'class="gs-now gs-lent"' in page.html
    assert "gs-now-free" not in page.html.split("</style>")[1]
    assert "When those sessions work again, they reclaim the units" in page.text
    assert (
        "Guaranteed no GPU time and no GPU memory while all units are borrowed from idle sessions; "
        "25 % of one GPU's time and 4 GiB of memory after these have stopped" in page.text
    )
    assert 'style="width: 0%"' in page.html


async def test_a_card_tells_owned_from_lent_units(reservations: AgentReservations, agent: FakeAgent) -> None:
    for gpu in (0, 1):
        agent.occupy(f"idle-{gpu}", 90, gpu, tier="released", effective_units=0, guaranteed_units=0)
    page = Page(Form().render(offered(QUARTER), {}, await reservations.availability_now()))
    assert (
        "10 % of one GPU's time and 1.6 GiB of memory while the rest is borrowed from idle sessions; 25 % of one"
        in page.text
    )
    assert 'style="width: 10%"' in page.html


async def test_choices_are_kept_after_an_error(reservations: AgentReservations) -> None:
    cards = offered({"name": "cpu"}, {"name": "pages", "profile_options": PAGES})
    page = Page(Form().render(cards, {"profile": "pages", "page": "lab"}, None))
    assert page.checked == ["pages"]
    assert page.selected == ["lab"]
    page = Page(Form().render(cards, {"profile": "pages", "page--unlisted-choice": "no"}, None))
    assert page.selected == ["unlisted-choice"]
    assert Page(Form().render(cards, {"profile": ["x"]}, None)).checked == ["cpu"]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"profile": ["cpu"]}, {"profile": "cpu"}),
        ({"profile": ["p"], "profile-option-p--page": ["lab"]}, {"profile": "p", "page": "lab"}),
        ({"profile": ["p"], "profile-option-q--page": ["lab"]}, {"profile": "p"}),
        (
            {
                "profile": ["p"],
                "profile-option-p--page": ["unlisted-choice"],
                "profile-option-p--page--unlisted-choice": ["/x"],
            },
            {"profile": "p", "page--unlisted-choice": "/x"},
        ),
        (
            {"profile": ["p"], "profile-option-p--page": ["lab"], "profile-option-p--page--unlisted-choice": ["/x"]},
            {"profile": "p", "page": "lab"},
        ),
        # KubeSpawner's own form leaves the select out then
        (
            {"profile": ["p"], "profile-option-p--page--unlisted-choice": ["/x"]},
            {"profile": "p", "page--unlisted-choice": "/x"},
        ),
    ],
)
def test_submitted_fields_become_user_options(fields: dict[str, list[str]], options: dict[str, str]) -> None:
    assert Form.read(fields) == options


async def test_a_card_of_the_admins_own_replaces_ours(reservations: AgentReservations, tmp_path: Path) -> None:
    (tmp_path / "card.html").write_text("<p>mine: {{ card.profile.display_name }}</p>")
    assert "<p>mine: 0.25 GPU</p>" in Form([str(tmp_path)]).render(offered(QUARTER), {}, None)


# -- in the hub's pages --


async def test_a_submitted_form_starts_a_server_with_its_share(hub: RunningHub, agent: FakeAgent) -> None:
    browser = Browser(hub)
    await browser.log_in("ada")
    page = Page((await browser.open("/hub/spawn/ada")).body.decode().split('role="form">')[1].split("<br>")[0])
    assert page.checked == ["cpu-only"]
    assert "course" not in [field["value"] for field in page.inputs]
    response = await browser.open("/hub/spawn/ada", [("profile", "quarter-gpu")])
    assert response.code < 500
    spawner = await hub.started("ada")
    assert spawner.user_options == {"profile": "quarter-gpu"}
    assert agent.sessions["ada"].share_units == 25


@pytest.mark.parametrize("server", ["", "extra"])
async def test_an_error_is_shown_on_the_form_with_the_choice_kept(hub: RunningHub, server: str) -> None:
    browser = Browser(hub)
    await browser.log_in("ada")
    path = f"/hub/spawn/ada/{server}".rstrip("/")
    await browser.open(path)
    wrong = [("profile", "quarter-gpu"), ("profile-option-quarter-gpu--image", "x")]
    response = await browser.open(path, wrong)
    assert response.code == 400
    html = response.body.decode()
    assert "Unknown option &#39;image&#39;; 0.25 GPU has: profile." in html
    assert Page(html.split('role="form">')[1].split("<br>")[0]).checked == ["quarter-gpu"]
    # no browser lets a user choose what can never start: the form shows another choice
    response = await browser.open(path, [("profile", "three-gpus")])
    assert response.code == 409
    html = response.body.decode()
    assert "3 GPUs cannot be started on this machine: This needs 3 GPUs on one node, and no node has more" in html
    assert Page(html.split('role="form">')[1].split("<br>")[0]).checked == ["cpu-only"]


async def test_the_hub_shows_the_form_without_an_agent(hub: RunningHub, agent: FakeAgent) -> None:
    await agent.stop()
    browser = Browser(hub)
    await browser.log_in("ada")
    response = await browser.open("/hub/spawn/ada")
    assert response.code == 200
    assert "Free capacity is unknown" in response.body.decode()


async def test_a_slow_agent_does_not_hold_the_form_up(
    make_hub: Any, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_spawner.spawner.base.FORM_SECONDS", 0.1)
    hub: RunningHub = await make_hub()

    async def slow(request: Any) -> None:
        await asyncio.sleep(3)

    agent.before = slow
    browser = Browser(hub)
    await browser.log_in("ada")
    page = await asyncio.wait_for(browser.open("/hub/spawn/ada"), 2.5)
    assert "Free capacity is unknown" in page.body.decode()


async def test_spawns_that_wait_count_on_the_forms_of_others(make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    agent.occupy("there-0", 80, 0)
    agent.occupy("there-1", 80, 1)
    for name in ("bob", "cyd"):
        await hub.start_server(name, {"profile": "half-gpu"})
    await until(lambda: [ticket.ahead for ticket in hub.reservations.queue] == [0, 1])
    browser = Browser(hub)
    await browser.log_in("ada")
    assert "Position 3 in queue" in (await browser.open("/hub/spawn/ada")).body.decode()


def choices(quotas: dict[str, Any], groups: set[str], reservations: AgentReservations) -> Any:
    accounts = QuotaAccounts(Quotas.model_validate(quotas)).of_user("ada", groups)

    def of(template: Template) -> list[QuotaChoice]:
        tenants = [Tenant("ada", quota=account.key) for account in accounts]
        admissions = [reservations.quotas.admission(tenant, template) for tenant in tenants]
        return [QuotaChoice(account, admission) for account, admission in zip(accounts, admissions, strict=True)]

    return of


@pytest.mark.parametrize(
    ("quota", "says"),
    [
        ({"guarantee": 1}, "Quota in quota, 1 GPU left"),
        ({}, "Quota over quota: spawns in quota come first"),
        ({"maximum": 0.1}, "Quota you cannot start now: 0 GPU of at most 0.10 GPU in use"),
    ],
)
async def test_a_card_says_what_the_users_quota_means_for_a_start_now(
    agent: FakeAgent, quota: dict[str, Any], says: str
) -> None:
    quotas: dict[str, Any] = {"users": {"ada": quota}}
    reservations = AgentReservations(
        AgentClient(agent.socket),
        logging.getLogger("test"),
        policy=lambda: Policy(quotas=Quotas.model_validate(quotas)),
    )
    available = await reservations.availability_now()
    page = Page(Form().render(offered(QUARTER), {}, available, quotas=choices(quotas, set(), reservations)))
    assert says in page.text


def test_a_card_says_what_is_left_of_the_budget_and_that_a_spawn_starts_without_it(tmp_path: Path) -> None:
    quotas = {
        "groups": {"physics": {"budget": {"hours": 100, "window": "week"}, "teams": {"optics": {}}}},
        "default": {"budget": {"hours": 4, "window": "day"}},
    }
    accounts, now = QuotaAccounts(Quotas.model_validate(quotas)), 1_800_000_000.0
    file, clock = tmp_path / "budgets.json", [now]
    written = WrittenBudgets(file, lambda: clock[0])
    [optics] = accounts.of_user("ada", {"optics"})
    [own] = accounts.of_user("bob", set())

    def text(account: Account, user: str) -> str:
        choice = QuotaChoice(account, None, written.of(account, user))
        return Page(Form().render(offered(QUARTER), {}, None, quotas=lambda template: [choice])).text

    assert "budget" not in text(optics, "ada"), "the service has written nothing"
    used_up = BudgetState(account="group:physics", hours=100, used=100, window=7 * 86400, more_at=now + 3600)
    file.write_text(BudgetStates(written_at=now, budgets=(used_up,)).model_dump_json())
    assert (
        "budget used up: none of 100 GPU-hours left in 7 days (group physics), more from 2027-01-15 09:00 UTC on. "
        "The server starts, and works in GPU time that others leave"
    ) in text(optics, "ada")
    assert "budget: 4.00 of 4.00 GPU-hours left in 24 h" in text(own, "bob"), "unused"
    clock[0] = now + 901
    assert "budget" not in text(own, "bob"), "too old"
    file.write_text("{")
    assert "budget" not in text(own, "bob")


async def test_a_user_with_several_quotas_chooses_one_on_the_card(agent: FakeAgent) -> None:
    quotas: dict[str, Any] = {"users": {"ada": {"guarantee": 1}}, "groups": {"optics": {}}}
    reservations = AgentReservations(
        AgentClient(agent.socket),
        logging.getLogger("test"),
        policy=lambda: Policy(quotas=Quotas.model_validate(quotas)),
    )
    offer = choices(quotas, {"optics"}, reservations)
    unknown = Page(Form().render(offered(QUARTER), {}, None, quotas=offer))
    assert "your own optics" in unknown.text
    available = await reservations.availability_now()
    page = Page(Form().render(offered(QUARTER), {}, available, quotas=offer))
    assert "your own: in quota, 1 GPU left optics: over quota" in page.text
    assert page.selected == ["ada"]
    again = {"profile": "quarter", "quota": "optics"}
    assert Page(Form().render(offered(QUARTER), again, available, quotas=offer)).selected == ["optics"]
    assert Form.read({"profile": ["quarter"], "profile-option-quarter--quota": ["optics"]}) == again


async def test_a_profiles_own_option_named_quota_is_not_ours(agent: FakeAgent) -> None:
    own = {"quota": {"display_name": "Disk", "choices": {"big": {"kubespawner_override": {}}}}}
    quotas: dict[str, Any] = {"users": {"ada": {}}, "groups": {"optics": {}}}
    reservations = AgentReservations(
        AgentClient(agent.socket),
        logging.getLogger("test"),
        policy=lambda: Policy(quotas=Quotas.model_validate(quotas)),
    )
    offer = choices(quotas, {"optics"}, reservations)
    page = Page(Form().render(offered({**QUARTER, "profile_options": own}), {}, None, quotas=offer))
    assert page.selected == ["big"]


HALF = {"name": "half", "display_name": "0.50 GPU", "gpu": {"fraction": 0.5}}
ENOUGH = "0.25 GPU would have been enough: 3 of 412 bursts of GPU work would have ended later, by 400 ms on average."


async def test_card_shows_advice_that_the_user_can_follow(reservations: AgentReservations) -> None:
    now = await reservations.availability_now()

    def shown(advice: ShareAdvice, *templates: dict[str, Any]) -> str:
        return Page(Form().render(offered(*templates), {}, now, advice={"half": advice})).text

    advice = ShareAdvice(50, 25, ENOUGH)
    assert f"Your use {ENOUGH}" in shown(advice, HALF, QUARTER)
    assert "Your use" not in shown(advice, HALF), "no template has the advised share"
    assert "Your use" not in shown(ShareAdvice(40, 25, ENOUGH), HALF, QUARTER), "the template has changed since"
    assert "<script>" not in Form().render(offered(HALF, QUARTER), {}, now, advice={"half": ShareAdvice(50, 25, EVIL)})


class AdvisingService(RequestHandler):
    """Stands for the service."""

    asked: ClassVar[list[tuple[str, str]]] = []
    wait = 0.0
    body: ClassVar[str] = ""

    async def get(self) -> None:
        self.asked.append((self.get_query_argument("user"), self.request.headers["Authorization"]))
        await asyncio.sleep(self.wait)
        self.finish(self.body)


@pytest.fixture
def advising(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """A service on a free port; returns what configures a hub with it."""
    entry = {"user": "ada", "template": "half-gpu", "units": 50, "advised_units": 25, "text": ENOUGH}
    others = {**entry, "user": "bob", "template": "quarter-gpu", "text": "nobody else's"}
    monkeypatch.setattr(AdvisingService, "body", json.dumps({"advice": [entry, others], "sums": []}))
    monkeypatch.setattr(AdvisingService, "asked", [])
    listening, port = bind_unused_port()
    server = HTTPServer(Application([(r"/services/gpushare/api/v1/advice", AdvisingService)]))
    server.add_socket(listening)

    def configure(config: Any) -> None:
        config.JupyterHub.services.append(
            {"name": "gpushare", "url": f"http://127.0.0.1:{port}", "api_token": "service-token"}
        )

    yield configure
    server.stop()


async def form_of(hub: RunningHub, user: str) -> str:
    browser = Browser(hub)
    await browser.log_in(user)
    return Page((await browser.open(f"/hub/spawn/{user}")).body.decode().split('role="form">')[1].split("<br>")[0]).text


async def test_form_shows_the_services_advice_for_this_user_alone(make_hub: Any, advising: Any) -> None:
    hub = await make_hub(advising)
    shown = await form_of(hub, "ada")
    assert f"Your use {ENOUGH}" in shown
    assert "nobody else's" not in shown
    await form_of(hub, "ada")
    assert AdvisingService.asked == [("ada", "token service-token")], "the answer is kept"


@pytest.mark.parametrize("trouble", ["slow", "broken", "older"])
async def test_form_waits_for_no_advice(make_hub: Any, advising: Any, trouble: str, monkeypatch: Any) -> None:
    bodies = {"slow": AdvisingService.body, "broken": "[", "older": '{"advice": [{"user": "ada", "text": "x"}]}'}
    monkeypatch.setattr(AdvisingService, "body", bodies[trouble])
    monkeypatch.setattr(AdvisingService, "wait", 2.0 if trouble == "slow" else 0.0)
    hub = await make_hub(advising)
    began = time.monotonic()
    shown = await form_of(hub, "ada")
    assert time.monotonic() - began < 1.9
    assert "0.50 GPU" in shown
    assert "Your use" not in shown
    if trouble == "slow":
        await asyncio.sleep(2.0)
        assert ENOUGH in await form_of(hub, "ada"), "the next form has what came late"


async def test_service_that_hangs_leaves_the_hub_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdvisingService, "wait", 3.0)
    listening, port = bind_unused_port()
    server = HTTPServer(Application([(r"/api/v1/advice", AdvisingService)]))
    server.add_socket(listening)
    url = f"http://127.0.0.1:{port}/"
    advice = ServiceAdvice(SimpleNamespace(url=url, api_token="t", prefix="/", command=None), None, logging.getLogger())
    for number in range(20):
        advice.request(f"user{number}")
    await asyncio.sleep(0.1)
    began = time.monotonic()
    assert (await AsyncHTTPClient().fetch(f"{url}other", raise_error=False)).code == 404
    assert time.monotonic() - began < 2.0
    server.stop()

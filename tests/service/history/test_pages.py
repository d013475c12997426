"""The history's page and its API: who may see what, and what is answered to wrong requests."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.command import service_application
from gpushare_spawner.service.history.recorder import History, HistorySources
from gpushare_spawner.service.history.store import (
    HOUR,
    Action,
    AdviceRecord,
    GpuTimeAmounts,
    HistoryStore,
    Subject,
    Wait,
    WaitOutcome,
)
from gpushare_spawner.service.reports import RecentReports
from gpushare_spawner.service.sources import DashboardSources
from gpushare_spawner.service.web import history as answers
from gpushare_spawner.service.web.app import Page
from gpushare_spawner.service.web.history import HEIGHT
from gpushare_spawner.wording import service as words
from gpushare_spawner.wording.service import UNAVAILABLE
from tests.service.conftest import deciding
from tests.service.dashboards import NO_AGENT

PREFIX = "/services/gpushare/"
THIS_HOUR = int(time.time() // HOUR) * HOUR
ANN = Subject("ann", "", "quarter", "ml", "n1", "GPU-0", "A100")
BOB = Subject("bob", "", "half", "=bio()", "n1", "GPU-1", "A100")
ONE = GpuTimeAmounts(reserved=7200, idle=3600, recovered=1800, used=5400, entitled=100, delivered=98, waits=3)
USERS: dict[str, dict[str, Any]] = {
    "admin": {"kind": "user", "name": "root", "admin": True, "scopes": []},
    "ann": {"kind": "user", "name": "ann", "admin": False, "scopes": []},
    "reader": {"kind": "service", "name": "robot", "scopes": ["custom:gpushare:read"]},
    "service": {"kind": "service", "name": "robot", "scopes": []},
}


class SignedIn:
    """Stands for the hub's login."""

    access_scopes = ()
    base_url = PREFIX
    login_url = "/hub/login"
    user: dict[str, Any] | None = None

    def get_session_id(self, handler: object) -> str:
        return ""

    def get_user(self, handler: object, *, sync: bool = True) -> Any:
        return self.user if sync else asyncio.sleep(0, self.user)

    def _persist_url_token_if_set(self, handler: object) -> None: ...


class Client:
    """Asks the service as one of its users."""

    def __init__(self, port: int, login: SignedIn) -> None:
        self._url, self._login = f"http://127.0.0.1:{port}{PREFIX}", login

    async def get(self, path: str, user: str | None = "admin") -> HTTPResponse:
        self._login.user = USERS[user] if user else None
        return await AsyncHTTPClient().fetch(self._url + path, raise_error=False, follow_redirects=False)

    async def rows(self, query: str, user: str = "admin") -> list[dict[str, Any]]:
        answer = await self.get(f"api/v1/history?{query}", user)
        assert answer.code == 200, answer.body
        rows: list[dict[str, Any]] = json.loads(answer.body)["rows"]
        return rows


async def nothing() -> list[Any]:
    return []


def history(folder: Path) -> History:
    return History(HistoryStore(f"sqlite:///{folder}/h.sqlite"), HistorySources(nothing, list, nothing, dict))


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    kept = history(tmp_path)
    await kept.store()
    action = Action(THIS_HOUR, "released", "culler", "ann", "", "quarter", "ml", "n1", 0, "idle", "GPU idle for 45 min")
    kept._store.add(
        {(THIS_HOUR, ANN): ONE, (THIS_HOUR - HOUR, ANN): ONE, (THIS_HOUR, BOB): ONE},
        [],
        [],
        [action, replace(action, user="<b>bob</b>", at=THIS_HOUR + 1.0)],
        [Wait(THIS_HOUR, 65.0, WaitOutcome.STARTED, "ann", "", "quarter", "ml")],
    )
    async for client in serving(kept, monkeypatch):
        yield client


async def serving(kept: History | None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    login = SignedIn()
    monkeypatch.setattr(Page, "_hub_auth", login)
    sources = DashboardSources(ActionContext((), NO_AGENT, dict), RecentReports([]), deciding())
    socket, port = bind_unused_port()
    server = HTTPServer(service_application(sources, PREFIX, history=kept))
    server.add_socket(socket)
    yield Client(port, login)
    server.stop()


NO_PRICES = dict.fromkeys(("energy", "co2", "cost", "saved"), 0.0)


async def test_gpu_hours_by_group(client: Client) -> None:
    assert await client.rows("by=group") == [
        {
            "group": "=bio()", "reserved": 2.0, "idle": 1.0, "recovered": 0.5, "borrowed": 0.0, "used": 1.5,
            "entitled": pytest.approx(100 / 3600, abs=1e-6), "delivered": pytest.approx(98 / 3600, abs=1e-6),
            "waits": 3, **NO_PRICES,
        },
        {
            "group": "ml", "reserved": 4.0, "idle": 2.0, "recovered": 1.0, "borrowed": 0.0, "used": 3.0,
            "entitled": pytest.approx(200 / 3600, abs=1e-6), "delivered": pytest.approx(196 / 3600, abs=1e-6),
            "waits": 6, **NO_PRICES,
        },
    ]  # fmt: skip


async def test_users_see_their_own_time_only(client: Client) -> None:
    assert [row["user"] for row in await client.rows("by=user", "ann")] == ["ann"]
    assert [row["user"] for row in await client.rows("by=user&user=ann", "ann")] == ["ann"]
    assert len(await client.rows("by=user", "reader")) == 2
    for path in ("api/v1/history?user=bob", "api/v1/actions?user=bob"):
        answer = await client.get(path, "ann")
        assert answer.code == 403
        assert "for admins" in json.loads(answer.body)["message"]


async def test_users_see_actions_on_their_own_sessions_only(client: Client) -> None:
    async def users(user: str) -> list[str]:
        return [one["user"] for one in json.loads((await client.get("api/v1/actions", user)).body)["actions"]]

    assert await users("admin") == ["<b>bob</b>", "ann"]
    assert await users("ann") == ["ann"]


async def test_pages_of_actions(client: Client) -> None:
    first = json.loads((await client.get("api/v1/actions?limit=1")).body)["actions"]
    second = json.loads((await client.get(f"api/v1/actions?limit=1&before={first[0]['id']}")).body)["actions"]
    assert [one["user"] for one in first + second] == ["<b>bob</b>", "ann"]


async def test_csv_for_a_spreadsheet_runs_no_formula(client: Client) -> None:
    answer = await client.get("api/v1/history?by=group,hour&format=csv")
    assert answer.headers["Content-Type"].startswith("text/csv")
    head, *rows = csv.reader(io.StringIO(answer.body.decode()))
    assert head[:4] == ["group", "hour", "reserved", "idle"]
    assert [row[0] for row in rows] == ["'=bio()", "ml", "ml"]
    assert rows[0][1].endswith(":00:00+00:00")


async def test_periods(client: Client) -> None:
    assert await client.rows(f"by=user&since={THIS_HOUR + HOUR}&until={THIS_HOUR + 2 * HOUR}") == []
    iso = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(THIS_HOUR))
    assert [row["reserved"] for row in await client.rows(f"by=user&since={iso}")] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("by=colour", "by: 'colour' is not a valid key: choose from user, group, template"),
        ("since=yesterday", "since: 'yesterday' is not a time: write a date like 2026-11-01"),
        ("since=2026-11-02&until=2026-11-01", "until: the period ends before it begins"),
        ("since=50%25", "since: '50%' is not a time"),
        ("until=1e999", "until: '1e999' is not a time"),
        (f"until={'9' * 400}", "until: '9999"),
        ("since=0001-01-01", "since: '0001-01-01' is not a time"),
    ],
)
async def test_a_wrong_request_says_what_would_be_right(client: Client, query: str, said: str) -> None:
    answer = await client.get(f"api/v1/history?{query}")
    assert answer.code == 400
    assert said in json.loads(answer.body)["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999", "before=-1"])
async def test_wrong_pages_of_actions(client: Client, query: str) -> None:
    assert (await client.get(f"api/v1/actions?{query}")).code == 400


@pytest.mark.parametrize("path", ["api/v1/history", "api/v1/actions"])
async def test_programs_without_a_login_are_refused(client: Client, path: str) -> None:
    assert (await client.get(path, None)).code == 403


async def test_the_page_links_its_table_as_csv(client: Client) -> None:
    page = (await client.get("history?by=gpu", "ann")).body.decode()
    (link,) = re.findall(rf'<a class="download" href="{PREFIX}([^"]*)"', page)
    sheet = await client.get(unescape(link), "ann")
    assert sheet.code == 200
    assert sheet.headers["Content-Type"].startswith("text/csv")
    assert sheet.body.decode().splitlines()[0].startswith("node,model,gpu,reserved")
    assert len(sheet.body.splitlines()) == 2


async def test_a_database_that_does_not_answer_is_said_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async for client in serving(history(tmp_path / "missing"), monkeypatch):
        answer = await client.get("history", "ann")
        assert answer.code == 503
        assert json.loads(answer.body)["message"] == UNAVAILABLE


async def test_the_page_in_all_its_forms(client: Client) -> None:
    for query in ("", "period=day&by=user", "period=this-month&by=template", "period=week&by=gpu", "period=x&by=x"):
        answer = await client.get(f"history?{query}")
        assert answer.code == 200, answer.body
        page = answer.body.decode()
        assert "GPU-hours" in page
        assert "1 server got a GPU after 1 min 5 s on average" in page.replace("\xa0", " ")
        assert "<b>bob</b>" not in page
        assert "&lt;b&gt;bob&lt;/b&gt;" in page


_BAR = re.compile(r"<g><title>(.*?)</title>(.*?)</g>", re.DOTALL)
_PART = re.compile(r'<rect class="(working|recovered|idle)" .*?height="([0-9.]+)"')
_HOVER = re.compile(r": ([0-9.]+) GPU-hours reserved, ([0-9.]+) working, ([0-9.]+) idle, ([0-9.]+) of them recovered$")


@pytest.mark.parametrize("period", ["day", "week"])
async def test_idle_means_the_same_in_plot_hover_text_legend_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: str
) -> None:
    kept = history(tmp_path)
    await kept.store()
    hour = 3600.0
    kept._store.add(
        {
            (THIS_HOUR, ANN): GpuTimeAmounts(reserved=8 * hour, idle=5 * hour, recovered=2 * hour),
            (THIS_HOUR, BOB): GpuTimeAmounts(reserved=2 * hour, idle=0.0, recovered=0.0),
            (THIS_HOUR - 2 * HOUR, ANN): GpuTimeAmounts(reserved=4 * hour, idle=4 * hour, recovered=4 * hour),
            (THIS_HOUR - 3 * HOUR, BOB): GpuTimeAmounts(reserved=3 * hour, idle=1.5 * hour, recovered=0.0),
        },
        [], [], [], [],
    )  # fmt: skip
    async for client in serving(kept, monkeypatch):
        page = (await client.get(f"history?period={period}&by=user")).body.decode().replace("\xa0", " ")
    (total,) = re.findall(r"<tfoot><tr>(.*?)</tr>", page, re.DOTALL)
    reserved, idle, _, recovered = (cell.strip(" %") for cell in re.findall(r"<td>(.*?)</td>", total)[:4])
    assert (reserved, idle, recovered) == ("17.0", "10.5", "6.00")
    heights = re.findall(r'<text class="axis" x="-6" y="[0-9.]+" text-anchor="end">([0-9.]+)</text>', page)
    hours_of = dict.fromkeys(("working", "recovered", "idle"), 0.0)
    for hover, drawn in _BAR.findall(page):
        parts = {name: float(height) / HEIGHT * max(map(float, heights)) for name, height in _PART.findall(drawn)}
        said = _HOVER.search(hover)
        assert said is not None, hover
        assert [float(one) for one in said.groups()] == pytest.approx(
            [sum(parts.values()), parts["working"], parts["idle"] + parts["recovered"], parts["recovered"]], abs=0.02
        )
        hours_of = {name: hours + parts[name] for name, hours in hours_of.items()}
    assert hours_of["idle"] + hours_of["recovered"] == pytest.approx(float(idle), abs=0.05)
    assert hours_of["recovered"] == pytest.approx(float(recovered), abs=0.05)
    assert hours_of["working"] == pytest.approx(float(reserved) - float(idle), abs=0.05)
    legend = re.findall(r'<span class="key (\w+)"></span>(.*?)</li>', page)
    assert {name: text.partition(":")[0] for name, text in legend} == {
        "working": "working", "recovered": "idle, recovered", "idle": "idle, not recovered",
    }  # fmt: skip


async def test_the_page_names_the_node_of_a_drain_and_says_where_a_name_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = history(tmp_path)
    await kept.store()
    drain = Action(THIS_HOUR, "drain", "root", node="n1", reason="GPU 0 of node n1 gets no new servers.")
    started = Wait(THIS_HOUR, 0.0, WaitOutcome.STARTED, "ann", "", "quarter", "ml")
    kept._store.add({}, [], [], [drain, Action(THIS_HOUR, "keep", "ann", template="quarter", node="n2")], [started])
    async for client in serving(kept, monkeypatch):
        page = (await client.get("history")).body.decode()
    assert "<strong>node n1</strong>" in page
    assert "<strong>(name deleted)</strong>" in page
    assert "1 server got a GPU at once." in page


async def test_a_long_table_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = history(tmp_path)
    await kept.store()
    many = {(THIS_HOUR, replace(ANN, user=f"user-{number}")): ONE for number in range(203)}
    kept._store.add(many, [], [])
    async for client in serving(kept, monkeypatch):
        page = (await client.get("history?by=user")).body.decode()
        assert page.count('<th scope="row">user-') == 200
        assert "3 more rows are in the CSV file." in page
        assert len(await client.rows("by=user")) == 203


async def test_the_page_of_a_user_names_nobody_else(client: Client) -> None:
    page = (await client.get("history?by=user", "ann")).body.decode()
    assert "bob" not in page
    assert "Your GPU-hours" in page


async def test_a_service_without_a_history_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async for client in serving(None, monkeypatch):
        answer = await client.get("api/v1/history")
        assert answer.code == 404
        assert "keeps no history" in json.loads(answer.body)["message"]
        assert "leave out --history=false" in json.loads(answer.body)["message"]


async def test_a_database_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async for client in serving(history(tmp_path / "missing"), monkeypatch):
        answer = await client.get("api/v1/history", "admin")
        assert answer.code == 503
        assert "unable to open database file" in json.loads(answer.body)["message"]
        # the address of the database is for admins
        assert json.loads((await client.get("api/v1/history", "ann")).body)["message"] == UNAVAILABLE


@pytest.mark.parametrize("path", ["api/v1/history", "api/v1/actions", "history"])
async def test_a_program_that_is_no_user_sees_no_rows_whose_names_were_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    kept = history(tmp_path)
    await kept.store()
    action = Action(THIS_HOUR, "drain", "root", node="n1", reason="GPU-0 is broken.")
    kept._store.add({(THIS_HOUR, replace(ANN, user="")): ONE}, [], [], [action])
    async for client in serving(kept, monkeypatch):
        assert (await client.get(path, "service")).code == 403
        assert (await client.get(path, "reader")).code == 200


@pytest.mark.parametrize("form", ["json", "csv"])
async def test_many_rows_are_not_written_on_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    threads = set()
    row = answers._row

    def noted(*values: Any) -> dict[str, Any]:
        threads.add(threading.current_thread())
        return row(*values)

    monkeypatch.setattr(answers, "_row", noted)
    assert (await client.get(f"api/v1/history?by=user&format={form}")).code == 200
    assert threads
    assert threading.main_thread() not in threads


def advised(user: str, template: str, group: str, **changes: Any) -> AdviceRecord:
    values: dict[str, Any] = {
        "units": 50, "advised_units": 25, "since": THIS_HOUR - 9e4, "until": THIS_HOUR, "bursts": 412,
        "gpu_seconds": 9000.0, "waited_seconds": 300.0, "later": 3, "later_seconds": 1.2, "freed_gpu_seconds": 7200.0,
        "user": user, "template": template, "group": group, "computed_at": THIS_HOUR,
    }  # fmt: skip
    return AdviceRecord(**values | changes)


@pytest.fixture
async def with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    kept = history(tmp_path)
    await kept.store()
    await kept.set_advice(advised("ann", "half", "ml"))
    await kept.set_advice(
        advised("bob", "half", "<i>bio</i>", units=25, advised_units=50, saved_seconds=2400.0, freed_gpu_seconds=0.0)
    )
    await kept.set_advice(advised("eve", "half", "ml", advised_units=50))
    async for client in serving(kept, monkeypatch):
        yield client


async def test_advice_for_all_users_is_put_into_words_beside_the_event_loop(
    with_advice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    sentence = words.advice

    def noted(size: AdviceRecord) -> str:
        threads.add(threading.current_thread())
        return sentence(size)

    monkeypatch.setattr(words, "advice", noted)
    answer = await with_advice.get("api/v1/advice")
    assert (answer.code, len(threads)) == (200, 1)
    assert threading.current_thread() not in threads


async def test_users_get_their_own_advice_only(with_advice: Client) -> None:
    async def advice(query: str, user: str) -> Any:
        answer = await with_advice.get(f"api/v1/advice{query}", user)
        return json.loads(answer.body) if answer.code == 200 else answer.code

    own = await advice("", "ann")
    assert own == await advice("?user=ann", "ann")
    assert [entry["user"] for entry in own["advice"]] == ["ann"]
    assert own["advice"][0]["text"].startswith("0.25 GPU would have been enough: 3 of 412 bursts of GPU work")
    assert [entry["users"] for entry in own["sums"]] == [1]
    assert await advice("?user=bob", "ann") == 403
    assert await advice("", "service") == 403
    everything = await advice("", "reader")
    assert [entry["text"][:8] for entry in everything["advice"]] == ["0.25 GPU", "0.50 GPU", ""]
    assert {(entry["group"], entry["users"]) for entry in everything["sums"]} == {("ml", 1), ("<i>bio</i>", 1)}
    assert [entry["user"] for entry in (await advice("?user=bob", "reader"))["advice"]] == ["bob"]


async def test_page_shows_admins_what_could_be_won_and_users_their_advice(with_advice: Client) -> None:
    page = (await with_advice.get("history")).body.decode()
    table = page[page.index("What other shares could win") : page.index('id="actions"')]
    assert "<i>" not in table
    cells = [unescape(cell) for cell in re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", table)][5:]
    assert cells == ["half", "ml", "1", "2.00", "–", "half", "<i>bio</i>", "1", "–", "40\u00a0min"]
    own = (await with_advice.get("history", "ann")).body.decode()
    assert "What other shares could win" not in own
    assert "half: 0.25 GPU would have been enough" in own
    assert "0.50 GPU" not in own

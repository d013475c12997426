"""The service as a real hub starts it, with exactly the roles and scopes that we ship."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlparse

import pytest

from tests.copies import start_copy
from tests.monitoring.running import found_program, running_prometheus
from tests.service.fake_agent import FakeAgent, fake_agent
from tests.service.real_hub import RealHub, fetch, real_hub

TEMPLATE = """
name: %s
display_name: 0.25 GPU
gpu: {fraction: 0.25}
idle: {downgrade_after: %s, downgrade_to: 0.10, release_after: %s, stop_after: %s, warn_before: 5m}
"""


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """Shares of `quarter` are downgraded after hours, those of `hasty` after seconds."""
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "quarter.yaml").write_text(TEMPLATE % ("quarter", "1h", "2h", "3h"))
    (folder / "hasty.yaml").write_text(TEMPLATE % ("hasty", "1s", "2s", "3s"))
    return folder


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if await condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it did not happen")


async def test_the_service_on_a_real_hub(tmp_path: Path, templates: Path) -> None:
    # one hub for all of it: its start takes longer than everything else
    async with (
        fake_agent(tmp_path / "control.sock", time.time) as agent,
        real_hub(tmp_path, templates, agent.path, "--cull-every=200ms") as hub,
    ):
        ann, bob = await hub.user("ann"), await hub.user("bob")
        agent.add("ann")
        agent.add("bob", gpus=("GPU-1",))
        await what_the_service_may_do_and_what_not(hub)
        await who_sees_what(hub, ann, bob)
        await who_acts_on_what(hub, agent)
        await prometheus_scrapes_the_service_as_the_guide_says(hub, tmp_path)
        await the_history_counts_everybody(hub, ann)
        agent.asked.clear()
        await all_tiers_in_turn(hub, agent)
        assert "lacks the scope" not in hub.log.read_text()


async def what_the_service_may_do_and_what_not(hub: RealHub) -> None:
    """With exactly the shipped role: see servers and their activity, start and stop servers."""
    _, me = await hub.ask("GET", "/user", hub.service)
    assert {"list:users", "read:servers", "delete:servers", "start:servers", "read:users:groups"} <= set(me["scopes"])
    assert [scope for scope in me["scopes"] if scope.startswith("access:")] == ["access:services!service=gpushare"]
    assert not [scope for scope in me["scopes"] if scope.startswith(("admin:", "tokens", "servers", "users"))]
    status, users = await hub.ask("GET", "/users", hub.service)
    assert status == 200
    servers = {user["name"]: user["servers"] for user in users}
    assert servers["ann"][""]["last_activity"]
    assert not servers["ann"][""].get("state")
    # the hub's own requests, for the advice on the form
    advice = await fetch(hub.dashboard_url + "api/v1/advice?user=ann", hub.service)
    assert (advice.code, json.loads(advice.body)["advice"]) == (200, [])
    # not: get into servers, make tokens, make or delete users, steer the hub
    for method, path in [
        ("POST", "/users/ann/tokens"),
        ("GET", "/users/ann/tokens"),
        ("POST", "/users/carl"),
        ("DELETE", "/users/ann"),
        ("POST", "/shutdown"),
        ("GET", "/proxy"),
    ]:
        status, answer = await hub.ask(method, path, hub.service)
        assert status in (403, 404), (method, path, answer)
    assert (await hub.ask("DELETE", "/users/bob/server", hub.service))[0] in (202, 204)


async def who_sees_what(hub: RealHub, ann: str, bob: str) -> None:
    async def known() -> bool:
        """Reports can be a second old."""
        return len(json.loads((await fetch(hub.dashboard_url + "api/v1/sessions", hub.tester)).body)["sessions"]) == 2

    await eventually(known)
    own = json.loads((await fetch(hub.dashboard_url + "api/v1/sessions", ann)).body)
    assert [session["user"] for session in own["sessions"]] == ["ann"]
    assert own["others"] == 1
    assert "bob" not in json.dumps(own)
    page = (await fetch(hub.dashboard_url, ann)).body.decode()
    assert "Your sessions" in page
    assert "bob" not in page
    assert [
        one["user"] for one in json.loads((await fetch(hub.dashboard_url + "api/v1/sessions", bob)).body)["sessions"]
    ] == ["bob"]

    boss = await hub.user("boss")
    everything = json.loads((await fetch(hub.dashboard_url + "api/v1/sessions", boss)).body)
    assert [session["user"] for session in everything["sessions"]] == ["ann", "bob"]

    # metrics: for admins, and for who has the scope; nothing at all for strangers
    assert (await fetch(hub.dashboard_url + "metrics", ann)).code == 403
    metrics = await fetch(hub.dashboard_url + "metrics", boss)
    shown = metrics.body.decode().splitlines()
    assert 'gpushare_sessions{node="fake",template="quarter",tier="active"} 2.0' in shown
    assert 'gpushare_queue_spawns{template="quarter"} 0.0' in shown
    assert "gpushare_history_failing 0.0" in shown
    # a service such as Prometheus, by the custom scopes
    assert (await fetch(hub.dashboard_url + "metrics", hub.tester)).code == 200
    watched = json.loads((await fetch(hub.dashboard_url + "api/v1/sessions", hub.tester)).body)
    assert [session["user"] for session in watched["sessions"]] == ["ann", "bob"]
    assert (await fetch(hub.dashboard_url + "metrics", hub.service)).code == 403
    assert (await fetch(hub.dashboard_url + "api/v1/sessions")).code == 403
    assert (await fetch(hub.dashboard_url + "api/v1/sessions", "nonsense")).code == 403
    login = await fetch(hub.dashboard_url)
    assert login.code == 302
    assert "/hub/api/oauth2/authorize" in login.headers["Location"]
    # a user without the custom scopes logs in, and the hub's log has no warning about it
    granted = await (await hub.browser("ann")).ask(hub.hub_url + login.headers["Location"])
    assert "oauth_callback?code=" in granted.headers["Location"]
    assert "requested scopes" not in hub.log.read_text()


async def who_acts_on_what(hub: RealHub, agent: FakeAgent) -> None:
    api, access = hub.dashboard_url + "api/v1/", "access:services!service=gpushare"

    async def token(user: str, *scopes: str) -> str:
        status, made = await hub.ask("POST", f"/users/{user}/tokens", hub.tester, {"scopes": [access, *scopes]})
        assert status == 201, made
        return str(made["token"])

    async def kept(whose: str, token: str) -> int:
        return (await fetch(f"{api}sessions/{whose}/keep", token, "POST", {"hours": 1})).code

    async def may(token: str) -> list[str]:
        return [name for name, has in json.loads((await fetch(api + "viewer", token)).body)["may"].items() if has]

    acting = await token("ann", "custom:gpushare:act-own")
    assert await kept("ann", acting) == 200
    assert await kept("bob", acting) == 404
    assert await kept("ann", await token("ann")) == 403
    assert await kept("ann", "nonsense") == 403
    assert [one.keep.by for one in agent.sessions.values() if one.keep is not None] == ["ann"]
    # an admin's token has what it was made with, and each scope can be its only one
    assert await may(await token("boss")) == []
    for scope, allowed in {"read": ["read_all"], "act": ["read_all", "act_all"], "drain": ["drain"]}.items():
        assert set(await may(await token("boss", f"custom:gpushare:{scope}"))) >= set(allowed)
        narrow = await token("boss", f"custom:gpushare:{scope}")
        assert await kept("ann", narrow) == (200 if scope == "act" else 404 if scope == "drain" else 403), scope
        drained = await fetch(api + "nodes/fake/drain", narrow, "PUT", {"reason": "test"})
        assert drained.code == (200 if scope == "drain" else 403), drained.body
        at_the_hub = await fetch(hub.hub_url + "/hub/api/users", narrow)
        assert at_the_hub.code == 403, "nothing else of the admin's rights"
    assert (await fetch(api + "nodes/fake/drain", await token("boss", "custom:gpushare:drain"), "DELETE")).code == 200
    for user, scope in (("ann", "act"), ("bob", "drain"), ("ann", "read")):
        status, _ = await hub.ask("POST", f"/users/{user}/tokens", hub.tester, {"scopes": [f"custom:gpushare:{scope}"]})
        assert status in (400, 403), "a user without the scope cannot give it"
    assert (await fetch(hub.dashboard_url + "metrics", await token("boss", "custom:gpushare:metrics"))).code == 200
    _, made = await hub.ask("POST", "/users/boss/tokens", hub.tester, {})
    assert await may(made["token"]) == ["read_all", "act_own", "act_all", "drain"]

    # a browser: through the hub's login, and with the page's XSRF token
    browser = await hub.browser("ann")
    to_hub = (await browser.ask(hub.dashboard_url)).headers["Location"]
    back = urlparse((await browser.ask(hub.hub_url + to_hub)).headers["Location"])
    await browser.ask(urlparse(hub.dashboard_url)._replace(path=back.path, query=back.query).geturl())
    page = await browser.ask(hub.dashboard_url, {"Sec-Fetch-Mode": "navigate"})
    assert page.code == 200
    assert browser.cookies["_xsrf"] in page.body.decode()
    keep = {"method": "POST", "body": json.dumps({"hours": 2})}
    script = {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "same-origin"}
    refused = await browser.ask(f"{api}sessions/ann/keep", script, **keep)
    assert (refused.code, json.loads(refused.body)["code"]) == (403, "xsrf")
    wrong = await browser.ask(f"{api}sessions/ann/keep", script | {"X-XSRFToken": "guessed"}, **keep)
    assert wrong.code == 403
    script["X-XSRFToken"] = browser.cookies["_xsrf"]
    assert (await browser.ask(f"{api}sessions/ann/keep", script, **keep)).code == 200
    assert (await browser.ask(f"{api}sessions/bob/keep", script, **keep)).code == 404
    assert json.loads((await browser.ask(api + "viewer", script)).body)["may"]["act_own"]

    # a restart through the real hub
    restarted = await fetch(f"{api}sessions/ann/restart", acting, "POST", {"template": "hasty"})
    assert json.loads(restarted.body)["changed"], restarted.body
    assert (await hub.servers("ann"))[""]["user_options"] == {"profile": "hasty"}
    assert (await fetch(f"{api}sessions/ann/keep", acting, "DELETE")).code == 200


async def prometheus_scrapes_the_service_as_the_guide_says(hub: RealHub, folder: Path) -> None:
    program = found_program("prometheus")
    if program is None:
        return  # the other steps need none
    address = urlparse(hub.dashboard_url)

    def sessions() -> list[float]:
        scrape = {"metrics_path": f"{address.path}metrics", "authorization": {"credentials": hub.tester}}
        with running_prometheus(program, folder, address.netloc, **scrape) as prometheus:
            return prometheus.values("sum(gpushare_sessions)")

    assert await asyncio.to_thread(sessions) == [2.0]


async def the_history_counts_everybody(hub: RealHub, ann: str) -> None:
    async def counted() -> bool:
        whole = json.loads((await fetch(hub.dashboard_url + "api/v1/history?by=user", hub.tester)).body)
        return {row["user"] for row in whole["rows"] if row["reserved"] > 0} == {"ann", "bob"}

    await eventually(counted)
    own = json.loads((await fetch(hub.dashboard_url + "api/v1/history?by=user", ann)).body)
    assert [row["user"] for row in own["rows"]] == ["ann"]
    assert (await fetch(hub.dashboard_url + "history", ann)).code == 200
    assert (await fetch(hub.dashboard_url + "api/v1/history")).code == 403
    assert list(hub.log.parent.glob("**/gpushare-history.sqlite"))


async def all_tiers_in_turn(hub: RealHub, agent: FakeAgent) -> None:
    """Notified, downgraded, notified, released, notified, stopped through the hub's API."""
    await hub.user("carl")
    assert "" in await hub.servers("carl")
    agent.add("carl", template="hasty", last_gpu_activity=time.time())

    async def gone() -> bool:
        return not await hub.servers("carl")

    await eventually(gone)
    agent.sessions.clear()
    actions = [(what, tier) for what, name, tier in agent.told if name == "carl"]
    assert [action for action in actions if action[1] in ("downgraded", "released")][:4] == [
        ("notice", "downgraded"),
        ("tier", "downgraded"),
        ("notice", "released"),
        ("tier", "released"),
    ]
    assert actions[-1] == ("notice", "stopped")
    assert "" in await hub.servers("ann")  # nobody else was


@pytest.mark.parametrize("problem", ["a port in use", "no token"])
async def test_what_keeps_the_service_from_starting_is_said(tmp_path: Path, problem: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = os.environ | {
            "JUPYTERHUB_API_URL": "http://127.0.0.1:9/hub/api",
            "JUPYTERHUB_API_TOKEN": "" if problem == "no token" else "x",
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{taken.getsockname()[1]}",
            "JUPYTERHUB_SERVICE_NAME": "gpushare",
            "GPUSHARE_HISTORY": "false",
        }
        log = tmp_path / "service.log"
        process = start_copy("service", [f"--templates-dir={tmp_path}"], environment, log)
        assert process.wait(60) in (1, 2)
    said = log.read_text()
    assert "Traceback" not in said
    assert ("cannot listen on 127.0.0.1" if problem == "a port in use" else "$JUPYTERHUB_API_TOKEN is not set") in said

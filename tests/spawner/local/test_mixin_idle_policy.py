"""The form says which idle actions apply to the user, by the idle policy beside the templates."""

from __future__ import annotations

from pathlib import Path

from tests.spawner.running_hub import Browser, RunningHub

POLICY = """\
groups:
  staff: {downgrade_after: 2h, release_after: 3h}
limits: {release_after: 50m}
"""


async def test_the_form_shows_what_applies_to_the_users_groups(hub: RunningHub, templates: Path) -> None:
    await hub.add_user("ada")
    assert (await hub.api("POST", "groups/staff")).code == 201
    browser = Browser(hub)
    await browser.log_in("ada")

    async def form() -> str:
        return (await browser.open("/hub/spawn/ada")).body.decode().replace("\u00a0", " ")

    assert "after 3 h, released" not in await form()
    (templates / "idle.yaml").write_text(POLICY.replace("50m", "5h"))
    assert "after 3 h, released" not in await form()
    await hub.api("POST", "groups/staff/users", {"users": ["ada"]})
    assert "after 3 h, released" in await form()
    (templates / "idle.yaml").write_text(POLICY)
    assert "after 50 min, released" in await form()

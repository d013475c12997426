"""JupyterLab and Notebook in a real browser: the status item, the notifications, the dialog and its controls."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

from gpushare_spawner.model.frames import AskKind, Kind
from gpushare_spawner.model.share import Tier
from gpushare_spawner.wording.amounts import clock, unbroken
from tests.notebook.jupyter import TOKEN, Jupyter, running
from tests.notebook.scripted_agent import GPU, OTHER_GPU, Script, ScriptedAgent
from tests.present import present

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs a browser: Debian's packages chromium and chromium-driver"
    ),
]

ITEM, TOAST, DIALOG = ".gpushare-Item button", ".Toastify__toast", ".jp-Dialog"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedAgent]:
    with ScriptedAgent(tmp_path_factory.mktemp("agent") / "s.sock") as agent:
        yield agent


@pytest.fixture(scope="module")
def lab(agent: ScriptedAgent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    folder = tmp_path_factory.mktemp("lab")
    settings = folder / "config" / "labconfig"
    settings.mkdir(parents=True)
    # Jupyter's question about news would lie over our notifications
    quiet = '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    (settings / "page_config.json").write_text(quiet)
    with running(folder, "jupyterlab", GPUSHARE_SOCKET=str(agent.path), JUPYTERHUB_BASE_URL="/") as jupyter:
        yield jupyter


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = present(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    switches = ["headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "window-size=1200,800"]
    for switch in [*switches, "disable-dev-shm-usage", f"user-data-dir={profile}"]:
        options.add_argument(f"--{switch}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """A page of the server in the browser, which asks for the status whenever a test waits."""

    def __init__(self, browser: Chrome, folder: Path) -> None:
        self._browser = browser
        self._folder = folder

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            "return Array.from(document.querySelectorAll(arguments[0]), node => node.textContent)", selector
        )
        return found

    def run(self, script: str, *arguments: Any) -> Any:
        return self._browser.execute_script(script, *arguments)

    def wait_for(self, selector: str, part: str, there: bool = True) -> None:
        """Until a node with that text is there, or no longer."""
        deadline = time.monotonic() + 60
        while any(unbroken(part) in text for text in self.texts(selector)) != there:
            if time.monotonic() > deadline:
                self._browser.save_screenshot(str(self._folder / "page.png"))
                wanted = "no" if there else "still"
                raise AssertionError(f"{wanted} {part!r} in {self.texts(selector)}; see {self._folder}/page.png")
            time.sleep(0.2)
            # the extension asks when the page becomes visible, and not only every 5 s
            self.run("document.dispatchEvent(new Event('visibilitychange'))")

    def reload(self) -> None:
        """Load the page anew, without its notifications."""
        self._browser.refresh()
        self.wait_for(ITEM, "GPU")

    def click(self, inside: str, label: str) -> None:
        """Click a button by a script: a notification may still move into the page."""
        done = self.run(
            "for (const button of document.querySelectorAll(arguments[0] + ' button')) {"
            "  if (button.textContent === arguments[1]) { button.click(); return true; }"
            "} return false",
            inside,
            unbroken(label),
        )
        assert done, f"no button {label!r} in {self.texts(inside)}"

    def keys(self, *keys: str) -> None:
        """Press keys, as they reach what has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self._browser).send_keys(*keys).perform()

    def errors(self) -> list[str]:
        """Our messages in the browser's log."""
        log: list[dict[str, str]] = self._browser.get_log("browser")  # type: ignore[no-untyped-call]
        ours = [entry["message"] for entry in log if "gpushare" in entry["message"]]
        # JupyterLab warns of each plugin that takes long to activate, as it does on a busy machine
        return [message for message in ours if "to activate" not in message]


@pytest.fixture
def page(lab: Jupyter, browser: Chrome, agent: ScriptedAgent, tmp_path: Path) -> Page:
    """JupyterLab, loaded once, with the share as it is in the beginning and no notification."""
    agent.script.__dict__.update(Script().__dict__)
    page = Page(browser, tmp_path)
    if "/lab" not in browser.current_url:
        browser.get(f"{lab.url}lab?token={TOKEN}")
    page.wait_for(ITEM, "0.25 GPU · active · 3.1 of 16 GiB")
    page.run("document.querySelectorAll('.jp-Notification-Toast-Close').forEach(button => button.click())")
    page.wait_for(TOAST, "", there=False)
    return page


def test_the_share_stands_in_the_status_bar_and_changes_are_told(page: Page, agent: ScriptedAgent) -> None:
    script = agent.script
    assert page.texts(f"#jp-bottom-panel {ITEM}")
    script.quiet = 1.0
    due = time.time() + 300
    script.step = (Tier.DOWNGRADED, due, 10)
    # by the minute, on 24 hours, as everywhere
    page.wait_for(TOAST, f"Your GPU share will be downgraded to 0.10 GPU at {clock(due, time.time())}: it is idle")
    assert len(page.texts(TOAST)) == 1

    script.step, script.tier, script.effective = None, Tier.DOWNGRADED, 10
    page.wait_for(ITEM, "downgraded to 0.10 GPU")
    page.wait_for(TOAST, "Your GPU share was downgraded to 0.10 GPU while it was idle.")
    page.wait_for(TOAST, "GPU cells run at once and soon restore the share.")  # not cut off
    page.wait_for(TOAST, "will be downgraded", there=False)  # what was announced has come
    assert len(page.texts(TOAST)) == 1, "the notification was updated"
    assert not page.texts(f"{TOAST} .jp-toast-button"), "nothing is left to ask for"

    later = time.time() + 48 * 3600
    script.step = (Tier.RELEASED, later, 0)
    assert " on " in clock(later, time.time())
    page.wait_for(TOAST, f"Your GPU share will be released at {clock(later, time.time())}: it is idle")
    page.wait_for(TOAST, "was downgraded", there=False)
    script.step, script.tier, script.effective = None, Tier.RELEASED, 0
    page.wait_for(TOAST, "Your GPU share was released while it was idle.")
    assert len(page.texts(TOAST)) == 1, "and again"
    page.run("document.querySelector('.jp-Notification-Toast-Close').click()")
    page.wait_for(TOAST, "released", there=False)

    script.tier, script.effective = Tier.ACTIVE, 25
    page.wait_for(TOAST, "Your GPU share is restored: 0.25 GPU.")
    page.wait_for(TOAST, "was downgraded", there=False)
    page.wait_for(ITEM, "0.25 GPU · active")


def test_reclaimed_units_and_refused_allocations_are_told(page: Page, agent: ScriptedAgent) -> None:
    script = agent.script
    script.borrowed, script.guaranteed = 15, 10
    page.wait_for(TOAST, "0.10 GPU of your 0.25 GPU is guaranteed now: others reclaimed the rest.")
    page.run("window.open = address => { window.opened = address; }")
    page.click(TOAST, "Dashboard")
    assert page.run("return window.opened") == "/services/gpushare/"
    script.borrowed, script.guaranteed = 0, 25
    page.wait_for(TOAST, "others reclaimed the rest", there=False)

    script.refused = 1
    page.wait_for(TOAST, "Out of GPU memory: 2 GiB more would exceed the 16 GiB that this session may allocate.")
    page.click(TOAST, "Details")
    page.wait_for(DIALOG, "An allocation of 2 GiB failed 1 s ago (CUDA out of memory): this session may allocate")
    page.click(DIALOG, "Close")
    page.wait_for(DIALOG, "", there=False)


def test_a_notice_offers_to_keep_the_share(page: Page, agent: ScriptedAgent) -> None:
    script = agent.script
    script.quiet, script.step = 1.0, (Tier.RELEASED, time.time() + 300, 0)
    script.answer = (True, "Your GPU share is kept for 4 h.")
    page.wait_for(TOAST, "Your GPU share will be released")
    page.click(TOAST, "Keep 4 h")
    page.wait_for(TOAST, "Your GPU share is kept for 4 h.")
    page.wait_for(TOAST, "will be released", there=False)
    page.wait_for(ITEM, "0.25 GPU · active · kept")
    assert agent.of_kind(Kind.ASK)[-1].fields[1:3] == (AskKind.KEEP, 4 * 3600)

    script.step = (Tier.RELEASED, time.time() + 600, 0)
    script.answer = (False, "The idle culler did not release the share: it is busy.")
    page.wait_for(TOAST, "Your GPU share will be released")
    page.click(TOAST, "Release now")
    page.wait_for(TOAST, "The idle culler did not release the share: it is busy.")


def test_a_message_of_an_admin_is_shown_once(page: Page, agent: ScriptedAgent, browser: Chrome, lab: Jupyter) -> None:
    text = "<b>Node 3</b> will be drained tonight at 22:00. Please save your work before that. " * 4
    agent.script.message = (text, 1_700_000_000.125)
    page.wait_for(TOAST, "Message from an admin: <b>Node 3</b> will be drained")
    page.click(TOAST, "Details")
    page.wait_for(f"{DIALOG} .gpushare-Message", text)
    page.click(DIALOG, "Close")
    page.wait_for(DIALOG, "", there=False)
    browser.refresh()
    page.wait_for(ITEM, "0.25 GPU · active")
    agent.script.message = ("Another one.", 1_700_000_001.0)
    page.wait_for(TOAST, "Message from an admin: Another one.")
    assert not [shown for shown in page.texts(TOAST) if "Node 3" in shown], "that was before the page was loaded again"


def test_messages_are_dismissed_when_they_are_withdrawn(page: Page, agent: ScriptedAgent) -> None:
    agent.script.drain = ("GPU 0 is taken out. Your server will be stopped at 2036-01-01 12:30 UTC.", 1_700_000_003.0)
    page.wait_for(TOAST, "Your server will be stopped at ")
    assert not [shown for shown in page.texts(TOAST) if "UTC" in shown], "in the browser's time zone"
    agent.script.message = ("The fan is replaced.", 1_700_000_004.0)
    page.wait_for(TOAST, "The fan is replaced.")
    assert [shown for shown in page.texts(TOAST) if "will be stopped" in shown], "the other one stays"
    agent.script.drain = None
    page.wait_for(TOAST, "will be stopped", there=False)
    assert [shown for shown in page.texts(TOAST) if "The fan is replaced." in shown]
    agent.script.message = None
    page.wait_for(TOAST, "The fan is replaced.", there=False)


def test_the_dialog_shows_the_terms_and_what_slows_the_work(page: Page, agent: ScriptedAgent, browser: Chrome) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    button = browser.find_element(By.CSS_SELECTOR, ITEM)
    assert "guaranteed while others work" in present(button.get_attribute("title"))
    page.run("arguments[0].focus()", button)
    page.keys(Keys.ENTER)
    page.wait_for(f"{DIALOG} tr", "guaranteed now0.25 GPU")
    page.wait_for(f"{DIALOG} tr", "other sessions1; 1 of 2 sessions on the GPU has work now")
    page.wait_for(f"{DIALOG} figcaption", "now: memory 19 % of the limit")
    # what is shown follows the share while the dialog is open
    agent.script.use = 0.4
    page.wait_for(f"{DIALOG} figcaption", "use 40 %")
    assert page.run("return document.querySelector('.gpushare-Plot-use').getAttribute('d').length") > 0
    columns = page.run(
        "return Array.from(document.querySelectorAll('.gpushare-Fields > :first-child'))"
        ".filter(node => node.offsetParent).map(node => Math.round(node.getBoundingClientRect().left))"
    )
    assert len(columns) > 1
    assert len(set(columns)) == 1, "the fields stand in one column"
    page.run("document.querySelector('.gpushare-Dialog summary').focus()")
    page.keys(Keys.ENTER)
    assert page.run("return document.querySelector('.gpushare-Dialog details').open")
    page.wait_for(f"{DIALOG} li", "1 other session computes on the GPU now.")
    page.wait_for(f"{DIALOG} li", "2.1 GiB of your 3.1 GiB is not on the GPU: it is paged out, or not used yet.")
    unlabelled = page.run(
        "return Array.from(document.querySelectorAll('.gpushare-Dialog input, .gpushare-Dialog button'))"
        ".filter(node => !node.textContent && !node.getAttribute('aria-label')).length"
    )
    assert unlabelled == 0
    page.keys(Keys.ESCAPE)
    page.wait_for(DIALOG, "", there=False)
    assert page.run("return document.activeElement === arguments[0]", button), "the focus is where it was"


def test_the_dialog_keeps_releases_and_stops_by_keyboard(page: Page, agent: ScriptedAgent) -> None:
    from selenium.webdriver.common.keys import Keys

    script = agent.script

    def press(label: str) -> None:
        """Focus a button of the dialog and press it with the keyboard."""
        focus = (
            "for (const button of document.querySelectorAll('.gpushare-Dialog button')) {"
            "  if (button.textContent === arguments[0]) { button.focus(); return document.activeElement === button; }"
            "} return false"
        )
        assert page.run(focus, unbroken(label)), f"{label} cannot get the focus"
        page.keys(Keys.SPACE)

    def actions() -> list[tuple[int, ...]]:
        return [one.fields[1:3] for one in agent.of_kind(Kind.ASK) if not AskKind(one.fields[1]).reads]

    def asked() -> tuple[int, ...]:
        return actions()[-1]

    page.run("document.querySelector(arguments[0]).click()", ITEM)
    page.wait_for(".gpushare-Fields", "2 of 3 keeps left within 24 hours.")
    script.answer = (True, "Your GPU share is kept for 8 h.")
    script.keeps = (True, "1 of 3 keeps left within 24 hours.")
    press("Keep 8 h")
    page.wait_for(".gpushare-Fields", "1 of 3 keeps left within 24 hours.")
    page.wait_for(".gpushare-Answer", "Your GPU share is kept for 8 h.")
    assert asked() == (AskKind.KEEP, 8 * 3600)
    until = clock(script.keep_until, time.time())
    page.wait_for(".gpushare-Kept", f"kept until {until}")
    script.answer = (True, "The keep has ended.")
    press("End the keep")
    page.wait_for(".gpushare-Answer", "The keep has ended.")
    page.wait_for(".gpushare-Kept", "kept", there=False)
    assert asked() == (AskKind.END_KEEP, 0)

    page.run("document.querySelector('.gpushare-Dialog input[type=time]').value = '23:59'")
    press("Keep until")
    page.wait_for(".gpushare-Kept", "kept until 23:59")
    assert 0 < asked()[1] <= 86400

    script.answer = (True, "Your GPU share was released.")
    press("Release now")
    page.wait_for(".gpushare-Answer", "Your GPU share was released.")
    page.wait_for(ITEM, "0.25 GPU · released")
    page.wait_for(".gpushare-Fields", "The share is released already.")
    assert not [text for text in page.texts(TOAST) if "released" in text], "the dialog has said so"
    said = len(actions())
    press("Release now")
    script.tier, script.effective = Tier.ACTIVE, 25
    page.wait_for(".gpushare-Fields", "The share is released already.", there=False)
    assert len(actions()) == said, "there was nothing to release"

    script.answer = (False, "The hub did not stop the server.")
    press("Stop my server")
    assert "variables are lost" in page.texts(".gpushare-Confirm")[0]
    page.keys(Keys.SPACE)  # the focus is on Cancel
    assert asked() == (AskKind.RELEASE, 0)
    press("Stop my server")
    press("Stop it")
    page.wait_for(".gpushare-Answer", "The hub did not stop the server.")
    assert asked() == (AskKind.STOP, 0)

    assert page.run("return document.querySelector('.gpushare-Share').hidden"), "it cannot be changed"
    script.largest_share, script.answer = 75, (True, "You have 0.50 GPU now.")
    page.wait_for(".gpushare-Share:not([hidden])", "Change the share")
    page.wait_for(".gpushare-Share option", "0.10 GPU")
    assert page.texts(".gpushare-Share option") == [
        unbroken(one) for one in ("0.10 GPU", "0.50 GPU", "1 GPU (not free now)")
    ]
    assert agent.of_kind(Kind.ASK)[-1].fields[1:3] == (AskKind.SHARES, 0)
    page.run("document.querySelector('.gpushare-Dialog select').focus()")
    assert page.run("return document.activeElement.value") == "50", "the next larger one is chosen"
    script.largest_share = 40
    page.wait_for(".gpushare-Share option", "0.50 GPU (not free now)")
    assert page.run("return document.activeElement.value") == "", "no larger one is free, so the user chooses"
    press("Change")
    assert asked() == (AskKind.STOP, 0), "nothing is chosen"
    page.run("document.querySelector('.gpushare-Dialog select').focus()")
    script.largest_share = 75
    page.wait_for(".gpushare-Share option", "0.50 GPU (not free now)", there=False)
    assert page.run("return document.activeElement.value") == "50"
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_UP)
    script.shares = (False, "No template that you may use has another share.")
    press("Change")
    page.wait_for(".gpushare-Answer", "You have 0.50 GPU now.")
    assert [one.fields[2] for one in agent.of_kind(Kind.ASK) if one.fields[1] == AskKind.SHARE] == [50]
    page.wait_for(".gpushare-Share", "No template that you may use has another share.")
    assert page.run("return document.querySelector('.gpushare-Share .gpushare-Row').hidden"), "nothing to choose"

    # a whole GPU and a fifth of another
    script.gpus, script.share, script.last, script.shares = [GPU, OTHER_GPU], 100, 20, (True, "[50, 150, 100]")
    page.wait_for(".gpushare-Share option", "1.50 GPU")
    assert page.texts(".gpushare-Share option") == [
        unbroken(text) for text in ("2 × 0.50 GPU", "1.50 GPU", "2 GPUs (not free now)")
    ]
    press("Change")
    agent.wait_for(Kind.ASK, len(agent.of_kind(Kind.ASK)) + 1)
    assert [frame.fields[2] for frame in agent.of_kind(Kind.ASK) if frame.fields[1] == AskKind.SHARE] == [50, 150]
    page.click(DIALOG, "Close")
    assert page.errors() == []


def test_advice_is_shown_once_and_changes_the_share_with_one_click(page: Page, agent: ScriptedAgent) -> None:
    text = "0.10 GPU would have been enough: none of 412 bursts of GPU work would have ended later."
    agent.script.answer = (True, "The share is 0.10 GPU now.")
    agent.script.advice = (True, json.dumps({"units": 10, "text": text}))
    page.reload()
    page.wait_for(TOAST, text)
    page.reload()
    page.wait_for(ITEM, "0.25 GPU · active")
    deadline, asked = time.monotonic() + 20, AskKind.ADVICE
    while sum(frame.fields[1] == asked for frame in agent.of_kind(Kind.ASK)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    assert not [shown for shown in page.texts(TOAST) if text in shown], "it was shown already"
    # another advice
    text = "0.50 GPU would have saved 40 min of waiting within 7 days."
    agent.script.advice = (True, json.dumps({"units": 50, "text": text}))
    page.reload()
    page.wait_for(TOAST, text)
    page.click(TOAST, "Change to 0.50 GPU")
    page.wait_for(TOAST, "The share is 0.10 GPU now.")
    assert agent.of_kind(Kind.ASK)[-1].fields[1:3] == (AskKind.SHARE, 50)
    agent.script.advice = (True, "null")
    page.reload()
    page.wait_for(ITEM, "GPU · active")


def test_a_session_of_another_layer_has_its_terms_and_only_what_the_layer_can_do(
    page: Page, agent: ScriptedAgent
) -> None:
    script = agent.script
    script.layer, script.largest_share = "mps", 75
    page.wait_for(ITEM, "0.25 GPU · NVIDIA MPS · 3.1 of 16 GiB")
    script.layer_trouble = "The MPS daemon of GPU 0 is not running, and GPU work fails: it ended."
    page.wait_for(ITEM, "0.25 GPU · NVIDIA MPS · GPU problem · 3.1 of 16 GiB")
    page.run("document.querySelector(arguments[0]).click()", ITEM)
    page.wait_for(f"{DIALOG} tr", "shared byNVIDIA MPS. Each session is kept within its part")
    page.wait_for(f"{DIALOG} tr", "idle actionsWhen the server is idle, it can only be stopped.")
    page.wait_for(f"{DIALOG} tr", f"GPU problem{script.layer_trouble}")
    page.wait_for(f"{DIALOG} li", script.layer_trouble)
    page.wait_for(".gpushare-Missing", "NVIDIA MPS provides this session's GPU and cannot change its share.")
    shown = page.run(
        "return Array.from(document.querySelectorAll('.gpushare-Dialog button'))"
        ".filter(node => node.offsetParent).map(node => node.textContent)"
    )
    assert [unbroken("Keep 4 h") in shown, "Stop my server" in shown] == [True, True]
    assert not {"Release now", "Change"} & set(shown), "the layer can do neither"
    page.click(DIALOG, "Close")
    page.wait_for(DIALOG, "", there=False)


def test_a_confirmation_takes_the_place_of_a_long_answer(page: Page, agent: ScriptedAgent) -> None:
    script = agent.script
    script.largest_share, script.message = 75, ("A message that is as long as it may be. " * 12, 1_700_000_002.0)
    script.answer = (False, "The idle culler did not do it, for a reason that needs many words to be said. " * 6)
    page.run("document.querySelector(arguments[0]).click()", ITEM)
    page.wait_for(".gpushare-Share option", "0.10 GPU")
    page.click(".gpushare-Dialog", "Keep 8 h")
    page.wait_for(".gpushare-Answer", "many words")
    seen = page.run(
        "const [answer, body] = ['.gpushare-Answer', '.jp-Dialog-body'].map(name =>"
        " document.querySelector(name).getBoundingClientRect()); return answer.bottom - body.bottom"
    )
    assert seen <= 1, "the answer is not below the visible part"
    page.click(".gpushare-Dialog", "Stop my server")
    page.wait_for(".gpushare-Answer", "many words", there=False)
    page.click(".gpushare-Dialog", "Keep 4 h")
    page.wait_for(".gpushare-Answer", "many words")
    assert page.run("return document.querySelector('.gpushare-Confirm').hidden"), "another choice ends it"
    page.click(DIALOG, "Close")
    page.wait_for(DIALOG, "", there=False)


def test_a_server_that_stops_before_it_answers_is_not_said_to_have_failed(page: Page, browser: Chrome) -> None:
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*gpushare/ask*"]})
    try:
        page.run("document.querySelector(arguments[0]).click()", ITEM)
        page.click(".gpushare-Dialog", "Stop my server")
        page.click(".gpushare-Dialog", "Stop it")
        page.wait_for(
            ".gpushare-Answer[data-done=yes]", "The notebook server no longer answers: it has probably stopped."
        )
        page.click(".gpushare-Dialog", "Release now")
        page.wait_for(".gpushare-Answer[data-done=no]", "The notebook server did not answer. Try again.")
    finally:
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    page.click(DIALOG, "Close")


@pytest.mark.slow
def test_notebook_7_has_the_item_and_the_dialog_too(
    page: Page, agent: ScriptedAgent, browser: Chrome, lab: Jupyter
) -> None:
    pytest.importorskip("notebook", reason="needs Notebook 7: the PyPI package notebook")
    browser.get(f"{lab.url}tree?token={TOKEN}")
    page.wait_for(ITEM, "0.25 GPU · active · 3.1 of 16 GiB")
    shown = page.run("const box = document.querySelector(arguments[0]).getBoundingClientRect(); return box", ITEM)
    assert shown["width"] > 100
    assert shown["right"] <= page.run("return window.innerWidth")
    agent.script.step = (Tier.RELEASED, time.time() + 300, 0)
    page.wait_for(TOAST, "Your GPU share will be released")
    page.click(TOAST, "Keep 4 h")
    page.wait_for(ITEM, "kept")
    page.run("document.querySelector(arguments[0]).click()", ITEM)
    page.wait_for(f"{DIALOG} tr", "guaranteed now0.25 GPU")
    assert page.errors() == []

"""Draws the dashboard's pictures for the documentation: the real page in chromium, with reports of simulated GPUs.

``python -m tests.service.dashboard_pictures`` writes docs/images/dashboard*.png. Needs Debian's packages chromium and
chromium-driver.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from selenium.webdriver import Chrome

from gpushare_spawner.model.controls import Exemption, Keep
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import GpuReport, HostMemoryReport
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.service.reports import KnownReport
from tests.service.dashboard_stand_in import DashboardStandIn, chromium, resize, scheme, signed_in
from tests.service.dashboards import GIB, MINUTE, NOW, afternoon, session

IMAGES = Path(__file__).parents[2] / "docs" / "images"
HOUR = 60 * MINUTE


def reports() -> Sequence[KnownReport]:
    """Two machines on an afternoon."""
    first = afternoon()
    gpus = [
        gpu.model_copy(update={"utilisation": use, "temperature_celsius": degrees, "power_watts": watts})
        for gpu, use, degrees, watts in zip(first.gpus, (0.93, 0.04), (71, 38), (241, 32), strict=True)
    ]
    kept: dict[str, dict[str, object]] = {
        "carol": {"keep": Keep(until=NOW + 3 * HOUR, since=NOW - HOUR, by="carol")},
        "erin": {"exemption": Exemption(until=NOW + 9 * HOUR, by="ann", reason="paper deadline"), "bypassing_pids": ()},
    }
    sessions = [
        one.model_copy(update={**kept.get(one.user, {}), "quota": f"group:{'optics' if one.user < 'd' else 'vision'}"})
        for one in first.sessions
    ]
    host = HostMemoryReport(budget_bytes=48 * GIB, needed_bytes=21 * GIB, paged_out_bytes=10 * GIB)
    second = KnownReport(
        node="lab-2",
        published_at=NOW,
        gpus=(
            GpuReport(
                index=0, uuid="GPU-2", model="Simulated GPU 16 GiB", memory_bytes=16 * GIB, memory_used_bytes=9 * GIB,
                simulated=True, utilisation=0.41, temperature_celsius=55, power_watts=120,
            ),
        ),
        sessions=(
            session("fay", template="half", quota="group:vision",
                    share_units=50, effective_units=50, gpus=("GPU-2",), kernels=2,
                    memory_bytes=7 * GIB, resident_bytes=7 * GIB, last_gpu_activity=NOW - MINUTE),
            session("gus", quota="group:vision", gpus=("GPU-2",),
                    last_gpu_activity=NOW - 9 * MINUTE),
        ),
    )  # fmt: skip
    return [
        first.model_copy(
            update={"node": "lab-1", "gpus": tuple(gpus), "sessions": tuple(sessions), "host_memory": host}
        ),
        second,
    ]


WAITING = (
    HubServer("hal", "", ready=False, pending="spawn", started=NOW - 200, profile="half"),
    HubServer("ann", "training", ready=False, pending="spawn", started=NOW - 45, profile="half"),
)
QUOTAS = Quotas.model_validate({"groups": {"optics": {"guarantee": 1}, "vision": {"guarantee": 1.5}}})


def open_page(browser: Chrome, url: str, colours: str, width: int) -> None:
    """Show the whole page, live."""
    scheme(browser, colours)
    resize(browser, width)
    browser.get(url)
    time.sleep(1)
    resize(browser, width, browser.execute_script("return document.documentElement.scrollHeight"))


def main(folder: Path = IMAGES) -> None:
    stand_in = DashboardStandIn(reports())
    stand_in.pending, stand_in.quotas = WAITING, QUOTAS
    browser = chromium()
    with signed_in(stand_in) as served:
        open_page(browser, served.url, "light", 1120)
        browser.save_screenshot(str(folder / "dashboard.png"))
        open_page(browser, served.url + "?user=gus", "dark", 390)
        browser.save_screenshot(str(folder / "dashboard-phone.png"))
        open_page(browser, served.url + "?tier=downgraded", "light", 900)
        resize(browser, 900, 760)
        browser.execute_script("document.querySelector('[data-dialog=session]').click()")
        time.sleep(0.3)
        browser.save_screenshot(str(folder / "dashboard-actions.png"))
    browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)

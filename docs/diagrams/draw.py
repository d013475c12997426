"""Draws the diagrams of the documentation: ``python docs/diagrams/draw.py`` writes the SVG files beside this one.

No tool is needed to draw them and none to show them. The site puts them into the page, where they take its colours; on
GitHub they follow the system's light or dark scheme.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent

# The site's theme has these variables; a file of its own has the second value.
LIGHT = {"ink": "#1f2328", "dim": "#59636e", "paper": "#ffffff", "edge": "#8c959f"}
DARK = {"ink": "#e6edf3", "dim": "#9198a1", "paper": "#14181e", "edge": "#6e7681"}
SITE = {
    "ink": "--pst-color-text-base",
    "dim": "--pst-color-text-muted",
    "paper": "--pst-color-background",
    "edge": "--pst-color-text-muted",
}
LINE = 17
"""Height of a line of text."""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--d-{name}: var({SITE[name]}, {value});" for name, value in colours.items())


STYLE = f"""
.gpushare-diagram {{ {_variables(LIGHT)} font: 13px system-ui, "Segoe UI", Roboto, sans-serif; }}
@media (prefers-color-scheme: dark) {{ .gpushare-diagram {{ {_variables(DARK)} }} }}
.gpushare-diagram text {{ fill: var(--d-ink); }}
.gpushare-diagram .strong {{ font-weight: 600; }}
.gpushare-diagram .dim, .gpushare-diagram .label {{ fill: var(--d-dim); font-size: 12px; }}
/* a label stands on a line or beside one: its surroundings cover the line */
.gpushare-diagram .label {{ paint-order: stroke; stroke: var(--d-paper); stroke-width: 5px; stroke-linejoin: round; }}
.gpushare-diagram rect {{ fill: none; stroke: var(--d-edge); stroke-width: 1; }}
.gpushare-diagram .ours {{ fill: #4c8dd6; fill-opacity: .22; stroke: #4c8dd6; }}
.gpushare-diagram .pure {{ fill: #2da067; fill-opacity: .20; stroke: #2da067; }}
.gpushare-diagram .warm {{ fill: #d98324; fill-opacity: .24; stroke: #d98324; }}
.gpushare-diagram .group {{ stroke-dasharray: 4 4; }}
.gpushare-diagram .arrow {{ fill: none; stroke: var(--d-ink); stroke-width: 1.3; }}
.gpushare-diagram .thin {{ fill: none; stroke: var(--d-edge); stroke-width: 1; stroke-dasharray: 3 3; }}
.gpushare-diagram .tip {{ fill: var(--d-ink); stroke: none; }}
"""


class Diagram:
    """One picture: boxes, arrows and text on a plane in pixels. `name` is its file name without the ending."""

    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        self.name, self.width, self.height, self.title = name, width, height, title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "", dim: str = "") -> None:
        """A rectangle with lines of text in its middle; `dim` follows them in small."""
        self._shapes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>')
        lines = [(line, "strong") for line in text.splitlines()] + [(line, "dim") for line in dim.splitlines()]
        top = y + h / 2 - (len(lines) - 1) * LINE / 2 + 4.5
        for number, (line, look) in enumerate(lines):
            self.text(x + w / 2, top + number * LINE, line, look)

    def group(self, x: float, y: float, w: float, h: float, text: str) -> None:
        """A dashed frame with its name in the upper left corner."""
        self._shapes.append(f'<rect class="group" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>')
        self.text(x + 10, y + 18, text, "dim", "start")

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "middle") -> None:
        """Lines of text, the first with its baseline at y."""
        for number, line in enumerate(text.splitlines()):
            at = f'x="{x:g}" y="{y + number * LINE:g}" text-anchor="{anchor}"'
            self._shapes.append(f'<text class="{look}" {at}>{escape(line)}</text>')

    def line(self, *points: tuple[float, float], look: str = "thin") -> None:
        """A line through the points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline class="{look}" points="{path}"/>')

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        """An arrow through the points, with a tip at the last one; `both`: also at the first."""
        self.line(*points, look="arrow")
        self._tip(points[-2], points[-1])
        if both:
            self._tip(points[1], points[0])

    def _tip(self, before: tuple[float, float], end: tuple[float, float]) -> None:
        dx, dy = end[0] - before[0], end[1] - before[1]
        length = (dx * dx + dy * dy) ** 0.5
        ux, uy = dx / length, dy / length
        back = (end[0] - 8 * ux, end[1] - 8 * uy)
        corners = [end, (back[0] - 4 * uy, back[1] + 4 * ux), (back[0] + 4 * uy, back[1] - 4 * ux)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._shapes.append(f'<polygon class="tip" points="{path}"/>')

    def svg(self) -> str:
        """The file's text."""
        shapes = "\n".join(self._shapes)
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" class="gpushare-diagram" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img" '
            f'aria-labelledby="{self.name}-title">\n'
            f'<title id="{self.name}-title">{escape(self.title)}</title>\n<style>{STYLE}</style>\n{shapes}\n</svg>\n'
        )


def sequence(d: Diagram, lanes: Sequence[tuple[float, str]], steps: Sequence[tuple[int, int, str]], top: float) -> None:
    """Lanes from the top down, and one arrow below the other from lane to lane; the same lane twice: a note."""
    step = 36
    bottom = top + 48 + len(steps) * step
    for x, name in lanes:
        d.box(x - 62, top, 124, 30, name, "ours")
        d.line((x, top + 30), (x, bottom))
    y = top + 62.0
    for start, end, text in steps:
        if start == end:
            d.text(lanes[start][0], y + 4, text, "label")
        else:
            a, b = lanes[start][0], lanes[end][0]
            d.arrow((a, y), (b, y))
            d.text((a + b) / 2, y - 6, text, "label")
        y += step


def one_machine() -> Diagram:
    """The parts on one machine."""
    d = Diagram("one-machine", 860, 400, "The parts on one machine, and who talks to whom")
    d.box(20, 60, 110, 50, "browser")
    d.group(170, 20, 300, 130, "hub")
    d.box(190, 60, 110, 60, "hub", "", "users, proxy")
    d.box(340, 60, 110, 60, "spawner", "ours", "form, placement")
    d.box(340, 290, 110, 70, "service", "ours", "idle culler,\ndashboard")
    d.box(340, 180, 110, 60, "agent", "ours", "sessions, arbiter")
    d.group(540, 20, 300, 250, "one for each user")
    d.box(560, 60, 260, 50, "notebook server", "", "with the share's environment")
    d.box(560, 140, 260, 50, "kernels and programs")
    d.box(560, 205, 260, 45, "libgpushare.so", "ours", "in each CUDA process")
    d.box(560, 310, 120, 50, "CUDA driver")
    d.box(720, 310, 100, 50, "GPU", "warm")
    d.arrow((130, 85), (190, 85))
    d.arrow((300, 90), (340, 90))
    d.arrow((450, 85), (560, 85))
    d.text(502, 76, "starts", "dim")
    d.arrow((395, 120), (395, 180))
    d.text(402, 156, "opens, closes sessions", "label", "start")
    d.arrow((395, 290), (395, 240))
    d.text(388, 262, "report,", "dim", "end")
    d.text(388, 278, "idle actions", "dim", "end")
    d.arrow((340, 325), (245, 325), (245, 120))
    d.text(238, 262, "activity, stop", "dim", "end")
    d.arrow((560, 222), (450, 222), both=True)
    d.text(505, 198, "session socket:", "label")
    d.text(505, 214, "leases, memory", "label")
    d.arrow((620, 250), (620, 310))
    d.arrow((680, 335), (720, 335))
    d.arrow((450, 234), (490, 234), (490, 380), (770, 380), (770, 360))
    d.text(640, 394, "NVML: memory, utilisation, health", "dim")
    return d


def cluster() -> Diagram:
    """The parts on Kubernetes."""
    d = Diagram("cluster", 860, 350, "The parts on Kubernetes: hub and agents meet in the API server")
    d.group(20, 20, 190, 310, "hub pod")
    d.box(40, 60, 150, 70, "spawner", "ours", "creates pods\nwith a share")
    d.box(40, 200, 150, 90, "service", "ours", "patches tiers\nand notices;\ndashboard")
    d.group(300, 20, 220, 310, "API server")
    d.box(320, 60, 180, 80, "pods", "", "annotations: template,\nshare, GPU, tier, notice")
    d.box(320, 200, 180, 80, "ConfigMaps", "", "one report for each node:\nGPUs, sessions, health")
    d.group(600, 20, 240, 310, "GPU node")
    d.box(620, 55, 200, 56, "agent (DaemonSet)", "ours", "device plugin, arbiter")
    d.box(620, 150, 200, 46, "kubelet", "", "mounts socket and library")
    d.box(620, 230, 200, 75, "notebook pods", "", "libgpushare.so in each\nCUDA process")
    d.arrow((190, 95), (320, 95))
    d.text(252, 88, "create", "label")
    d.arrow((190, 225), (270, 225), (270, 125), (320, 125))
    d.text(270, 168, "patch", "label")
    d.arrow((320, 258), (190, 258))
    d.text(255, 251, "watch", "label")
    d.arrow((620, 80), (500, 80), both=True)
    d.text(560, 72, "watch, restore", "label")
    d.arrow((620, 100), (560, 100), (560, 240), (500, 240))
    d.text(560, 180, "publish", "label")
    d.arrow((720, 111), (720, 150), both=True)
    d.arrow((720, 196), (720, 230))
    return d


def spawn() -> Diagram:
    """A spawn on one machine."""
    d = Diagram("spawn", 780, 440, "A spawn on one machine, from the form to the first lease")
    sequence(
        d,
        [(80, "browser"), (290, "spawner"), (500, "agent"), (695, "server")],
        [
            (0, 1, "options: template"),
            (1, 2, "report?"),
            (2, 1, "GPUs and sessions"),
            (1, 1, "chooses a GPU or waits in the queue"),
            (1, 2, "open: reserves the share"),
            (2, 1, "environment of the session"),
            (1, 3, "starts the process"),
            (1, 2, "confirm: its pid"),
            (3, 2, "first GPU work: REQUEST"),
            (2, 3, "GRANT: a lease"),
        ],
        20,
    )
    return d


def tiers() -> Diagram:
    """The tiers of an idle session over time."""
    d = Diagram("tiers", 860, 300, "The tiers of a session without GPU work, and what GPU work restores")
    steps = [
        (60, 250, 60, "active", "0.25 GPU", "pure"),
        (250, 470, 120, "downgraded", "0.10 GPU, the rest is lent", "ours"),
        (470, 690, 165, "released", "no share, data kept, kernels live", "warm"),
        (690, 820, 200, "stopped", "server ended", ""),
    ]
    for left, right, top, name, text, kind in steps:
        d.box(left, top, right - left - 6, 235 - top, "", kind)
        d.text((left + right) / 2 - 3, top + 20, name, "strong")
        if name != "stopped":
            d.text((left + right) / 2 - 3, top + 38, text, "dim")
    d.line((60, 240), (820, 240), look="arrow")
    for x, text in ((60, "last GPU work"), (247, "5 min"), (467, "10 min"), (687, "3 days")):
        d.line((x, 236), (x, 246), look="arrow")
        d.text(x, 262, text, "dim", "start" if x == 60 else "middle")
    for x in (205, 425, 645):
        d.line((x, 226), (x, 246), look="arrow")
        d.text(x, 280, "notice", "dim")
    d.arrow((580, 160), (580, 30), (160, 30), (160, 54))
    d.line((360, 30), (360, 116), look="arrow")
    d.text(370, 22, "GPU work runs at once and restores the full share", "", "middle")
    return d


def nested_sets() -> Diagram:
    """Nested sets in one period."""
    d = Diagram("nested-sets", 760, 250, "Weights 50, 10 and 10 on a saturated GPU in one period of 200 ms")
    left, scale = 130, 2.9
    for row, (name, end) in enumerate((("weight 50", 200), ("weight 10", 86), ("weight 10", 86))):
        y = 30 + row * 50
        d.text(left - 12, y + 22, name, "strong", "end")
        d.box(left, y, 86 * scale, 34, "29 ms of GPU time", "ours")
        if end > 86:
            d.box(left + 86 * scale, y, 114 * scale, 34, "114 ms of GPU time", "pure")
        else:
            d.box(left + 86 * scale, y, 114 * scale, 34, "", "group")
            d.text(left + 143 * scale, y + 22, "held back, memory stays on the GPU", "dim")
    d.line((left, 190), (left + 200 * scale, 190), look="arrow")
    for at in (0, 86, 200):
        d.line((left + at * scale, 185), (left + at * scale, 195), look="arrow")
        d.text(left + at * scale, 212, f"{at} ms", "dim")
    d.text(left + 43 * scale, 238, "all three share the GPU evenly", "dim")
    d.text(left + 143 * scale, 238, "one session has the GPU: 143 of 200 ms in all", "dim")
    return d


def hand_off() -> Diagram:
    """A hand-off between two sessions that do not fit together."""
    d = Diagram("hand-off", 820, 260, "A hand-off between two sessions whose memory does not fit together")
    d.text(20, 62, "session A", "strong", "start")
    d.text(20, 152, "session B", "strong", "start")
    d.box(110, 35, 230, 44, "bursts under a lease", "ours")
    d.box(340, 35, 70, 44, "", "group", "drains")
    d.box(410, 35, 170, 44, "pages out", "warm")
    d.text(690, 62, "waits at the gate", "dim")
    d.text(225, 152, "waits at the gate", "dim")
    d.box(420, 125, 170, 44, "pages in", "warm")
    d.box(590, 125, 210, 44, "bursts under a lease", "ours")
    d.line((340, 20), (340, 200))
    d.line((410, 20), (410, 200))
    d.line((590, 20), (590, 200))
    d.text(340, 216, "REVOKE", "dim")
    d.text(410, 232, "RELEASE, then GRANT", "dim")
    d.text(590, 216, "gate opens", "dim")
    d.text(500, 106, "both directions of the bus at once", "dim")
    return d


def arbiter() -> Diagram:
    """What the arbiter does with the sessions that have work."""
    d = Diagram("arbiter", 800, 300, "What the arbiter does with the sessions that have work on a GPU")
    d.box(20, 40, 150, 50, "sessions with work")
    d.box(240, 30, 190, 70, "Does their memory fit", "", "into the GPU together?")
    d.box(240, 150, 190, 70, "Is the GPU saturated?", "", "busy for 92 % of the time")
    d.box(520, 30, 260, 70, "time slices", "warm", "groups that fill the memory,\none after the other")
    d.box(520, 150, 260, 70, "nested sets", "ours", "sessions that have had their part\nare held back for milliseconds")
    d.box(240, 250, 190, 40, "all run, none waits", "pure")
    d.text(450, 275, "most GPUs, most of the time", "dim", "start")
    d.arrow((170, 65), (240, 65))
    d.arrow((430, 65), (520, 65))
    d.text(475, 58, "no", "label")
    d.arrow((335, 100), (335, 150))
    d.text(352, 130, "yes", "label")
    d.arrow((430, 185), (520, 185))
    d.text(475, 178, "yes", "label")
    d.arrow((335, 220), (335, 250))
    d.text(352, 239, "no", "label")
    return d


def launch() -> Diagram:
    """A kernel launch under libgpushare.so."""
    d = Diagram("launch", 820, 300, "A kernel launch under libgpushare.so")
    d.box(20, 40, 130, 50, "program", "", "cuLaunchKernel")
    d.box(220, 30, 170, 70, "libgpushare.so", "ours", "wrapper")
    d.box(480, 40, 150, 50, "CUDA driver")
    d.box(700, 40, 100, 50, "GPU", "warm")
    d.box(220, 170, 170, 60, "background thread", "ours", "one for each process")
    d.box(480, 170, 150, 60, "agent", "ours", "arbiter of the GPU")
    d.arrow((150, 65), (220, 65))
    d.arrow((390, 65), (480, 65))
    d.text(435, 48, "gate open:", "label")
    d.text(435, 85, "5.6 ns more", "label")
    d.arrow((630, 65), (700, 65))
    d.arrow((265, 100), (265, 170))
    d.text(258, 130, "gate closed:", "label", "end")
    d.text(258, 146, "the launch waits", "label", "end")
    d.arrow((345, 170), (345, 100))
    d.text(352, 139, "opens the gate", "label", "start")
    d.arrow((390, 188), (480, 188))
    d.text(435, 180, "REQUEST", "label")
    d.arrow((480, 214), (390, 214))
    d.text(435, 232, "GRANT", "label")
    d.text(305, 262, "device quiet: the lease goes back", "dim")
    d.text(305, 280, "no agent: the gate is open", "dim")
    return d


def layers() -> Diagram:
    """Which package imports which, as import-linter's contract says."""
    contracts = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(one for one in contracts if one["name"] == "imports go down only")
    rows = [[name.strip().rpartition(".")[2] for name in row.split("|")] for row in contract["layers"]]
    pure = next(one for one in contracts if one["name"].startswith("the pure packages"))["source_modules"]
    d = Diagram("layers", 780, 28 + 50 * len(rows), "Packages of gpushare_spawner: imports go down only")
    for number, row in enumerate(rows):
        wide = (740 - 8 * (len(row) - 1)) / len(row)
        for place, name in enumerate(row):
            kind = "pure" if f"gpushare_spawner.{name}" in pure else "ours"
            d.box(round(20 + place * (wide + 8)), 20 + 50 * number, round(wide), 36, name, kind)
    return d


DIAGRAMS: tuple[Callable[[], Diagram], ...] = (
    one_machine,
    cluster,
    spawn,
    tiers,
    arbiter,
    nested_sets,
    hand_off,
    launch,
    layers,
)


def main() -> int:
    """Write all of them."""
    for draw in DIAGRAMS:
        diagram = draw()
        (HERE / f"{diagram.name}.svg").write_text(diagram.svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())

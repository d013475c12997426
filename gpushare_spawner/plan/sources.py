"""Reads what an admin has about servers and GPU work: hub's log and database, our history, CSV, Prometheus.

The kind of a file is recognised from its contents. A wrong row is named with its file and line, and the rest is used;
missing data is named in `Trace.notes`. `answers` makes plans of servers from a `Trace`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import IO, Any, cast

from gpushare_spawner.plan.servers import GIB, RecordedServer, Trace, Work
from gpushare_spawner.wording.amounts import plural, reason

HOUR = 3600.0
MILLISECONDS_FROM = 1e11
"""Numbers from here on are milliseconds since the epoch: as seconds they are the year 5138."""
MOST_POINTS = 10_000
"""Points of one answer of Prometheus, which allows 11,000."""
STEP = 60.0
"""Seconds between two points: the usual interval of scrapes."""
LEAST_PIECE = 16.0
"""Seconds of the shortest GPU work that is made of an hour's sum: it counts as use in any template."""
HEAD_LINES = 5000
"""Lines of a text file that are read to recognise its kind."""


class Reading:
    """One reading of all sources. `zone`: of times without a time zone; None: this machine's."""

    def __init__(self, zone: tzinfo | None = None, shares: Mapping[str, float] | None = None) -> None:
        self.trace = Trace()
        self._zone = zone
        self._shares = shares or {}
        """GPUs of each template's share."""
        self._idle_after: dict[str, float] = {}
        self._hub_events: list[tuple[float, str, str, str, float]] = []
        self._actions: list[tuple[float, str, str, str]] = []

    def read(self, source: str) -> None:
        """Read a file, or a database by its SQLAlchemy URL. Problems are recorded in the trace."""
        if "://" in source:
            self._database(source, source.partition("://")[0])
            return
        path = Path(source)
        try:
            with path.open("rb") as file:
                head = file.read(16)
            if head.startswith(b"SQLite format 3"):
                quoted = urllib.parse.quote(str(path.absolute()))
                self._database(f"sqlite:///file:{quoted}?mode=ro&uri=true", path.name)
            else:
                self._text(path, head.startswith(b"\x1f\x8b"))
        except (OSError, EOFError, UnicodeError, zlib.error) as error:
            self.trace.problem(source, f"cannot be read: {reason(error)}")

    def finish(self) -> Trace:
        """Join the events of all log files, give GPU work to servers, and return the trace."""
        trace = self.trace
        self._join_hub_events()
        self._join_actions()
        trace.servers = _without_doubles(trace.servers)
        instants = chain(
            (server.start for server in trace.servers),
            (server.end for server in trace.servers if server.end is not None),
            (work.end for works in trace.work.values() for work in works),
        )
        trace.now = max(chain(instants, [trace.now]))
        for server in trace.servers:
            server.group = server.group or trace.groups.get(server.user, "")
            if server.group:
                trace.groups.setdefault(server.user, server.group)
        _give_work(trace)
        if trace.naive_times:
            zone = self._zone or "this machine's time zone"
            trace.notes.append(f"{plural(trace.naive_times, 'time')} had no time zone: read in {zone} (--time-zone)")
        trace.servers.sort(key=lambda server: server.start)
        return trace

    def instant(self, text: str) -> float:
        """Return an ISO time or a number of seconds (or milliseconds) as seconds since the epoch. Raises ValueError."""
        text = text.strip()
        try:
            number = float(text)
        except ValueError:
            return self._date(text)
        if not 0 <= number < 1e15:
            raise ValueError(f"{text} is no time")
        return number / 1000 if number >= MILLISECONDS_FROM else number

    def _date(self, text: str) -> float:
        try:
            date = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.replace(",", ".")))
            if is_naive := date.tzinfo is None:
                date = date.replace(tzinfo=self._zone) if self._zone is not None else date.astimezone()
        except (ValueError, OverflowError):
            raise ValueError(f"{text!r} is no ISO time and no number of seconds") from None
        self.trace.naive_times += is_naive
        if (seconds := date.timestamp()) < 0:
            raise ValueError(f"{text} is before 1970")
        return seconds

    # -- text files --------------------------------------------------------------------------------------------------

    def _text(self, path: Path, is_packed: bool) -> None:
        with (
            path.open("rb") as raw,
            gzip.open(raw) if is_packed else raw as file,
            io.TextIOWrapper(cast("IO[bytes]", file), "utf-8-sig", errors="replace", newline="") as lines,
        ):
            head: list[str] = []
            for line in lines:
                head.append(line)
                if len(head) == 1 and _columns(line) is not None:
                    self._csv(path.name, line, lines)
                    return
                if _HUB_LINE.search(line) or _ACTION_LINE.search(line):
                    self._log(path.name, chain(head, lines))
                    return
                if len(head) == HEAD_LINES:
                    break
        if any(line.strip() for line in head):
            self.trace.problem(
                path.name,
                "is no CSV with the columns user, start and end, no log of JupyterHub and no database; it is ignored",
            )
        else:
            self.trace.problem(path.name, "is empty")

    def _csv(self, name: str, header: str, lines: Iterable[str]) -> None:
        columns, delimiter = _columns(header) or ([], ",")
        is_servers = bool({"server", "gpus", "memory_gib", "template"} & set(columns))
        rows = csv.reader(lines, delimiter=delimiter)
        try:
            for cells in rows:
                if not any(cell.strip() for cell in cells):
                    continue
                row = dict(zip(columns, (cell.strip() for cell in cells), strict=False))
                try:
                    self._server_row(row) if is_servers else self._work_row(row)
                except ValueError as error:
                    self.trace.problem(f"{name}:{1 + rows.line_num}", str(error))
        except csv.Error as error:
            self.trace.problem(f"{name}:{1 + rows.line_num}", f"{error}; the rows from here on are not read")

    def _server_row(self, row: Mapping[str, str]) -> None:
        user, start, end = self._span(row)
        gpus = _number(row, "gpus")
        memory = _number(row, "memory_gib")
        used, group = None if memory is None else int(memory * GIB), _first_of(row.get("group", ""))
        template = row.get("template", "")
        self.trace.servers.append(RecordedServer(user, row.get("server", ""), start, end, gpus, used, group, template))

    def _work_row(self, row: Mapping[str, str]) -> None:
        user, start, end = self._span(row)
        if end is None:
            raise ValueError("GPU work needs an end")
        demand = _number(row, "utilization")
        if demand is not None and demand > 1:
            demand /= 100
        self.trace.has_work = True
        if end > start:
            self.trace.work[user].append(Work(start, end, 1.0 if demand is None else min(1.0, demand)))
        if group := _first_of(row.get("group", "")):
            self.trace.groups[user] = group

    def _span(self, row: Mapping[str, str]) -> tuple[str, float, float | None]:
        if not row.get("user"):
            raise ValueError("the user is missing")
        if not row.get("start"):
            raise ValueError("the start is missing")
        start = self.instant(row["start"])
        end = self.instant(row["end"]) if row.get("end") else None
        if end is not None and end < start:
            raise ValueError(f"the end ({row['end']}) is before the start ({row['start']})")
        return row["user"], start, end

    def _log(self, name: str, lines: Iterable[str]) -> None:
        """Read a log of JupyterHub or of our service; lines of other programs in it are ignored."""
        for number, line in enumerate(lines, start=1):
            stamp = _STAMP.search(line)
            if stamp is None:
                continue
            try:
                event = _hub_event(line)
                if event is not None:
                    self._hub_events.append((self.instant(stamp[1]), *event))
                    continue
                action = _ACTION_LINE.search(line)
                if action is not None:
                    pairs = dict(_pairs(line[action.start() :]))
                    if pairs.get("user") and pairs.get("dry_run") != "true":
                        instant, server = self.instant(stamp[1]), pairs.get("server", "")
                        self._actions.append((instant, pairs["action"], pairs["user"], server))
                naive = self.trace.naive_times
                self.trace.now = max(self.trace.now, self.instant(stamp[1]))
                self.trace.naive_times = naive
            except ValueError as error:
                self.trace.problem(f"{name}:{number}", str(error))

    def _join_hub_events(self) -> None:
        """Make servers of the starts and stops in all log files."""
        if not self._hub_events:
            return
        self._hub_events.sort()
        begins = self._hub_events[0][0]
        running: dict[tuple[str, str], RecordedServer] = {}
        for at, kind, user, server, seconds in self._hub_events:
            key = (user, server)
            if kind == "start" and key not in running:
                running[key] = RecordedServer(user, server, at - seconds, None, wait=seconds, source="log")
                self.trace.servers.append(running[key])
            elif kind == "stop":
                started = running.pop(key, None)
                if started is None:
                    self.trace.servers.append(RecordedServer(user, server, begins, at, source="log"))
                else:
                    started.end = at
            elif kind == "started" and key in running:
                # the line with the seconds of the start comes after the line of the proxy
                running[key].wait = max(running[key].wait, seconds)
                running[key].start = min(running[key].start, at - seconds)
        self.trace.now = max(self.trace.now, self._hub_events[-1][0])
        if not self.trace.has_work:
            self.trace.notes.append(
                "JupyterHub's log does not say which servers had a GPU: each counts as a server with one GPU"
            )

    # -- databases ---------------------------------------------------------------------------------------------------

    def _database(self, url: str, name: str) -> None:
        from sqlalchemy import create_engine, inspect
        from sqlalchemy.exc import SQLAlchemyError

        try:
            engine = create_engine(url)
            tables = set(inspect(engine).get_table_names())
            with engine.connect() as connection:
                if {"users", "spawners"} <= tables:
                    self._hub_database(connection, tables)
                if {"gpushare_use", "gpushare_wait"} <= tables:
                    self._history(connection)
                if not {"spawners", "gpushare_use"} & tables:
                    self.trace.problem(name, "is a database of neither JupyterHub nor gpushare service")
        except (SQLAlchemyError, ImportError, ValueError) as error:
            self.trace.problem(name, f"cannot be read: {reason(getattr(error, 'orig', None) or error)}")

    def _hub_database(self, connection: Any, tables: set[str]) -> None:
        """Read users' groups and the servers that run now. The database has no history."""
        from sqlalchemy import text

        if {"groups", "user_group_map"} <= tables:
            for user, group in connection.execute(
                text(
                    "SELECT users.name, groups.name FROM users JOIN user_group_map ON user_group_map.user_id = users.id"
                    " JOIN groups ON groups.id = user_group_map.group_id ORDER BY groups.name DESC"
                )
            ):
                self.trace.groups[user] = group
        count = 0
        for user, server, started, last, options in connection.execute(
            text(
                "SELECT users.name, spawners.name, spawners.started, spawners.last_activity, spawners.user_options FROM"
                " spawners JOIN users ON users.id = spawners.user_id WHERE spawners.server_id IS NOT NULL"
                " AND spawners.started IS NOT NULL"
            )
        ):
            count += 1
            start, last = _utc(started), _utc(last) if last else 0.0
            self.trace.now = max(self.trace.now, last, start)
            self.trace.servers.append(
                RecordedServer(user, server or "", start, None, template=_profile(options), source="database")
            )
        self.trace.notes.append(
            f"JupyterHub's database only has the servers that run now ({count}), and users' groups: add the hub's log "
            "for the servers before"
        )

    def _history(self, connection: Any) -> None:
        """Read the history of `gpushare service`: waits, GPU time by hour, idle actions."""
        from sqlalchemy import select

        from gpushare_spawner.service.history.store import ACTION, SUBJECT, USE, WAIT, WaitOutcome

        hours: dict[tuple[str, str], dict[float, _HourOfUse]] = defaultdict(dict)
        for row in connection.execute(select(USE, SUBJECT).join_from(USE, SUBJECT)):
            if not row.user:
                continue
            key = row.user, row.server
            used = hours[key].setdefault(float(row.start), _HourOfUse(float(row.length), row.template, row.group))
            used.reserved += row.reserved
            used.worked = max(used.worked, row.used)
        starts: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for row in connection.execute(select(WAIT).where(WAIT.c.outcome == WaitOutcome.STARTED)):
            starts[row.user, row.server].append((row.began_at + row.seconds, row.seconds))
        for row in connection.execute(select(ACTION)):
            if row.user and not row.dry_run:
                self._actions.append((row.at, row.action, row.user, row.server))
        shares = _shares_of(hours.values()) | dict(self._shares)
        for (user, server), used_hours in hours.items():
            opened = sorted(starts.get((user, server), []))
            for recorded in _servers_of(user, server, used_hours, opened, shares):
                recorded.source = "history"
                self.trace.servers.append(recorded)
                self.trace.groups.setdefault(user, recorded.group)
        self.trace.has_work = self.trace.has_work or bool(hours)
        self.trace.on_shares = self.trace.on_shares or bool(hours)
        if hours:
            self.trace.notes.append(
                "The history says when sessions worked, not how much of the GPU they used: as much as their shares is "
                "assumed"
            )

    def idle_times(self, after: Mapping[str, float]) -> None:
        """Set each template's first idle time in seconds, to find out since when a session was idle at an action."""
        self._idle_after.update(after)

    def _join_actions(self) -> None:
        """Place the GPU work of the history between the idle actions: a session worked before none of them."""
        by_server: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
        for at, action, user, server in sorted(self._actions):
            by_server[user, server].append((at, action))
        for recorded in self.trace.servers:
            if recorded.work is None or recorded.source != "history":
                continue
            end = recorded.end if recorded.end is not None else self.trace.now
            first = self._idle_after.get(recorded.template, 300.0)
            here = [
                (at, action)
                for at, action in by_server.get((recorded.user, recorded.server), ())
                if recorded.start <= at <= end
            ]
            quiet = [*_quiet_times(here, recorded.start + recorded.wait, end, first, recorded.work)]
            recorded.work = [*_placed(recorded.work, quiet, first, min(1.0, recorded.gpus or 1.0))]

    # -- Prometheus --------------------------------------------------------------------------------------------------

    def prometheus(self, url: str, step: float = STEP, fetch: Callable[[str], bytes] | None = None) -> None:
        """Read GPU utilisation and memory by pod (DCGM's metrics) over the time of the servers that were read.

        Pods are those of KubeSpawner: `jupyter-` and the user's name. Without other servers, the time in which a pod
        has a GPU is a server.
        """
        self._join_hub_events()
        self._hub_events.clear()
        trace = self.trace
        starts = [server.start for server in trace.servers]
        ends = [server.end for server in trace.servers if server.end is not None]
        until = max([*starts, *ends, trace.now], default=0.0)
        if not until:
            trace.problem(url, "give a source of servers too, so that the time to ask for is known")
            return
        queries = {"utilisation": "DCGM_FI_DEV_GPU_UTIL", "memory": "DCGM_FI_DEV_FB_USED"}
        answers: dict[str, dict[str, list[tuple[float, float]]]] = {}
        try:
            for key, metric in queries.items():
                query = f'{metric}{{pod=~"jupyter-.*"}} or {metric}{{exported_pod=~"jupyter-.*"}}'
                answers[key] = _series(url, query, min(starts, default=until), until, step, fetch or _fetch)
        except (OSError, ValueError, KeyError) as error:
            trace.problem(url, f"Prometheus did not answer as expected: {reason(error)}")
            return
        self._use_series(answers["utilisation"], answers["memory"], step)

    def _use_series(
        self,
        utilisation: Mapping[str, list[tuple[float, float]]],
        memory: Mapping[str, list[tuple[float, float]]],
        step: float,
    ) -> None:
        trace = self.trace
        pods: dict[str, list[RecordedServer]] = defaultdict(list)
        for server in trace.servers:
            for name in _pod_names(server.user, server.server):
                pods[name].append(server)
        unmatched = 0
        for pod, points in utilisation.items():
            servers = pods.get(pod) or pods.get(re.sub(r"---[0-9a-f]{8}$", "", pod))
            if not servers:
                unmatched += 1
                continue
            trace.has_work = True
            used = dict(memory.get(pod, ()))
            for server in servers:
                end = server.end if server.end is not None else trace.now
                inside = points[bisect_left(points, (server.start,)) : bisect_right(points, (end, math.inf))]
                server.work = _work_of(inside, step)
                most = max((used[at] for at, _ in inside if at in used), default=None)
                if server.memory is None and most is not None:
                    server.memory = int(most * 2**20)
        if unmatched:
            trace.notes.append(f"Prometheus has {plural(unmatched, 'pod')} of no server that was read: ignored")


# -- lines and cells -------------------------------------------------------------------------------------------------

_ALIASES = {
    "username": "user", "server_name": "server", "started": "start", "begin": "start", "ended": "end", "stop": "end",
    "stopped": "end", "gpu": "gpus", "gpu_memory_gib": "memory_gib", "groups": "group", "department": "group",
    "profile": "template", "utilisation": "utilization", "gpu_util": "utilization", "demand": "utilization",
}  # fmt: skip


def _columns(header: str) -> tuple[list[str], str] | None:
    """Return the columns of a CSV file and its delimiter; None if this is no header of ours."""
    for delimiter in ",;\t":
        cells = header.split(delimiter)
        names = [re.sub(r"[\s-]+", "_", cell.strip().strip('"').strip().lower()) for cell in cells]
        names = [_ALIASES.get(name, name) for name in names]
        if {"user", "start"} <= set(names):
            return names, delimiter
    return None


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column, "")
    if not text:
        return None
    try:
        value = float(text.rstrip("%").replace(",", "."))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise ValueError(f"{column} is {text!r}; write a number from 0")
    return value


def _first_of(groups: str) -> str:
    return min(filter(None, (group.strip() for group in re.split(r"[;|]", groups))), default="")


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)")
_HUB_LINE = re.compile(
    r"User (?P<started>.+?) took (?P<seconds>[\d.]+) seconds to start"
    r"|Adding user (?P<added>.+) to proxy (?P<spec>\S+) =>"
    r"|Removing user (?P<removed>.+) from proxy \((?P<route>[^)]*)\)"
)
"""Lines of jupyterhub/handlers/base.py and jupyterhub/proxy.py, the same since JupyterHub 1.0."""
_ACTION_LINE = re.compile(r"\baction=[\w-]+ .*?\buser=")
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')


def _hub_event(line: str) -> tuple[str, str, str, float] | None:
    """Return the kind of a line of the hub's log, its user and server, and the seconds of a start; None: no event."""
    match = _HUB_LINE.search(line)
    if match is None:
        return None
    if match["seconds"] is not None:
        user, _, server = match["started"].partition(":")
        return "started", user, server, float(match["seconds"])
    if match["added"] is not None:
        return "start", match["added"], _server_of(match["spec"]), 0.0
    return "stop", match["removed"], _server_of(match["route"]), 0.0


def _server_of(route: str) -> str:
    """Return the server's name in /user/NAME/SERVER/ or host/user/NAME/; empty: the default server."""
    parts = [urllib.parse.unquote(part) for part in route.partition("/user/")[2].split("/") if part]
    return parts[1] if len(parts) > 1 else ""


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _PAIR.findall(text):
        yield name, json.loads(value) if value.startswith('"') else value


def _utc(value: Any) -> float:
    """Return an instant of JupyterHub's database, which is in UTC."""
    date = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()


def _profile(options: Any) -> str:
    try:
        options = json.loads(options) if isinstance(options, str) else options
    except ValueError:
        return ""
    return str(options.get("profile") or "") if isinstance(options, dict) else ""


# -- our history -----------------------------------------------------------------------------------------------------


@dataclass
class _HourOfUse:
    length: float
    template: str
    group: str
    reserved: float = 0.0
    worked: float = 0.0


def _shares_of(uses: Iterable[Mapping[float, _HourOfUse]]) -> dict[str, float]:
    """Return each template's share in GPUs: what a server reserved in an hour in which it ran throughout."""
    shares: dict[str, float] = {}
    for hours in uses:
        for used in hours.values():
            shares[used.template] = max(shares.get(used.template, 0.0), used.reserved / used.length)
    return shares


def _servers_of(
    user: str,
    server: str,
    hours: Mapping[float, _HourOfUse],
    opened: Sequence[tuple[float, float]],
    shares: Mapping[str, float],
) -> Iterator[RecordedServer]:
    """Yield the servers of one name, from the seconds for which a share was open in each hour.

    `opened`: (instant, seconds of the wait) of each start. A start that the history does not have is in the first hour.
    """
    times = sorted(hours)
    open_seconds = {
        hour: min(used.length, used.reserved / share) if (share := shares.get(used.template, 0.0)) else 0.0
        for hour, used in hours.items()
    }
    if not opened or times[0] + hours[times[0]].length <= opened[0][0]:
        first = times[0] + hours[times[0]].length - open_seconds[times[0]]
        opened = [(first, 0.0), *opened]
    for (start, wait), (following, _) in pairwise([*opened, (float("inf"), 0.0)]):
        end, work, used = start, [], hours[times[max(0, bisect_right(times, start) - 1)]]
        for hour in times[max(0, bisect_right(times, start) - 1) :]:
            here, until = hours[hour], min(following, hour + hours[hour].length)
            if hour >= following or hour + here.length <= start:
                continue
            begin, left = max(start, hour), open_seconds[hour]
            if following < hour + here.length:
                left -= hour + here.length - following
            seconds = min(left, until - begin)
            if begin > end + 1 or seconds <= 0:
                break
            open_seconds[hour] -= seconds
            end = begin + seconds
            if here.worked > 0:
                work.append(Work(begin, end, min(1.0, here.worked / seconds)))
            if seconds < until - begin - 1:
                break
        if end > start:
            yield RecordedServer(
                user, server, start - wait, end, shares.get(used.template), None, used.group, used.template, wait, work
            )


def _quiet_times(
    actions: Iterable[tuple[float, str]], opened: float, end: float, first: float, works: Sequence[Work]
) -> Iterator[tuple[float, float]]:
    """Yield the times without work: from `first` seconds before an idle action until the share was restored.

    The recorder may miss a restore that comes within seconds of the action: later work, or the same action again, is
    the sign of it.
    """
    since: float | None = None
    last = opened
    for at, action in [*actions, (end, "")]:
        if since is not None and (action in ("restored", "downgraded") or action == ""):
            restored = at if action == "restored" else last + 1 if action else end
            if any(work.start >= last and work.end <= restored and _seconds(work) > LEAST_PIECE for work in works):
                restored = last + 1
            yield since, min(restored, end)
            since = None
        if action in ("downgraded", "released") and since is None:
            since = max(opened, at - first)
        last = at


def _seconds(work: Work) -> float:
    return (work.end - work.start) * work.demand


def _placed(works: Iterable[Work], quiet: Sequence[tuple[float, float]], first: float, demand: float) -> Iterator[Work]:
    """Place the seconds of work of each hour outside the quiet times, so that no idle action is due between.

    `works`: an hour each, whose demand is the part of the hour with work. `first`: seconds of the first idle time.
    `demand`: the part of the GPU that the work used.
    """
    for hour in works:
        free, at = [], hour.start
        for begin, end in quiet:
            if end <= at or begin >= hour.end:
                continue
            if begin > at:
                free.append((at, begin))
            at = max(at, end)
        if at < hour.end:
            free.append((at, hour.end))
        length = sum(end - begin for begin, end in free)
        part = min(1.0, hour.demand * (hour.end - hour.start) / length) if length else 0.0
        for begin, end in free:
            # the first piece begins with the time, and the last ends with it: both are ends of an idle time
            worked = part * (end - begin)
            pieces = max(1, min(int((end - begin) / (first / 2)) + 2, int(worked / LEAST_PIECE)))
            lasts = worked / pieces
            step = (end - begin - lasts) / max(1, pieces - 1)
            for number in range(pieces):
                yield Work(begin + number * step, begin + number * step + lasts, demand)


# -- GPU work and pods -----------------------------------------------------------------------------------------------


def _without_doubles(servers: Sequence[RecordedServer]) -> list[RecordedServer]:
    """Return the servers, where those that several kinds of sources have are one; the log's times count."""
    order = {"log": 0, "history": 1, "database": 2}
    by_name: dict[tuple[str, str], list[RecordedServer]] = defaultdict(list)
    kept: list[RecordedServer] = []
    for server in sorted(servers, key=lambda server: order.get(server.source, -1)):
        if server.source:
            end = server.end if server.end is not None else float("inf")
            same = [
                other
                for other in by_name[server.user, server.server]
                if other.source != server.source and other.start < end and server.start < (other.end or float("inf"))
            ]
            if same:
                first = same[0]
                first.template, first.group = first.template or server.template, first.group or server.group
                first.gpus = server.gpus if first.gpus is None else first.gpus
                first.work = server.work if first.work is None else first.work
                first.wait = first.wait or server.wait
                continue
            by_name[server.user, server.server].append(server)
        kept.append(server)
    return kept


def _give_work(trace: Trace) -> None:
    """Give each user's GPU work to the server that ran then; of several, to the newest one."""
    by_user: dict[str, list[RecordedServer]] = defaultdict(list)
    given: dict[int, list[Work]] = {}
    for server in trace.servers:
        by_user[server.user].append(server)
        given[id(server)] = [*(server.work or ())]
    outside = 0.0
    for user, works in trace.work.items():
        servers = sorted(by_user.get(user, []), key=lambda server: server.start)
        starts = [server.start for server in servers]
        ends = [server.end if server.end is not None else trace.now for server in servers]
        latest = [*accumulate(ends, max)]
        for work in works:
            left = [(work.start, work.end)]
            for number in range(bisect_right(starts, work.end) - 1, -1, -1):
                if not left or latest[number] <= work.start:
                    break
                server, rest = servers[number], list[tuple[float, float]]()
                for begin, end in left:
                    first, last = max(begin, server.start), min(end, ends[number])
                    if last > first:
                        given[id(server)].append(Work(first, last, work.demand))
                    else:
                        first = last = end
                    rest += [span for span in ((begin, first), (last, end)) if span[1] > span[0]]
                left = rest
            outside += sum(end - begin for begin, end in left)
    if trace.has_work:
        for server in trace.servers:
            server.work = _joined(given[id(server)])
    if outside > HOUR / 10:
        trace.notes.append(
            f"{outside / HOUR:.1f} h of GPU work were outside the times of their users' servers: ignored"
        )


def _joined(works: Iterable[Work]) -> list[Work]:
    """Return the work in order, where overlapping work counts once."""
    joined: list[Work] = []
    for work in sorted(works):
        if joined and work.start < joined[-1].end:
            last = joined[-1]
            if work.end > last.end:
                joined.append(Work(last.end, work.end, work.demand))
            continue
        joined.append(work)
    return joined


def _work_of(points: Iterable[tuple[float, float]], step: float) -> list[Work]:
    """Return GPU work from samples of utilisation in percent; neighbouring samples join."""
    works: list[Work] = []
    for at, percent in points:
        if percent <= 0:
            continue
        if works and at - works[-1].end < step / 2:
            last = works[-1]
            length = last.end - last.start
            mean = (last.demand * length + percent / 100 * step) / (length + step)
            works[-1] = Work(last.start, last.end + step, min(1.0, mean))
        else:
            works.append(Work(at, at + step, min(1.0, percent / 100)))
    return works


def _pod_names(user: str, server: str) -> set[str]:
    """Return the names of a server's pod by KubeSpawner's schemes, without the digest of the newer one."""
    escaped = "".join(
        letter if letter.isalnum() and letter.isascii() else f"-{ord(letter):02x}" for letter in user.lower()
    )
    slug = re.sub(r"[^a-z0-9]+", "-", user.lower()).strip("-")
    names = {f"jupyter-{escaped}", f"jupyter-{slug}"}
    if server:
        plain = re.sub(r"[^a-z0-9]+", "-", server.lower()).strip("-")
        names = {f"{name}{dashes}{plain}" for name in names for dashes in ("-", "--")}
    return names


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        data: bytes = answer.read()
    return data


def _series(
    url: str, query: str, since: float, until: float, step: float, fetch: Callable[[str], bytes]
) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each pod, the largest value of several GPUs. Raises OSError, ValueError or KeyError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("give the URL of Prometheus, like http://prometheus:9090")
    points: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    begin = since
    while begin <= until:
        end = min(until, begin + step * MOST_POINTS)
        asks = urllib.parse.urlencode(
            {"query": query, "start": f"{begin:.0f}", "end": f"{end:.0f}", "step": f"{step:g}s"}
        )
        answer = json.loads(fetch(f"{url.rstrip('/')}/api/v1/query_range?{asks}"))
        if answer.get("status") != "success":
            raise ValueError(str(answer.get("error", "it gave no reason")))
        for series in answer["data"]["result"]:
            labels = series["metric"]
            pod = labels.get("exported_pod") or labels.get("pod", "")
            for at, value in series["values"]:
                points[pod][float(at)] = max(points[pod][float(at)], float(value))
        begin = end + step
    return {pod: sorted(values.items()) for pod, values in points.items()}

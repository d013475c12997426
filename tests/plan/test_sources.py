"""Sources of the plan are recognised, wrong rows are named, and the rest is used."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from zoneinfo import ZoneInfo

import pytest
from jupyterhub import orm

from gpushare_spawner.plan.servers import GIB, RecordedServer, Trace, Work
from gpushare_spawner.plan.sources import Reading


def read(*sources: Path | str, **options: Any) -> Trace:
    reading = Reading(**options)
    for source in sources:
        reading.read(str(source))
    return reading.finish()


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_of_servers_and_work_with_times_of_all_kinds(tmp_path: Path) -> None:
    servers = write(
        tmp_path / "servers.csv",
        "\ufeffUser;Server;Start;End;GPUs;Memory GiB;Group\n"
        "ada;;2026-03-02T08:00:00Z;2026-03-02T10:00:00+00:00;1;12.5;physics\n"
        "bob;big;1772438400;;2;;\n"
        "\n"
        "cy;;1772438400000;1772442000;;8;x|a\n",
    )
    work = write(tmp_path / "work.csv", "user,start,end\nada,2026-03-02T08:30:00Z,2026-03-02T09:00:00Z\n")
    trace = read(servers, work)
    by_user = {server.user: server for server in trace.servers}
    assert by_user["ada"].end == by_user["ada"].start + 7200
    assert by_user["ada"].memory == int(12.5 * GIB)
    assert by_user["ada"].work == [Work(by_user["ada"].start + 1800, by_user["ada"].start + 3600)]
    assert (by_user["bob"].end, by_user["bob"].gpus, by_user["bob"].server) == (None, 2.0, "big")
    assert (by_user["cy"].start, by_user["cy"].gpus, by_user["cy"].group) == (1772438400.0, None, "a")
    assert trace.has_work
    assert not trace.problems


def test_wrong_rows_are_named_with_file_and_line_and_the_rest_is_used(tmp_path: Path) -> None:
    path = write(
        tmp_path / "servers.csv",
        "user,server,start,end,gpus,memory_gib\n"
        ",,100,200,1,\n"
        "ada,,soon,200,1,\n"
        "ada,,300,200,1,\n"
        "ada,,100,200,many,\n"
        "ada,,,200,1,\n"
        "ada,,100,200,1,-3\n"
        "ada,,100,200\n",
    )
    trace = read(path)
    assert [problem.partition(": ")[0] for problem in trace.problems] == [f"servers.csv:{line}" for line in range(2, 8)]
    assert "the user is missing" in trace.problems[0]
    assert "'soon' is no ISO time" in trace.problems[1]
    assert "before the start" in trace.problems[2]
    assert [server.user for server in trace.servers] == ["ada"]


def test_work_in_overlapping_servers_counts_once_and_in_the_newest(tmp_path: Path) -> None:
    servers = write(tmp_path / "servers.csv", "user,server,start,end\nada,,0,1000\nada,old,50,\nada,new,300,500\n")
    work = write(tmp_path / "work.csv", "user,start,end\nada,200,600\nada,900,1100\n")
    by_name = {server.server: server.work for server in read(servers, work).servers}
    assert by_name["new"] == [Work(300, 500)]
    assert by_name["old"] == [Work(200, 300), Work(500, 600), Work(900, 1100)]
    assert by_name[""] == []


def test_a_hundred_thousand_rows_of_work_are_given_in_seconds(tmp_path: Path) -> None:
    servers = write(tmp_path / "servers.csv", "user,server,start,end\nada,,0,2000000\n")
    rows = "".join(f"ada,{10 * number},{10 * number + 5}\n" for number in range(100_000))
    before = time.process_time()
    (server,) = read(servers, write(tmp_path / "work.csv", "user,start,end\n" + rows)).servers
    assert time.process_time() - before < 20
    assert len(server.work or ()) == 100_000


def test_files_that_are_cut_or_of_another_kind_are_named(tmp_path: Path) -> None:
    rows = "user,server,start,end\nada,,0,100\nbob," + "x" * 200_000 + ",0,100\n"
    packed = gzip.compress(random.Random(1).randbytes(2000))
    sources = [write(tmp_path / "long.csv", rows), tmp_path / "cut.gz", tmp_path / "packed.gz", tmp_path / "line.bin"]
    sources[1].write_bytes(packed[:-900])
    sources[2].write_bytes(packed[:10] + b"\xff" * 50 + packed[60:])
    sources[3].write_bytes(b'ab"' + b"x" * 300_000)
    trace = read(*sources)
    assert [server.user for server in trace.servers] == ["ada"]
    assert "long.csv:3: field larger than field limit" in trace.problems[0]
    assert "cut.gz: cannot be read" in trace.problems[1]
    assert "packed.gz: cannot be read" in trace.problems[2]
    assert "line.bin: is no CSV" in trace.problems[3]


def test_times_without_a_zone_are_read_in_the_given_one(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", "user,server,start,end\nada,,2026-07-01 12:00:00,2026-07-01 13:00:00\n")
    trace = read(path, zone=ZoneInfo("Europe/Berlin"))
    assert trace.servers[0].start == datetime(2026, 7, 1, 10, tzinfo=UTC).timestamp()
    assert any("2 times had no time zone: read in Europe/Berlin" in note for note in trace.notes)


LOG = """\
[I 2026-03-02 08:00:00.000 JupyterHub app:2859] Running JupyterHub version 5.3.0
[I 2026-03-02 08:00:20.500 JupyterHub proxy:331] Adding user ada to proxy /user/ada/ => http://127.0.0.1:1
[I 2026-03-02 08:00:21.000 JupyterHub base:1192] User ada took 21.000 seconds to start
[I 2026-03-02 08:10:00.000 JupyterHub proxy:331] Adding user ada to proxy /user/ada/big%20one/ => http://127.0.0.1:2
[I 2026-03-02 08:10:00.100 JupyterHub base:1192] User ada:big one took 2.000 seconds to start
not a line of the hub
[I 2026-03-02 09:00:00.000 JupyterHub proxy:360] Removing user bob from proxy (/user/bob/)
"""
LATER = """\
[I 2026-03-02 10:00:00.000 JupyterHub proxy:331] Adding user ada to proxy /user/ada/ => http://127.0.0.1:1
[I 2026-03-02 12:00:00.000 JupyterHub proxy:360] Removing user ada from proxy (/user/ada/)
[W 2026-03-02 12:00:01.000 JupyterHub base:1386] User ada server stopped, with exit code: 1
[I 2026-03-02 13:00:00.000 JupyterHub log:192] 200 GET /hub/api
"""


def test_rotated_logs_of_the_hub_are_joined_in_any_order(tmp_path: Path) -> None:
    packed = tmp_path / "jupyterhub.log.1.gz"
    packed.write_bytes(gzip.compress(LOG.encode()))
    trace = read(write(tmp_path / "jupyterhub.log", LATER), packed, zone=ZoneInfo("UTC"))
    at = datetime(2026, 3, 2, 8, tzinfo=UTC).timestamp()
    found = {(server.user, server.server): server for server in trace.servers}
    # the later "Adding user" is a hub that was started again while the server ran
    assert (found["ada", ""].start, found["ada", ""].end) == (at, at + 4 * 3600)
    assert found["ada", ""].wait == 21.0
    assert found["ada", "big one"].start == pytest.approx(at + 598.1)
    assert found["ada", "big one"].end is None
    # bob's server ran before the log begins
    assert (found["bob", ""].start, found["bob", ""].end) == (at + 20.5, at + 3600)
    assert trace.now == at + 5 * 3600
    assert any("does not say which servers had a GPU" in note for note in trace.notes)


def test_database_of_the_hub_gives_groups_and_the_servers_that_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jupyterhub.sqlite"
    session = orm.new_session_factory(url)()
    ada, group = orm.User(name="ada"), orm.Group(name="physics")
    group.users.append(ada)
    spawner = orm.Spawner(name="", user=ada, started=datetime(2026, 3, 2, 8), server=orm.Server())
    spawner.last_activity = datetime(2026, 3, 2, 9)
    spawner.user_options = {"profile": "half-gpu"}
    session.add_all([ada, group, spawner, orm.Spawner(name="old", user=ada)])
    session.commit()
    session.close()
    before = (tmp_path / "jupyterhub.sqlite").read_bytes()
    for source in (tmp_path / "jupyterhub.sqlite", url):
        trace = read(source)
        (server,) = trace.servers
        assert (server.user, server.group, server.end, server.template) == ("ada", "physics", None, "half-gpu")
        assert server.start == datetime(2026, 3, 2, 8, tzinfo=UTC).timestamp()
        assert any("only has the servers that run now (1)" in note for note in trace.notes)
    assert (tmp_path / "jupyterhub.sqlite").read_bytes() == before


def test_files_of_no_known_kind_are_named(tmp_path: Path) -> None:
    trace = read(
        write(tmp_path / "letter.txt", "Dear admin\n"),
        write(tmp_path / "empty.csv", ""),
        tmp_path / "missing.csv",
        "nosuch://host/db",
    )
    assert [problem.partition(":")[0].rpartition("/")[2] for problem in trace.problems] == [
        "letter.txt", "empty.csv", "missing.csv", "nosuch",
    ]  # fmt: skip
    assert not trace.servers


def test_work_goes_to_the_newest_server_that_ran_then(tmp_path: Path) -> None:
    servers = write(tmp_path / "s.csv", "user,server,start,end\nada,a,1000,9000\nada,b,2000,3000\nada,c,7000,8000\n")
    work = write(tmp_path / "w.csv", "user,start,end,utilization\nada,2500,3500,50%\nada,4000,5000,\nbob,1,99999,\n")
    trace = read(servers, work)
    by_name = {server.server: server.work for server in trace.servers}
    assert by_name["b"] == [Work(2500, 3000, 0.5)]
    assert by_name["a"] == [Work(2500, 3500, 0.5), Work(4000, 5000)] or by_name["a"] == [
        Work(3000, 3500, 0.5), Work(4000, 5000),
    ]  # fmt: skip
    assert by_name["c"] == []
    assert any("outside the times of their users' servers" in note for note in trace.notes)


def test_hundred_thousand_rows_are_read(tmp_path: Path) -> None:
    rows = "".join(f"u{number % 300},,{number * 60},{number * 60 + 3600},1,\n" for number in range(100_000))
    trace = read(write(tmp_path / "s.csv", f"user,server,start,end,gpus,memory_gib\n{rows}"))
    assert len(trace.servers) == 100_000


class Prometheus(BaseHTTPRequestHandler):
    """A stand-in that answers range queries of DCGM's metrics for one pod."""

    queries: list[dict[str, list[str]]]

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        self.queries.append(asked)
        start, end, step = float(asked["start"][0]), float(asked["end"][0]), 60.0
        times = [start + number * step for number in range(int((end - start) / step) + 1)]
        memory = "FB_USED" in asked["query"][0]
        values = [[at, "2048" if memory else "40" if int(at / 600) % 2 else "0"] for at in times]
        metric = {"pod": "dcgm-exporter-1", "exported_pod": "jupyter-ada-2dl"}
        other = {"pod": "jupyter-nobody"}
        body = {
            "status": "success",
            "data": {"result": [{"metric": metric, "values": values}, {"metric": other, "values": values}]},
        }
        answer = json.dumps(body).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def prometheus() -> Iterator[str]:
    Prometheus.queries = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_prometheus_gives_utilisation_and_memory_by_pod(tmp_path: Path, prometheus: str) -> None:
    reading = Reading()
    reading.read(str(write(tmp_path / "s.csv", "user,server,start,end\nada-l,,600000,1260000\n")))
    reading.prometheus(prometheus)
    trace = reading.finish()
    (server,) = trace.servers
    assert server.memory == 2 * GIB
    assert server.work is not None
    assert [work.demand for work in server.work] == pytest.approx([0.4] * len(server.work))
    assert sum(work.end - work.start for work in server.work) == pytest.approx(330000, rel=0.01)
    # 11,000 minutes are more than one answer may have
    assert len(Prometheus.queries) == 4
    assert any("1 pod of no server" in note for note in trace.notes)


def test_prometheus_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    reading = Reading()
    reading.read(str(write(tmp_path / "s.csv", "user,server,start,end\nada,,0,7200\n")))
    reading.prometheus("http://127.0.0.1:9")
    assert "did not answer as expected" in reading.finish().problems[0]


def test_one_server_in_log_and_history_counts_once() -> None:
    reading = Reading()
    reading.trace.servers += [
        RecordedServer("ada", "", 100.0, 900.0, template="t", group="g", work=[Work(200, 300)], source="history"),
        RecordedServer("ada", "", 95.0, 905.0, source="log"),
        RecordedServer("ada", "", 2000.0, None, source="log"),
        RecordedServer("ada", "", 2000.0, None, source="database"),
    ]
    servers = reading.finish().servers
    assert [(server.start, server.end, server.template) for server in servers] == [
        (95.0, 905.0, "t"),
        (2000.0, None, ""),
    ]

"""Report, control requests, frames and session ids: what crosses a process boundary."""

import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpushare_spawner.model.control import REQUEST, Answer, OpenRequest, TierRequest
from gpushare_spawner.model.frames import FIELDS, FRAME_BYTES, Frame, FrameError, Kind, gpu_bytes
from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Tier, session_id, split_session_id
from tests.present import present

REPORT = Report(
    node="a",
    published_at=1000,
    gpus=(GpuReport(index=0, uuid="GPU-1", model="Simulated", memory_bytes=2**34),),
    sessions=(
        SessionReport(
            id="ada", user="ada", template="quarter-gpu", gpus=("GPU-1",), share_units=25, tier=Tier.DOWNGRADED,
            tier_since=990, effective_units=10, guaranteed_units=10, opened_at=900,
        ),
    ),
)  # fmt: skip


def test_a_report_survives_json() -> None:
    assert Report.model_validate_json(REPORT.model_dump_json()) == REPORT
    assert present(REPORT.session("ada")).tier is Tier.DOWNGRADED
    assert REPORT.session("bob") is None


def test_unknown_fields_of_a_newer_agent_are_ignored() -> None:
    raw = REPORT.model_dump(mode="json") | {"weather": "fine"}
    raw["gpus"][0]["colour"] = "green"
    assert Report.model_validate(raw) == REPORT


def test_the_fields_of_version_1_keep_their_names() -> None:
    """An agent sends this, and the hub of another release reads it: a new name needs a new version of the report."""
    notice = {
        "tier": "released", "at": 1300.0, "reason": "idle", "effective_units": 0, "cause": "idle",
        "after_seconds": 900.0, "use": {"min_use": 5.0, "window": 300.0},
    }  # fmt: skip
    hit = {"limit": "session", "at": 991.0, "requested_bytes": 4, "allocated_bytes": 46, "pid": 8}
    delivered = {
        "entitled_seconds": 5.0, "delivered_seconds": 4.0, "waits": 3, "wait_p50_seconds": 0.1, "wait_p95_seconds": 0.2,
        "gpus": [{"entitled_seconds": 5.0, "delivered_seconds": 4.0}],
    }  # fmt: skip
    gpu = {
        "index": 0, "uuid": "GPU-1", "model": "Simulated", "memory_bytes": 64, "memory_used_bytes": 32,
        "utilisation": 0.5, "temperature_celsius": 60.0, "power_watts": 150.0, "healthy": False, "cordoned": True,
        "simulated": True,
        "capacity_units": 200, "waiting": 1,
        "mig": {
            "gpu": "GPU-0", "gpu_model": "A100",
            "profile": {
                "name": "1g.10gb", "slices": 1, "compute_slices": 7, "memory_slices": 1, "memory_bytes": 64,
            },
        },
    }  # fmt: skip
    drained = {"text": "Please save your work.", "by": "root", "at": 998.0, "cause": "drain"}
    session = {
        "id": "ada", "user": "ada", "server": "lab", "template": "quarter-gpu", "quota": "group:ml",
        "gpus": ["GPU-1"], "layer": "kai", "layer_trouble": "Its scheduler does not run.", "gpu_use_known": False,
        "neighbours": {"labels": ["course"], "apart_from": ["exam"], "alone": True},
        "share_units": 25, "last_units": 0,
        "borrowed_units": 5, "borrowed_each": [5], "guaranteed_each": [9],
        "tier": "downgraded", "tier_since": 990.0, "effective_units": 10, "guaranteed_units": 9,
        "time_limit_units": 60,
        "yields": True, "background": True, "opened_at": 900.0, "clock_moved": 0.0, "confirmed": False, "pid": 7,
        "memory_bytes": 16,
        "resident_bytes": 8,
        "memory_limit_bytes": 48, "engine": "suspend", "suspended": True, "not_suspendable": "It has managed memory.",
        "early_page_ins_used": 2, "early_page_ins_unused": 1,
        "context_bytes": 4, "host_memory_needed_bytes": 8, "host_memory_budget_bytes": 99, "gpu_busy": True,
        "waiting": True, "last_gpu_activity": 995.0, "gpu_seconds": 12.0, "energy_joules": 90.0, "kernels": 2,
        "kernels_busy": 1,
        "last_kernel_activity": 996.0, "processes": 1, "bypassing_pids": [8], "notice": notice, "delivered": delivered,
        "bursts": [[995.0, 3.0, 2.0, 0.5, 1.5, 64]], "exceeding": [{"pid": 8, "started": 77}],
        "memory_limit_hits": {"count": 1, "last": hit}, "host_use": {"cpu_millicores": 50, "memory_bytes": 64},
        "lacks_requests": True, "keep": {"until": 1600.0, "since": 1000.0, "by": "ada"}, "keeps": [1000.0],
        "exemption": {"until": None, "by": "root", "reason": "exam"},
        "messages": [{**drained, "at": 997.0, "cause": "admin"}, drained],
        "asks": [{"number": 7, "kind": 1, "value": 3600.0, "at": 999.0}],
    }  # fmt: skip
    cordon = {
        "gpu": "GPU-1", "by": "root", "reason": "Fan.", "since": 980.0, "drain": True, "stop_at": 2000.0,
    }  # fmt: skip
    report = {
        "version": 1, "node": "a", "published_at": 1000.0, "gpus": [gpu], "sessions": [session],
        "ended": [
            {
                "id": "bob", "opened_at": 800.0, "clock_moved": 0.0, "ended_at": 950.0, "effective_units": 25,
                "tier_since": 800.0, "gpu_seconds": 3.0, "energy_joules": 9.0, "delivered": delivered,
            }
        ],
        "host_memory": {"budget_bytes": 100, "needed_bytes": 50, "paged_out_bytes": 10},
        "cordons": [cordon], "state_trouble": "No space left on device (/var/lib/gpushare/records)",
            "stop_trouble": "it lacks the capability KILL", "supports_budgets": True,
        "claims": {
            "folder": "/run/claims", "socket": "session.sock", "environment": {"A": "b"},
            "mounts": [{"host_path": "/lib", "container_path": "/l", "read_only": True}],
        },
    }  # fmt: skip
    assert Report.model_validate(report).model_dump(mode="json") == report


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("node", ""), ("gpus", None), ("published_at", -1), ("sessions", [{"id": "x"}])],
)
def test_a_wrong_report_is_refused_naming_the_field(field: str, value: int | str | list[dict[str, str]] | None) -> None:
    raw = REPORT.model_dump(mode="json") | {field: value}
    with pytest.raises(ValidationError) as refusal:
        Report.model_validate(raw)
    assert refusal.value.errors()[0]["loc"][0] == field


def test_requests_are_told_apart_by_op() -> None:
    opened = OpenRequest(id="ada", user="ada", uid=1000, template="t", gpus=("GPU-1",), share_units=25)
    assert REQUEST.validate_json(opened.model_dump_json()) == opened
    step = TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle", if_idle_since=12.5)
    assert REQUEST.validate_json(step.model_dump_json()) == step


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"[]", b"null", b'{"op":"fly"}', b'{"op":"close"}', b'{"op":"close","id":"../x"}',
        b'{"op":"close","id":"a","extra":1}',
        b'{"op":"report","version":2}',
        b'{"op":"tier","id":"a","tier":"stopped","effective_units":0,"reason":""}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(line: bytes) -> None:
    with pytest.raises(ValidationError):
        REQUEST.validate_json(line)


def test_an_answer_is_an_error_or_a_result() -> None:
    answer = Answer.model_validate_json(b'{"error":{"code":"no-capacity","message":"full"}}')
    assert answer.error is not None
    assert answer.error.code == "no-capacity"


FIELD = st.integers(0, 2**64 - 1)


@given(
    st.sampled_from(list(Kind)),
    st.lists(FIELD, max_size=FIELDS),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
)
def test_a_frame_survives_its_bytes(kind: Kind, fields: list[int], gpu: bytes, serial: int) -> None:
    frame = Frame(kind, tuple(fields), gpu, serial)
    data = frame.pack()
    assert len(data) == FRAME_BYTES
    back = Frame.unpack(data)
    assert (back.kind, back.gpu, back.serial) == (kind, gpu, serial)
    assert back.fields == tuple(fields) + (0,) * (FIELDS - len(fields))


@given(st.binary(max_size=300))
def test_random_bytes_are_a_frame_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(FrameError):
        Frame.unpack(data)


def test_bytes_on_the_wire_are_those_of_the_document() -> None:
    data = Frame(Kind.GRANT, (7, 8, 9), bytes(range(16)), serial=3, flags=1).pack()
    assert int.from_bytes(data[0:4], "little") == 0x48535047
    assert int.from_bytes(data[4:6], "little") == 1
    assert int.from_bytes(data[6:8], "little") == 66
    assert int.from_bytes(data[8:12], "little") == 3
    assert data[16:32] == bytes(range(16))
    assert int.from_bytes(data[32:40], "little") == 7


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[:-1], "128 bytes"),
        (lambda data: data + b"\0", "128 bytes"),
        (lambda data: b"XXXX" + data[4:], "magic"),
        (lambda data: data[:4] + b"\2\0" + data[6:], "version 2"),
        (lambda data: data[:6] + b"\xee\0" + data[8:], "type 238"),
    ],
)
def test_a_spoilt_frame_says_what_is_wrong(spoil: Callable[[bytes], bytes], says: str) -> None:
    with pytest.raises(FrameError, match=says):
        Frame.unpack(spoil(Frame(Kind.QUERY).pack()))


def test_the_uuid_of_a_gpu_or_mig_instance_is_16_bytes() -> None:
    number = uuid.uuid4()
    assert gpu_bytes(f"GPU-{number}") == gpu_bytes(f"MIG-{number}") == number.bytes
    with pytest.raises(ValueError, match="UUID of a GPU"):
        gpu_bytes("MIG-1")


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_session_ids_keep_user_and_server_apart(user: str, server: str) -> None:
    value = session_id(user, server)
    assert split_session_id(value) == (user, server)


def test_tiers_have_a_number_for_the_wire() -> None:
    assert [tier.depth for tier in Tier] == [0, 1, 2, 3]

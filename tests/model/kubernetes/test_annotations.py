"""A session's annotations say the same after a journey through a pod, and wrong ones are explained."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpushare_spawner.model.controls import AskAnswer, Controls, Exemption, Keep, Message, MessageCause
from gpushare_spawner.model.kubernetes.annotations import (
    IDLE_SINCE,
    NOTICE,
    PREFIX,
    AnnotationProblem,
    SessionAnnotations,
    ShareChange,
    answers_patch,
    controls_patch,
    notice_patch,
    pod_session,
    tier_patch,
)
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import NeighbourRules, Share, Tier

SESSION = SessionAnnotations(
    session="ann@example.org+lab",
    template="quarter-gpu",
    share_units=25,
    gpus=("GPU-1",),
    gpu_indices=(3,),
    tier_since=1767225600.125,
    effective_units=10,
    borrowed_units=5,
    tier=Tier.DOWNGRADED,
    notice=Notice(tier=Tier.RELEASED, at=1767225900.0, reason="idle {45} min", effective_units=0),
)

uuids = some.from_regex(r"GPU-[0-9a-f-]{1,36}", fullmatch=True)


instants = some.floats(0, 2e11)
controls = some.builds(
    Controls,
    keep=some.none() | some.builds(Keep, until=instants, since=instants, by=some.text()),
    keeps=some.lists(instants, max_size=16).map(tuple),
    exemption=some.none() | some.builds(Exemption, until=some.none() | instants, by=some.text(), reason=some.text()),
)
messages = some.builds(
    Message, text=some.text(min_size=1, max_size=9), by=some.text(), at=instants, cause=some.sampled_from(MessageCause)
)
answers = some.builds(
    AskAnswer, number=some.integers(1, 2**32 - 1), done=some.booleans(), text=some.text(max_size=9), at=instants
)


@some.composite
def sessions(draw: some.DrawFn) -> SessionAnnotations:
    gpus = draw(some.lists(uuids, min_size=1, max_size=8, unique=True))
    share = draw(some.integers(1, 100))
    return SessionAnnotations(
        session=draw(some.text(min_size=1)),
        template=draw(some.text(min_size=1)),
        share_units=share,
        last_units=draw(some.integers(0, share - 1)) if len(gpus) > 1 else 0,
        gpus=tuple(gpus),
        gpu_indices=tuple(draw(some.permutations(range(len(gpus))))),
        tier_since=draw(some.integers(0, 10**13)) / 1000,
        effective_units=draw(some.integers(0, share)),
        borrowed_units=draw(some.integers(0, share)),
        memory_limit=draw(some.sampled_from(["100%", "80%", "12Gi"])),
        time_limit_units=draw(some.integers(1, 100)),
        oversubscribe=draw(some.booleans()),
        engine=draw(some.sampled_from(MemoryEngine)),
        quota=draw(some.text()),
        tier=draw(some.sampled_from([Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED])),
        controls=draw(controls),
        messages=tuple(draw(some.lists(messages, max_size=3, unique_by=lambda message: message.cause))),
        answers=tuple(draw(some.lists(answers, max_size=4, unique_by=lambda answer: answer.number))),
        notice=draw(some.none() | some.builds(Notice, reason=some.text(), at=some.floats(0, 2e11))),
    )


@given(sessions())
def test_session_written_as_annotations_reads_back_the_same(session: SessionAnnotations) -> None:
    written = session.annotations()
    assert all(isinstance(value, str) for value in written.values())
    assert pod_session(written) == session


def test_forged_annotations_of_our_own_layer_have_no_effect_on_another_layers_session() -> None:
    plain = dataclasses.replace(SESSION, layer=LayerName.KAI, borrowed_units=0)
    forged = dataclasses.replace(
        plain, engine=MemoryEngine.SUSPEND, memory_limit="1%", borrowed_units=5, user_units=1, time_limit_units=30,
        neighbours=NeighbourRules(alone=True),
    )  # fmt: skip
    assert "gpushare-spawner.io/memory-engine" in forged.annotations()
    read = pod_session(forged.annotations(), forged.labels())
    assert read == pod_session(plain.annotations(), plain.labels())
    assert (read.engine, read.time_limit_units) == (MemoryEngine.MANAGED, 100)


def test_what_the_annotations_look_like() -> None:
    written = SESSION.annotations()
    notice = written.pop("gpushare-spawner.io/notice")
    assert Notice.model_validate_json(notice) == SESSION.notice
    assert written == {
        "gpushare-spawner.io/session": "ann@example.org+lab",
        "gpushare-spawner.io/template": "quarter-gpu",
        "gpushare-spawner.io/share": "25",
        "gpushare-spawner.io/gpu": "GPU-1",
        "gpushare-spawner.io/gpu-index": "3",
        "gpushare-spawner.io/borrowed": "5",
        "gpushare-spawner.io/tier": "downgraded",
        "gpushare-spawner.io/tier-since": "1767225600.125",
        "gpushare-spawner.io/effective-share": "10",
    }


@pytest.mark.parametrize(
    ("name", "value", "explained"),
    [
        ("memory-engine", "swap", "write one of managed, suspend"),
        ("share", "0", "from 1 to 100"),
        ("time-limit", "0", "from 1 to 100"),
        ("share", "25%", "from 1 to 100"),
        ("share", "٢", "from 1 to 100"),
        ("share", None, "missing"),
        ("gpu", "", "UUIDs"),
        ("gpu", "GPU-1,GPU-1", "different"),
        ("gpu", "GPU-1,GPU-2", "both list the same GPUs"),
        ("gpu-index", "zero", "indices"),
        ("tier", "stopped", "active, downgraded, released"),
        ("tier-since", "yesterday", "seconds since the epoch"),
        ("tier-since", "nan", "seconds since the epoch"),
        ("effective-share", "26", "more than the share of 25"),
        ("borrowed", "-1", "from 0 to 100"),
        ("notice", '{"tier": "gone", "at": 0, "reason": ""}', "tier"),
        ("notice", "soon", "JSON"),
        ("keep", '{"until": 1e18, "since": 0, "by": "ann"}', "until"),
        ("keeps", "[NaN]", "keeps"),
        ("exemption", "for ever", "exemption"),
        ("messages", '[{"text": "", "by": "root", "at": 0}]', "text"),
        ("answers", '[{"number": 0, "done": true, "text": "", "at": 0}]', "number"),
        ("session", "", "empty"),
        ("share", "25,10", "at least 2 GPUs"),
        ("share", "25,x", "whole number from 1"),
        ("share", ",10", "whole number from 1"),
    ],
)
def test_a_wrong_annotation_is_named_and_explained(name: str, value: str | None, explained: str) -> None:
    written = SESSION.annotations()
    if value is None:
        del written[PREFIX + name]
    else:
        written[PREFIX + name] = value
    with pytest.raises(AnnotationProblem, match=re.escape(explained)) as caught:
        pod_session(written)
    assert PREFIX + name in str(caught.value)


def test_share_with_fewer_units_on_the_last_gpu_is_text_that_older_agents_refuse() -> None:
    several = dataclasses.replace(SESSION, gpus=("GPU-1", "GPU-2"), gpu_indices=(3, 4), last_units=10)
    assert several.annotations()[PREFIX + "share"] == "25,10"
    assert several.share == Share(25, 2, 10)
    change = ShareChange(number=1, share_units=25, last_units=10)
    written = change.model_dump(mode="json")
    assert written["share_units"] == "25,10"
    assert "last_units" not in written
    assert ShareChange.model_validate_json(change.model_dump_json()) == change
    assert (change.request("ann").share_units, change.request("ann").last_units) == (25, 10)
    assert ShareChange(number=1, share_units=25).model_dump(mode="json")["share_units"] == 25


def test_every_problem_is_said_at_once() -> None:
    with pytest.raises(AnnotationProblem) as caught:
        pod_session({})
    assert len(caught.value.problems) == 6


def test_tier_patch_restores_the_share_and_withdraws_the_notice() -> None:
    written = SESSION.annotations()
    back_up = {**written, **tier_patch(Tier.ACTIVE, 1767230000, 25)}
    session = pod_session({name: value for name, value in back_up.items() if value is not None})
    assert (session.tier, session.effective_units, session.notice) == (Tier.ACTIVE, 25, None)
    assert notice_patch(None) == {NOTICE: None}
    with pytest.raises(ValueError, match="stopped"):
        tier_patch(Tier.STOPPED, 0, 0)


def test_the_guard_of_an_idle_action_is_no_earlier_than_the_work_that_the_service_knows_of() -> None:
    last_work = 1767230000.0004
    down = {**SESSION.annotations(), **tier_patch(Tier.RELEASED, 1767230900, 0, idle_since=last_work)}
    session = pod_session({name: value for name, value in down.items() if value is not None})
    assert session.idle_since is not None
    assert last_work <= session.idle_since < last_work + 0.002
    assert pod_session(session.annotations()) == session
    up = tier_patch(Tier.ACTIVE, 1767231000, 25)
    assert up[IDLE_SINCE] is None


def test_patches_of_controls_replace_what_was_there_and_keep_the_last_answers() -> None:
    keep = Keep(until=2000, since=1000, by="ann")
    written = dict(SESSION.annotations())

    def patched(patch: dict[str, str | None]) -> SessionAnnotations:
        written.update({name: text for name, text in patch.items() if text is not None})
        for name in [name for name, text in patch.items() if text is None]:
            written.pop(name, None)
        return pod_session(written)

    assert patched(controls_patch(Controls(keep=keep, keeps=(1000,)))).controls == Controls(keep=keep, keeps=(1000,))
    exempt = Controls(exemption=Exemption(by="root"))
    assert patched(controls_patch(exempt)).controls == exempt
    assert patched(controls_patch(Controls())).controls == Controls()
    assert written == SESSION.annotations()
    for number in range(1, 7):
        session = patched(
            answers_patch(pod_session(written).answers, AskAnswer(number=number, done=True, text="", at=1))
        )
    assert [answer.number for answer in session.answers] == [3, 4, 5, 6]

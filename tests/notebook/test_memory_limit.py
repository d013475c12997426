"""What `gpushare status` and JupyterLab say about memory that was refused, and about who holds the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.model.share import MemoryLimit
from gpushare_spawner.model.share_status import AgentRecord, LimitHit, ProcessMemory, ShareStatus
from gpushare_spawner.notebook.client import named, process_name
from gpushare_spawner.notebook.extension import answer
from gpushare_spawner.wording import notices, share_status
from gpushare_spawner.wording.amounts import unbroken
from tests.notebook.scripted_agent import GIB, GPU, Script

MIB = 2**20


def with_memory(limit: MemoryLimit = MemoryLimit.SESSION, ago: float = 240.0) -> ShareStatus:
    """A status with two processes and a refused allocation."""
    processes = (ProcessMemory(41, GPU, 5 * GIB), ProcessMemory(42, GPU, 10 * GIB))
    hit = LimitHit(limit.label, ago, 2 * GIB, 15 * GIB, 41, 7)
    return replace(Script().status(), processes=processes, limit_hit=hit)


def test_the_answer_names_processes_with_memory_and_the_refused_allocation() -> None:
    now = with_memory()
    assert now.processes == (ProcessMemory(41, GPU, 5 * GIB), ProcessMemory(42, GPU, 10 * GIB))
    assert now.limit_hit == LimitHit("session", 240.0, 2 * GIB, 15 * GIB, 41, 7)
    assert now.as_json()["limit_hit"]["limit"] == "session"


def test_an_older_agent_says_neither() -> None:
    now = Script().status()
    assert (now.processes, now.limit_hit) == ((), None)
    assert "allocated by" not in str(now)


def test_a_limit_and_fields_of_a_newer_agent_are_passed_over() -> None:
    sent = json.loads(AgentRecord(status=with_memory()).packet())
    sent["status"]["limit_hit"]["limit"] = sent["status"]["moon"] = "full"
    assert AgentRecord.parse(json.dumps(sent).encode()).status == replace(with_memory(), limit_hit=None)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (
            MemoryLimit.SESSION,
            "An allocation of 2 GiB failed 4 min ago (CUDA out of memory): this session may allocate 16 GiB, all its "
            "kernels together, and had allocated 15 GiB. Restart process 42 to free 10 GiB. "
            "Or choose a template with a larger GPU memory limit.",
        ),
        (
            MemoryLimit.SESSION_HOST_MEMORY,
            "An allocation of 2 GiB failed 4 min ago (CUDA out of memory): this server's memory limit leaves too "
            "little host memory for GPU memory that is paged out while other sessions use the GPU. Free host "
            "memory, for example large variables. Restart process 42 to free 10 GiB. "
            "Or choose a template with more memory.",
        ),
        (
            MemoryLimit.NODE_HOST_MEMORY,
            "An allocation of 2 GiB failed 4 min ago (CUDA out of memory): the machine's host memory for "
            "paged-out GPU memory is used up, or reserved for other sessions. Restart process 42 to free 10 GiB. "
            "Or try again when other sessions use less.",
        ),
    ],
)
def test_the_sentence_names_the_limit_and_what_helps(limit: MemoryLimit, said: str) -> None:
    now = with_memory(limit)
    assert said in share_status.page(now, 0)
    assert said in share_status.explanation(now).splitlines()
    assert "allocated by    process 42 10 GiB, process 41 5 GiB" in share_status.page(now, 0)


def test_no_process_is_restarted_to_free_nothing() -> None:
    """Where the neighbours have used up the host memory, the session may have allocated nothing."""
    hit = LimitHit("node_host_memory", 0.0, 2 * GIB, 0, 41, 1)
    empty = replace(Script(memory=0, resident=0).status(), processes=(ProcessMemory(41, GPU, 0),), limit_hit=hit)
    said = share_status.page(empty, 0)
    assert "Restart" not in said
    assert said.endswith("reserved for other sessions. Try again when other sessions use less.")


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (MemoryLimit.SESSION, "Out of GPU memory: 2 GiB more would exceed the 16 GiB that this session may allocate."),
        (
            MemoryLimit.SESSION_HOST_MEMORY,
            "Out of memory: this server has too little host memory for 2 GiB more GPU memory.",
        ),
        (
            MemoryLimit.NODE_HOST_MEMORY,
            "Out of memory: this machine has too little host memory for 2 GiB more GPU memory.",
        ),
    ],
)
def test_the_notification_names_the_limit(limit: MemoryLimit, said: str) -> None:
    text = answer(with_memory(limit))["limit_text"]
    assert text == unbroken(said)
    assert len(text) <= notices.TOAST_LETTERS
    assert answer(Script().status())["limit_text"] == ""


def test_a_single_process_is_not_listed() -> None:
    now = ShareStatus(gpus=Script().status().gpus, processes=(ProcessMemory(41, GPU, GIB),))
    assert share_status.holders(now) == ""


def test_memory_on_two_gpus_is_added_up_for_each_process() -> None:
    processes = tuple(ProcessMemory(pid, gpu, 300 * MIB, f"p{pid}") for pid in range(6) for gpu in ("a", "b"))
    assert share_status.holders(ShareStatus(processes=processes)) == (
        "p5 600 MiB, p4 600 MiB, p3 600 MiB, p2 600 MiB, and 2 more"
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "name"),
    [
        (
            ["/usr/bin/python3", "-m", "ipykernel_launcher", "-f", "/r/kernel-1a2b3c4d-00-11.json"],
            "A=b\0JPY_SESSION_NAME=/home/ada/work/train.ipynb\0",
            "the kernel of train.ipynb",
        ),
        (["python", "-f", "/r/kernel-1a2b3c4d-00.json"], "", "the kernel 1a2b3c4d"),
        (["/usr/bin/python3", "-u", "train.py"], "", "train.py (process 7)"),
        (["/usr/bin/python3", "jobs/train.py"], "", "train.py (process 7)"),
        (["python3", "-c", "print()"], "", "python3 (process 7)"),
        (["/opt/app/simulate\x1b[31m" + "e" * 60], "", "simulate[31m" + "e" * 27 + "… (process 7)"),
        ([], "", "process 7"),
    ],
)
def test_a_process_is_called_what_its_user_calls_it(
    tmp_path: Path, arguments: list[str], environment: str, name: str
) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_text("\0".join(arguments) + "\0" * bool(arguments))
    (folder / "environ").write_text(environment)
    assert process_name(7, tmp_path) == name


def test_a_process_that_is_gone_has_its_number(tmp_path: Path) -> None:
    now = named(with_memory(), tmp_path)
    assert [process.name for process in now.processes] == ["process 41", "process 42"]


def refused_of(requested: int, held: list[int], limit: MemoryLimit = MemoryLimit.SESSION) -> ShareStatus:
    """A session of 16 GiB whose processes hold so much, and an allocation that was refused."""
    processes = tuple(ProcessMemory(41 + place, GPU, size) for place, size in enumerate(held))
    hit = LimitHit(limit.label, 0.0, requested, sum(held), 41, 1)
    return replace(Script().status(), processes=processes, limit_hit=hit)


@pytest.mark.parametrize("limit", [MemoryLimit.SESSION, MemoryLimit.SESSION_HOST_MEMORY, MemoryLimit.NODE_HOST_MEMORY])
def test_no_advice_frees_less_than_was_lacking(limit: MemoryLimit) -> None:
    """14 GiB were asked for, and the only process holds 256 MiB; 20 GiB are more than the session may ever have."""
    lacking = 14 * GIB if limit != MemoryLimit.SESSION else 20 * GIB
    said = share_status.page(refused_of(lacking, [256 * MIB], limit), 0)
    assert "Restart" not in said
    assert "256 MiB." not in said.rsplit("CUDA out of memory", 1)[1] or "had allocated 256 MiB." in said


def test_the_advice_names_as_many_processes_as_free_what_was_lacking() -> None:
    said = share_status.page(refused_of(14 * GIB, [7 * GIB, 6 * GIB, GIB]), 0)  # 12 GiB are lacking
    assert "Restart process 41 and process 42 to free 13 GiB. Or choose a template" in said


def test_what_no_process_can_have_needs_a_larger_template() -> None:
    said = share_status.page(refused_of(20 * GIB, [10 * GIB]), 0)
    assert said.endswith("Choose a template with a larger GPU memory limit (at least 20 GiB).")


def test_a_refused_allocation_is_the_first_line_of_the_details() -> None:
    said = answer(refused_of(14 * GIB, [10 * GIB]))
    first = unbroken("An allocation of 14 GiB failed just now (CUDA out of memory): this session may allocate 16 GiB")
    assert said["summary"][0].startswith(first)
    assert all(term["name"] != "memory limit" for term in said["terms"]), "it is said once"

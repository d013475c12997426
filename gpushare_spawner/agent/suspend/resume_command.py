"""Resumes suspended processes while no agent runs: ``gpushare agent resume``.

No arbiter pages out other sessions meanwhile, so a process stays suspended if its GPU has too little free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource
from gpushare_spawner.agent.state.records import RecordFolder, SessionRecord
from gpushare_spawner.agent.suspend.driver import DriverCheckpoints
from gpushare_spawner.agent.suspend.progress import CannotResume
from gpushare_spawner.agent.suspend.steps import ResumeSteps


async def resume_all(
    records: RecordFolder,
    gpus: Iterable[Gpu],
    source: GpuSource,
    checkpoints: DriverCheckpoints,
    say: Callable[[str], None],
) -> bool:
    """Restore and unlock all suspended processes of the records. Returns whether none can be left suspended.

    `say` gets a sentence about each process. Raises OSError if a record cannot be written.
    """
    resume_steps = ResumeSteps(checkpoints, source)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    complete = True
    for record in records.load():
        if await _resume(record, by_uuid, resume_steps, say):
            record.suspension = None
            records.replace(record)
        else:
            complete = complete and record.suspension is None
    for record in records.left():
        if await _resume(record, by_uuid, resume_steps, say):
            records.forget_left(record)
        else:
            complete = False
    for path in records.unreadable():
        say(f"The record {path} cannot be read: processes of its session may be suspended. Remove it if none is.")
        complete = False
    return complete


async def _resume(
    record: SessionRecord, gpus: dict[str, Gpu], resume_steps: ResumeSteps, say: Callable[[str], None]
) -> bool:
    """Return whether there was a suspended process and all of them run, or have ended."""
    session, suspension = record.request.id, record.suspension
    if suspension is None:
        return False
    gpu = gpus.get(next(iter(record.request.gpus), ""))
    all_run = True
    for name, size in zip(suspension.processes, suspension.sizes, strict=True):
        if not processes.alive(name):
            continue
        trouble: str | None = "its GPU is not there"
        if gpu is not None:
            try:
                trouble = await resume_steps.attempt(session, gpu, name, size)
            except CannotResume as error:
                trouble = str(error)
        all_run = all_run and trouble is None
        state = "runs again" if trouble is None else f"stays suspended: {trouble}"
        say(f"Process {name.pid} of session {session} {state}.")
    return all_run

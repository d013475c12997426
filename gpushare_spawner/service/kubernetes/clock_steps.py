"""Adjusts a node's instants to steps of the service's clock, so that a step changes no duration.

An agent adjusts the instants in its report itself, but its next report can be a minute away. Instants in pods'
annotations and creation times do not change, so the service records which of them it saw before a step. A service that
starts after the step has seen none of them. It then reads an earlier notice with a wrong time, and sends another
notice, see `idle.policy`. The reports themselves are in `cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.kubernetes.annotations import SessionAnnotations
from gpushare_spawner.model.quantity import shifted
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.service.kubernetes.pod_sessions import SessionPod

_Instant = tuple[str, float]
"""The kind of an instant, and the instant as written."""


def shifted_report(report: Report, clock: WallClock) -> Report:
    """Return a report from before a clock step as its agent would have written it after the step."""
    by = _step_since(report.published_at, clock)
    if not by:
        return report
    sessions = tuple(_shifted_session(session, by) for session in report.sessions)
    return report.model_copy(update={"published_at": shifted(report.published_at, by), "sessions": sessions})


def _step_since(published_at: float, clock: WallClock) -> float:
    """Return the seconds by which the clock was set since a report was published; 0 if it was not set."""
    by = clock.since_set(published_at) - published_at
    now = clock()
    # a node's clock that is slightly ahead of this one has already been set back
    return by if abs(published_at + by - now) < abs(published_at - now) else 0.0


def _shifted_session(session: SessionReport, by: float) -> SessionReport:
    worked, kernels = session.last_gpu_activity, session.last_kernel_activity
    return session.model_copy(
        update={
            "clock_moved": session.clock_moved + by,
            "tier_since": shifted(session.tier_since, by),
            "last_gpu_activity": shifted(worked, by) if worked is not None else None,
            "last_kernel_activity": shifted(kernels, by) if kernels is not None else None,
            "asks": tuple(ask.model_copy(update={"at": shifted(ask.at, by)}) for ask in session.asks),
        }
    )


class PodInstants:
    """The instants in pods, each with the value of `WallClock.shift` when the service first saw it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, float], dict[_Instant, float]] = {}

    def take_note(self, pods: Iterable[SessionPod], shift: float) -> None:
        """Record the new instants in these pods, which must be all pods."""
        before, self._seen = self._seen, {}
        for pod in pods:
            key = _key(pod)
            seen = before.get(key, {})
            self._seen[key] = {instant: seen.get(instant, shift) for instant in _instants(pod)}

    def of_now(self, pod: SessionPod, shift: float) -> SessionPod:
        """Return the pod with its instants as they would have been written after later clock steps.

        The ends of a keep and an exemption do not change, because users have seen them.
        """
        steps = {instant: shift - then for instant, then in self._seen.get(_key(pod), {}).items() if shift != then}
        if not steps:
            return pod
        return replace(
            pod, session=_shifted_annotations(pod.session, steps), clock_moved=steps.get(("created", pod.created), 0.0)
        )


def _key(pod: SessionPod) -> tuple[str, str, float]:
    # a later pod can have the same name
    return pod.namespace, pod.name, pod.created


def _instants(pod: SessionPod) -> Iterator[_Instant]:
    annotations = pod.session
    yield "created", pod.created
    yield "tier", annotations.tier_since
    if annotations.notice is not None:
        yield "notice", annotations.notice.at
    for begun in annotations.controls.keeps:
        yield "keep", begun
    for message in annotations.messages:
        yield "message", message.at


def _shifted_annotations(annotations: SessionAnnotations, steps: Mapping[_Instant, float]) -> SessionAnnotations:
    def of_now(what: str, instant: float) -> float:
        return shifted(instant, steps.get((what, instant), 0.0))

    notice, messages = annotations.notice, annotations.messages
    return replace(
        annotations,
        tier_since=of_now("tier", annotations.tier_since),
        notice=notice.model_copy(update={"at": of_now("notice", notice.at)}) if notice is not None else None,
        controls=annotations.controls.model_copy(
            update={"keeps": tuple(of_now("keep", at) for at in annotations.controls.keeps)}
        ),
        messages=tuple(message.model_copy(update={"at": of_now("message", message.at)}) for message in messages),
    )

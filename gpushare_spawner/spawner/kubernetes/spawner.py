"""Servers as pods, with shared GPUs.

Each step of a start has a module, and each builds on the one before: `kube_watching` (pods and reports are in view),
`kube_offering` (the form), `kube_choosing` (options), `kube_placing` (a place, perhaps after a wait), `kube_creating`
(the pod), `kube_starting` (all of it, and again elsewhere if a node refuses). What a running server adds is here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from gpushare_spawner.model.kubernetes import TEMPLATE, is_session
from gpushare_spawner.spawner.base import GPUShareBase
from gpushare_spawner.spawner.kubernetes.launcher import StartingSpawner
from gpushare_spawner.spawner.kubernetes.pod_manifest import annotation
from gpushare_spawner.spawner.kubernetes.pods import ended_by_node, exit_code
from gpushare_spawner.spawner.progress import interleaved


class GPUShareSpawner(StartingSpawner):
    """KubeSpawner with shared GPUs.

    Every setting, hook and profile of KubeSpawner works as ever. Compute templates are offered beside ``profile_list``;
    while there are none, it is KubeSpawner in everything.
    """

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """The place in the line and the GPU, then what KubeSpawner has to say."""
        if self._templates() and (self.pending or self._placing is not None or self._start_future is not None):
            async for event in self._story.events():
                yield event
        events = super(GPUShareBase, self).progress()
        if self._profile is not None and self._profile.template is not None:
            events = interleaved(events, self._retries.events())
        async for event in events:
            yield event

    async def poll(self) -> int | None:
        """KubeSpawner's. A pod with a share that its node has ended counts as stopped, and the log says why."""
        if not self._profile_slug and not self._templates():
            status: int | None = await super(GPUShareBase, self).poll()
            return status
        if self._placing is None:
            await self._watch_pods_patiently()
            pod = self._pod()
            if pod is not None and is_session(pod["metadata"].get("labels")):
                # a hub that was killed before it saved its state learns the template from the pod
                self._profile_slug = self._profile_slug or annotation(pod, TEMPLATE)
                ended = ended_by_node(pod) if not self._starting else None
                if ended is not None:
                    code = exit_code(pod)
                    self.log.warning("%s: %s. The server can be started again.", self._log_name, ended)
                    if self.delete_stopped_pods:
                        await self.stop(now=True)
                    return code or 1
        return await super().poll()

    async def stop(self, now: bool = False) -> None:
        """KubeSpawner's. A start that still waits for its share is called off; whoever waits has a look afterwards."""
        await super().stop(now)
        if self._profile_slug and self._templates():
            self.reservations.look_soon()

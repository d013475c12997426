"""The state of one spawn of a pod."""

from __future__ import annotations

from collections.abc import Callable

from gpushare_spawner.spawner.attempt import SpawnAttempt
from gpushare_spawner.spawner.kubernetes.admission import Admission
from gpushare_spawner.spawner.kubernetes.reservations import PodShare
from gpushare_spawner.spawner.options.overrides import Overrides
from gpushare_spawner.spawner.progress import SpawnProgress


class PodAttempt(SpawnAttempt[PodShare]):
    """One spawn of a pod.

    ``give_back`` gets the reservation that is no longer needed, and whether a pod may have been created from it.
    """

    def __init__(self, overrides: Overrides, give_back: Callable[[PodShare, bool], None]) -> None:
        super().__init__(overrides)
        self.retries = SpawnProgress()
        """What the user is told of nodes that did not take the pod, while the pod's own events are told."""
        self.perhaps_created = False
        """Whether the reservation's pod may exist."""
        self.admission: Admission | None = None
        """The pod that is being admitted now; None where none is, or none with a share."""
        self._give_back = give_back

    def reserved(self, reservation: PodShare) -> None:
        """Note the share that was found; no pod exists for it."""
        self.reservation, self.perhaps_created = reservation, False

    def forget_reservation(self) -> None:
        """The share is accounted for elsewhere: by a pod's annotations, or it was given back."""
        self.reservation = None

    def give_back(self) -> None:
        reservation, self.reservation = self.reservation, None
        if reservation is not None:
            perhaps_created, self.perhaps_created = self.perhaps_created, False
            self._give_back(reservation, perhaps_created)

    def cancel(self) -> None:
        super().cancel()
        self.retries.end()

"""What the policy takes and returns are values: they can be kept and compared, and not changed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from gpushare_spawner.idle.policy import Decision, IdleAction, Overdue
from gpushare_spawner.idle.use import Observation


@pytest.mark.parametrize("kind", [Decision, IdleAction, Observation, Overdue])
def test_a_value_cannot_be_changed(kind: type) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(object.__new__(kind), fields(kind)[0].name, None)

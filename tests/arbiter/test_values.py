"""Decisions, views and settings are values: they can be kept and compared, and not changed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from gpushare_spawner.arbiter.session import ArbiterSettings, LeaseGrant, Pace, PageOut, Revoke, SessionView


@pytest.mark.parametrize("kind", [ArbiterSettings, LeaseGrant, Pace, PageOut, Revoke, SessionView])
def test_a_value_cannot_be_changed(kind: type) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(object.__new__(kind), fields(kind)[0].name, None)

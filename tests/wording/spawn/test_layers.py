"""What a card says of a layer."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.wording.spawn_form import terms
from tests.placement.instances import PROFILES


@pytest.mark.parametrize("layer", sorted(LayerName))
def test_card_promises_only_what_something_keeps(layer: str) -> None:
    declared = LAYERS[LayerName(layer)]
    said = terms(declared)
    assert declared.title in said
    assert ("kept within its part of the GPU's memory" in said) is declared.memory.enforced
    assert ("nothing keeps them" in said) is not (declared.memory.enforced or declared.compute.enforced)


def test_card_says_how_large_a_mig_instance_is() -> None:
    mig = LAYERS[LayerName.MIG]
    assert terms(mig, PROFILES["1g.10gb"]) == (
        "By NVIDIA MIG. Each server has a MIG instance (1g.10gb) to itself: 1/7 of one GPU's time and 9.5 GiB of "
        "memory."
    )
    assert terms(mig, PROFILES["7g.80gb"]).endswith("(7g.80gb) to itself: one whole GPU, with 76 GiB of memory.")

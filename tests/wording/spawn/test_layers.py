"""What a card says of a layer."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.wording.spawn.layers import terms


@pytest.mark.parametrize("layer", sorted(LayerName))
def test_card_promises_only_what_something_keeps(layer: str) -> None:
    declared = LAYERS[LayerName(layer)]
    said = terms(declared)
    assert declared.title in said
    assert ("kept within its part of the GPU's memory" in said) is declared.memory.keeps
    assert ("nothing keeps them" in said) is not (declared.memory.keeps or declared.compute.keeps)

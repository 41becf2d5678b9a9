"""A transformer predicts each symbol from those before it."""

from __future__ import annotations

import torch

from ddp_core.model.builders import MODELS
from ddp_core.model.transformer import transformer
from tests.support.wording import refusing


def test_a_transformer_predicts_from_what_comes_before() -> None:
    model = transformer(symbols=9, length=6, width=8, depth=2, heads=2).eval()
    text = torch.randint(0, 9, (3, 6))
    changed = torch.cat((text[:, :4], (text[:, 4:] + 1) % 9), dim=1)
    before, after = model(text), model(changed)
    assert before.shape == (3, 6, 9)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=-1).any()
    torch.testing.assert_close(model(text[:, :2]), before[:, :2])
    with refusing():
        model(torch.zeros(1, 7, dtype=torch.int64))
    for name, options in (("mlp", {"sizes": [3]}), ("small_cnn", {"image_size": 2}), ("transformer", {"width": 10})):
        with refusing():
            MODELS[name](**options)

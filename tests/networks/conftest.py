"""Networks as if trained, which a fresh BatchNorm, close to the identity, would not show."""

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def lived_in():
    """Gives a network norms that do something and statistics of their own, in eval mode."""

    @torch.no_grad()
    def live(model):
        random = torch.Generator().manual_seed(0)
        for part in model.modules():
            if isinstance(part, (nn.BatchNorm2d, nn.LayerNorm)):
                part.weight.uniform_(0.5, 1.5, generator=random)
                part.bias.normal_(0, 0.3, generator=random)
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_(0, 0.2, generator=random)
                part.running_var.uniform_(0.5, 1.5, generator=random)
        return model.eval()

    return live

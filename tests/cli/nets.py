"""A module of networks and loaders, as a user of `featcal collect` has one."""

BUILD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def net():
    generator = torch.Generator().manual_seed(0)
    inner = nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.1)
    model = nn.Sequential(nn.Flatten(), *inner, nn.Linear(8, 3))
    for weight in model.parameters():
        weight.data = 2 * torch.randn(weight.shape, generator=generator)
    return model

def loader(n, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 3, 2, 2, generator=generator)
    labels = torch.randint(0, 3, (n,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=16)

def build():
    return net(), {"val": loader(150, 1), "test": loader(90, 2)}

def more():
    return {"model": net(), "loaders": loader(150, 1), "class_names": ["a", "b", "c"],
            "dataset": "made", "name": "tiny", "head": "4"}

def inner():
    return {"model": net(), "loaders": {"val": loader(150, 1)}, "layer": "2"}

def pixels():
    # Batches end where shards and processes do not; the test split is a plain list.
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    inputs = torch.randn(33, 3, 6, 6, generator=generator)
    labels = torch.randint(-1, 3, (33, 6, 6), generator=generator)
    val = DataLoader(TensorDataset(inputs[:22], labels[:22]), batch_size=5)
    test = list(zip(inputs[22:].split(2), labels[22:].split(2), strict=True))
    return {"model": model, "loaders": {"val": val, "test": test}, "positions": 20,
            "ignore_index": -1}

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)

    def forward(self, ids, weights):
        return self.fc(self.words(ids, per_sample_weights=weights))

def texts():
    sizes = [5, 5, 5, 7, 5]  # of the tokens; a batch of 10 each
    batches = [{"ids": torch.arange(10 * t).view(10, t) % 20, "weights": torch.ones(10, t),
                "labels": torch.arange(10) % 3} for t in sizes]
    torch.manual_seed(0)
    model = Bag()
    model.words.mode = "sum"
    return model, batches

def words():
    model = nn.Sequential(nn.Embedding(9, 8), Mean(), nn.Linear(8, 3))
    return {"model": model, "loaders": [(torch.arange(20).reshape(4, 5) % 9, torch.arange(4) % 3)],
            "dynamic": {"input": {0: "batch", 1: "tokens"}}}

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)

def few():  # a batch each
    return net(), {"val": loader(10, 1), "test": loader(12, 2)}

def empty():
    return net(), {"val": loader(40, 1), "test": loader(0, 2)}

def nothing():
    return None

def unknown():
    return {"model": net(), "loaders": loader(5, 1), "classes": 3}

def broken():
    raise RuntimeError("the disk with the weights is away")

value = 3
"""

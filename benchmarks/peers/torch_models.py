"""The workloads in PyTorch. A model of embeddings is given the module that looks them up."""

import torch
from models import dcn, deepfm
from torch import nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def deep(inputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]


class DeepFM(nn.Module):
    """`models/deepfm.py`; `tables` turns ids into weights [batch, column, 1] and embeddings [batch, column, unit]."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.numbers = nn.Linear(deepfm.NUMBERS, 1)
        self.deep = nn.Sequential(*deep(deepfm.COLUMNS * deepfm.UNITS + deepfm.NUMBERS), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        weights, embeddings = self.tables(ids)
        linear = weights.sum(1) + self.numbers(numbers)
        pairs = 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1, keepdim=True)
        return linear + pairs + self.deep(torch.cat([embeddings.flatten(1), numbers], 1))


class DCN(nn.Module):
    """`models/dcn.py`; `tables` turns ids into the columns' mean rows, side by side: [batch, sum of units]."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.cross = nn.ModuleList(nn.Linear(dcn.WIDTH, dcn.WIDTH) for _ in range(dcn.CROSS_LAYERS))
        self.deep = nn.Sequential(*deep(dcn.WIDTH))
        self.logit = nn.Linear(dcn.WIDTH + 128, 1)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        first = crossed = torch.cat([self.tables(ids), numbers], 1)
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        return self.logit(torch.cat([crossed, self.deep(first)], 1))


class DeepFMTables(nn.Module):
    """With sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(deepfm.VOCABULARY, 1, sparse=True)
        self.embeddings = nn.Embedding(deepfm.VOCABULARY, deepfm.UNITS, sparse=True)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights(ids), self.embeddings(ids)


class DCNTables(nn.Module):
    """With sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(
            nn.EmbeddingBag(vocabulary, dcn.units(vocabulary), mode="mean", sparse=True)
            for vocabulary, _ in dcn.COLUMNS
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([bag(ids[:, part]) for bag, part in zip(self.columns, dcn.parts(), strict=True)], 1)

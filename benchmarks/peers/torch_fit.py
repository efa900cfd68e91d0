"""A contestant in one process: PyTorch, with sparse gradients of embeddings.

python torch_fit.py WORKLOAD BATCH_SIZE
"""

import os
import sys
from itertools import count
from pathlib import Path

import numpy as np
import torch
from gate import Course, end_with_parent
from models import deepfm
from torch import nn
from workloads import DATA_VARIABLE


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class DeepFM(nn.Module):
    """`models/deepfm.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(deepfm.VOCABULARY, 1, sparse=True)
        self.embeddings = nn.Embedding(deepfm.VOCABULARY, deepfm.UNITS, sparse=True)
        self.numbers = nn.Linear(deepfm.NUMBERS, 1)
        inputs = deepfm.COLUMNS * deepfm.UNITS + deepfm.NUMBERS
        self.deep = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        linear = self.weights(ids).sum(1) + self.numbers(numbers)
        embeddings = self.embeddings(ids)
        pairs = 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1, keepdim=True)
        return linear + pairs + self.deep(torch.cat([embeddings.flatten(1), numbers], 1))


def main() -> None:
    end_with_parent()
    workload, batch_size = sys.argv[1], int(sys.argv[2])
    arrays = {
        file.stem: torch.from_numpy(np.load(file)) for file in sorted(Path(os.environ[DATA_VARIABLE]).glob("*.npy"))
    }
    labels = arrays.pop("labels")
    if workload == "mlp":
        model, loss = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-7)
    else:
        model, loss = DeepFM(), nn.BCEWithLogitsLoss()
        optimizer = torch.optim.Adagrad(model.parameters(), 0.05, initial_accumulator_value=0.1, eps=1e-7)
    course = Course()
    for number in count():
        start = number % (len(labels) // batch_size) * batch_size
        rows = slice(start, start + batch_size)
        optimizer.zero_grad()
        loss(model(*(array[rows] for array in arrays.values())), labels[rows]).backward()
        optimizer.step()
        course.stepped()


if __name__ == "__main__":
    main()

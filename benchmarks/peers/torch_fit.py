"""A contestant in one process: PyTorch, with sparse gradients of embeddings, or with the tables of TorchRec.

python torch_fit.py WORKLOAD BATCH_SIZE torch|torchrec
"""

import os
import sys
from itertools import count
from pathlib import Path

import numpy as np
import torch
from gate import Course, end_with_parent
from torch import nn
from torch_models import DCN, DCNTables, DeepFM, DeepFMTables, mlp
from workloads import DATA_VARIABLE

ADAGRAD = {"lr": 0.05, "initial_accumulator_value": 0.1, "eps": 1e-7}


def compiled(workload: str, which: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A model, its loss, and the optimizer of what no table updates by itself."""
    if workload == "mlp":
        model = mlp()
        return model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-3, eps=1e-7)
    head = {"deepfm": DeepFM, "dcn": DCN}[workload]
    if which == "torch":
        model = head({"deepfm": DeepFMTables, "dcn": DCNTables}[workload]())
        updated = list(model.parameters())
    else:
        from torchrec_tables import FusedDCNTables, FusedDeepFMTables

        model = head({"deepfm": FusedDeepFMTables, "dcn": FusedDCNTables}[workload](ADAGRAD))
        updated = [
            weight for name, layer in model.named_children() if name != "tables" for weight in layer.parameters()
        ]
    return model, nn.BCEWithLogitsLoss(), torch.optim.Adagrad(updated, **ADAGRAD)


def main() -> None:
    end_with_parent()
    workload, batch_size, which = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    arrays = {
        file.stem: torch.from_numpy(np.load(file)) for file in sorted(Path(os.environ[DATA_VARIABLE]).glob("*.npy"))
    }
    labels = arrays.pop("labels")
    model, loss, optimizer = compiled(workload, which)
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

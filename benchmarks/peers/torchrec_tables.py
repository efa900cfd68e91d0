"""The embedding tables of the workloads by TorchRec: one lookup for all, Adagrad within the backward pass (FBGEMM).

In deepfm, the two rows of an id are one row of 20, with three unused. To install it, on CPUs:

    pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 tqdm pyre-extensions
    pip install --no-deps torchrec==1.8.0
"""

import torch
from models import dcn, deepfm
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# FBGEMM wants rows of a multiple of 4 elements: one of `weights` and 16 of `embeddings` are one of 20, three unused.
_DEEPFM_UNITS = deepfm.UNITS + 4


class FusedTables(nn.Module):
    """Turns ids into the columns' mean rows, side by side: [batch, sum of units].

    Args:
        tables: whose features are the columns.
        parts: where the ids of each column lie in an example's.
        settings: of Adagrad, as `torch.optim.Adagrad` takes them.
    """

    def __init__(self, tables: list[EmbeddingBagConfig], parts: list[slice], settings: dict[str, float]) -> None:
        super().__init__()
        accumulated = settings["initial_accumulator_value"]
        given = {name: value for name, value in settings.items() if name != "initial_accumulator_value"}
        self._collection = FusedEmbeddingBagCollection(tables, torch.optim.Adagrad, given, device=torch.device("cpu"))
        for state in self._collection.fused_optimizer().state.values():
            for accumulator in state.values():
                accumulator.fill_(accumulated)
        self._names = [name for table in tables for name in table.feature_names]
        self._parts = parts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        counts = torch.tensor([part.stop - part.start for part in self._parts], dtype=torch.int32)
        features = KeyedJaggedTensor(
            self._names,
            torch.cat([ids[:, part].flatten() for part in self._parts]),
            lengths=counts.repeat_interleave(len(ids)),
        )
        return self._collection(features).values()


class FusedDeepFMTables(FusedTables):
    """One table for all columns, as in `models/deepfm.py`."""

    def __init__(self, settings: dict[str, float]) -> None:
        parts = [slice(index, index + 1) for index in range(deepfm.COLUMNS)]
        super().__init__([_config("rows", deepfm.VOCABULARY, _DEEPFM_UNITS, len(parts))], parts, settings)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = super().forward(ids).view(len(ids), deepfm.COLUMNS, _DEEPFM_UNITS)
        return rows[:, :, :1], rows[:, :, 1 : 1 + deepfm.UNITS]


class FusedDCNTables(FusedTables):
    """A table for each column."""

    def __init__(self, settings: dict[str, float]) -> None:
        tables = [
            _config(f"column_{index}", vocabulary, dcn.units(vocabulary), 1)
            for index, (vocabulary, _) in enumerate(dcn.COLUMNS)
        ]
        super().__init__(tables, dcn.parts(), settings)


def _config(name: str, vocabulary: int, units: int, features: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=vocabulary,
        embedding_dim=units,
        feature_names=[f"{name}_{index}" for index in range(features)],
        pooling=PoolingType.MEAN,
    )

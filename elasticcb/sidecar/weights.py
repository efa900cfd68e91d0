"""Loads the weights of a checkpoint into a Keras model, or explains why it can't."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import keras

from elasticcb.checkpoint.manifest import check_variables, read_manifest
from elasticcb.checkpoint.parts import load_slices
from elasticcb.errors import CheckpointError
from elasticcb.layers.install import install
from elasticcb.model.weights import variable_specs
from elasticcb.sharding.partition import partition
from elasticcb.sharding.table_source import whole
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.sidecar.follower import Checkpoint
from elasticcb.sidecar.keras_file import Shape, saved_variables
from elasticcb.sidecar.ledger import CheckpointKind

_SHOWN = 5


class ForeignCheckpointError(CheckpointError):
    """A checkpoint belongs to another model, so later ones would fail as well."""


class WeightsLoader:
    """Loads checkpoints into one model.

    Args:
        model: a built model; its optimizer, if any, gets the checkpoint's version as `iterations`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # paths of the model's variables in a file; computed when needed
        self._places: Mapping[str, Shape] | None = None

    def load(self, checkpoint: Checkpoint) -> None:
        """Sets the model's weights.

        Raises:
            ForeignCheckpointError: it belongs to another model; the message names the variables.
            CheckpointError: it is damaged or was deleted meanwhile. The model may have some of its weights.
        """
        if checkpoint.kind is CheckpointKind.VERSION:
            self._load_version(checkpoint.content)
        else:
            self._load_file(checkpoint)
        iterations = getattr(getattr(self._model, "optimizer", None), "iterations", None)
        if iterations is not None and checkpoint.version is not None:
            iterations.assign(checkpoint.version)

    def _load_version(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        count = len(self._model.weights)
        saved = enumerate(manifest["variables"][:count])
        tables = {index: TableSpec.from_json(variable["table"]) for index, variable in saved if variable.get("table")}
        specs = variable_specs(self._model, tables=tables)
        try:
            check_variables(manifest, specs, folder)
        except CheckpointError as error:
            raise ForeignCheckpointError(str(error)) from error
        (everything,) = partition(specs, 1, split=False)
        part = load_slices(folder, specs, everything)
        for index, variable in enumerate(self._model.weights):
            if index in part.tables:
                table = whole(part.tables[index])
                install(self._model, index, table.ids, table.rows)
            else:
                variable.assign(part.weights[index])

    def _load_file(self, checkpoint: Checkpoint) -> None:
        self._check_file(checkpoint)
        try:
            with warnings.catch_warnings():
                # Evaluation does not need the optimizer's own variables.
                warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
                self._model.load_weights(checkpoint.content)
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"The weights of {checkpoint.path} can't be loaded: {error}") from error

    def _check_file(self, checkpoint: Checkpoint) -> None:
        """Compares variables with the model's, because Keras ignores unknown ones."""
        if self._places is None:
            self._places = _places(self._model)
        saved, own = saved_variables(checkpoint.content), self._places
        foreign = [f"{name} {shape} (in the model: {own.get(name, 'none')})" for name, shape in saved.items()
                   if own.get(name) != shape]  # fmt: skip
        if foreign:
            more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
            raise ForeignCheckpointError(
                f"The checkpoint {checkpoint.path} belongs to another model. It contains "
                f"{'; '.join(foreign[:_SHOWN])}{more}. Use the model that is being trained."
            )
        missing = [name for name in own if name not in saved]
        if missing:
            raise CheckpointError(
                f"The checkpoint {checkpoint.path} lacks {len(missing)} of the model's {len(own)} variables: "
                f"{', '.join(missing[:_SHOWN])}. It is incomplete, or belongs to another model."
            )


def _places(model: keras.Model) -> dict[str, Shape]:
    with tempfile.TemporaryDirectory(prefix="elasticcb-") as folder:
        path = Path(folder, "model.weights.h5")
        model.save_weights(path)
        return saved_variables(path)

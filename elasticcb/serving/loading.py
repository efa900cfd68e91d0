"""Sets the weights of a model to those of a snapshot."""

from __future__ import annotations

import keras

from elasticcb.checkpoint.manifest import MANIFEST, check_variables, read_manifest
from elasticcb.checkpoint.parts import load_model
from elasticcb.checkpoint.remote import Files
from elasticcb.errors import CheckpointError
from elasticcb.layers.table_layers import install
from elasticcb.model.weights import variable_specs
from elasticcb.sharding.table_state import TableSpec, whole


class ForeignCheckpointError(CheckpointError):
    """A checkpoint belongs to another model, so later ones would fail as well."""


def load_version(model: keras.Model, folder: str) -> int:
    """Sets the weights of a built model to those of a version of a job, or of its recovery files; returns the version,
    an older one if files with changes are damaged.

    Args:
        folder: path or URL.

    Raises:
        ForeignCheckpointError: it belongs to another model; the message names the variables.
        CheckpointError: it is damaged or was deleted meanwhile. The model may have some of its weights.
    """
    with Files(folder) as files:
        manifest = read_manifest(files.path(MANIFEST).parent)
        saved = enumerate(manifest["variables"][: len(model.weights)])
        tables = {index: TableSpec.from_json(variable["table"]) for index, variable in saved if variable.get("table")}
        specs = variable_specs(model, tables=tables)
        try:
            check_variables(manifest, specs, folder)
        except CheckpointError as error:
            raise ForeignCheckpointError(str(error)) from error
        part = load_model(files, manifest, specs)
        for index, variable in enumerate(model.weights):
            if index in part.tables:
                table = whole(part.tables[index])
                install(model, index, table.ids, table.rows)
            else:
                variable.assign(part.weights[index])
    return min(int(manifest["version"]), part.version)

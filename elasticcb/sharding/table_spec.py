"""What every process knows of an embedding table: a variable whose rows parameter servers hold by id."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from elasticcb.errors import WireError


@dataclass(frozen=True)
class TableSpec:
    """One table.

    Attributes:
        input_dim: ids are below it; None: any id from 0 on.
        initializer: of rows that nobody has set, as JSON of `keras.saving.serialize_keras_object`; "": all rows are
            given before training.
        seed: of initial rows.
        min_count: lookups in training until an id gets a row; None: as the job's setting says.
        max_age: rows that were not trained for more versions go; None: as the job's setting says.
    """

    input_dim: int | None
    initializer: str = ""
    seed: int = 0
    min_count: int | None = None
    max_age: int | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TableSpec:
        """Raises `WireError` when `text` is none."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise WireError(f"{text!r} does not describe an embedding table: {error}.") from error

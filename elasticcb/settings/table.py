"""What may be set for one embedding table: arguments of its layer, and values of --embedding_tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticcb.settings.choices import RowsDtype
from elasticcb.settings.definition import Kind, Section, build, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class TableOptions(Section):
    """Settings of one embedding table; what is None is set elsewhere, or nowhere."""

    learning_rate_multiplier: float | None = setting(
        None,
        "The rows train with the optimizer's learning rate times this number.",
        above=0,
        because="trainable=False freezes a layer.",
    )
    min_count: int | None = setting(None, "An id gets a row of its own after this many lookups in training.", minimum=1)
    max_age: int | str | None = setting(
        None,
        "Rows that were not trained for this many versions, or this time (30m, 12h, 7d), are removed; 0: never.",
        kind=Kind.AGE,
    )
    max_rows: int | None = setting(
        None, "So many ids have a row, on all parameter servers together; 0: no limit.", minimum=0
    )
    rows_dtype: RowsDtype | None = setting(
        None,
        "Parameter servers hold rows as they are (float32), or rounded stochastically in half the bytes (bfloat16).",
    )

    def held_dtype(self, dtype: str) -> str:
        """Of the rows in a server's memory, in a table of this dtype."""
        return "bfloat16" if self.rows_dtype is RowsDtype.BFLOAT16 and dtype == "float32" else dtype

    def over(self, others: TableOptions) -> TableOptions:
        """These, and where nothing is set here, `others`."""
        own = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(others, **own)


def read_table_options(given: Mapping[str, Any]) -> tuple[TableOptions, list[str]]:
    """The options among `given`, and what is wrong with the others, as sentences."""
    known = {option.field: option for option in settings_of(TableOptions)}
    values, problems = {}, []
    for name, value in given.items():
        if name not in known:
            problems.append(f"A table has no setting {name!r}. Expected one of {', '.join(known)}.")
            continue
        read, expected = known[name].read(value)
        if expected:
            problems.append(f"{name}={value!r} can't be. {expected}")
        else:
            values[name] = read
    options: TableOptions = build(TableOptions, values)
    return options, problems

"""Settings of one embedding table: arguments of its layer, and values in --embedding_tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticcb.settings.choices import RowsDtype
from elasticcb.settings.definition import Kind, Section, build, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class TableOptions(Section):
    """Settings of one embedding table; None: not set here."""

    learning_rate_multiplier: float | None = setting(
        None,
        "Factor by which the optimizer's learning rate is multiplied for these rows.",
        above=0,
        because="To freeze a layer, set trainable=False.",
    )
    min_count: int | None = setting(
        None, "Number of lookups in training after which an id gets its own row.", minimum=1
    )
    max_age: int | str | None = setting(
        None,
        "Remove rows that were not trained for this many versions, or for this time (30m, 12h, 7d); 0: never.",
        kind=Kind.AGE,
    )
    max_rows: int | None = setting(
        None, "Maximum number of rows on all parameter servers together; 0: no limit.", minimum=0
    )
    rows_dtype: RowsDtype | None = setting(
        None,
        "Dtype in which parameter servers store the rows: float32, or bfloat16 with stochastic rounding, which "
        "halves the memory.",
    )

    def held_dtype(self, dtype: str) -> str:
        """Dtype of the rows in a server's memory, for a table of this dtype."""
        return "bfloat16" if self.rows_dtype is RowsDtype.BFLOAT16 and dtype == "float32" else dtype

    def over(self, others: TableOptions) -> TableOptions:
        """These options, with `others` for those that are not set here."""
        own = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(others, **own)


def read_table_options(given: Mapping[str, Any]) -> tuple[TableOptions, list[str]]:
    """The valid options in `given`, and messages about the others."""
    known = {option.field: option for option in settings_of(TableOptions)}
    values, problems = {}, []
    for name, value in given.items():
        if name not in known:
            problems.append(f"An embedding table has no setting {name!r}. Expected one of {', '.join(known)}.")
            continue
        read, expected = known[name].read(value)
        if expected:
            problems.append(f"{name}={value!r} is invalid. {expected}")
        else:
            values[name] = read
    options: TableOptions = build(TableOptions, values)
    return options, problems

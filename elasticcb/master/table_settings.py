"""What holds for each embedding table of a job: what its layer says, else the job's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elasticcb.settings import JobSettings
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_spec import TableSpec


def with_settings(tables: Mapping[int, TableSpec], settings: JobSettings) -> dict[int, TableSpec]:
    """The tables, with all that is set for them.

    Args:
        tables: by index, as their layers describe them.
    """
    embedding = settings.embedding
    of_all = TableOptions(min_count=embedding.min_count, max_age=embedding.max_age)
    return {index: replace(table, options=table.options.over(of_all)) for index, table in tables.items()}

"""The settings of each embedding table: by table name, else by its layer, else for all tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace

from elasticcb.errors import UsageError
from elasticcb.settings import Command, JobSettings, WhenFull
from elasticcb.settings.table import TableOptions, read_table_options
from elasticcb.sharding.table_spec import TableSpec, tables_named
from elasticcb.storage.cold_store import missing_library


def with_settings(
    tables: Mapping[int, TableSpec], paths: Mapping[int, str], settings: JobSettings
) -> dict[int, TableSpec]:
    """The tables with all their settings.

    Raises `UsageError` for a name without a table, and for settings that this job does not support.
    """
    if settings.command is not Command.TRAIN:
        return dict(tables)
    embedding = settings.embedding
    by_name: dict[int, TableOptions] = {}
    for name, given in embedding.tables.items():
        index = _named(name, paths)
        if index in by_name:
            raise UsageError(f"--embedding_tables sets {paths[index]!r} twice. Remove one of them.")
        by_name[index] = read_table_options(given)[0]
        if not tables[index].initializer:
            _check_given_rows(name, by_name[index])
    of_all = TableOptions(min_count=embedding.min_count, max_age=embedding.max_age, rows_dtype=embedding.rows_dtype)
    found = {}
    for index, table in tables.items():
        options = by_name.get(index, TableOptions()).over(table.options).over(of_all)
        found[index] = replace(table, options=options)
    _check_disk(found, settings)
    return found


def _check_disk(tables: Mapping[int, TableSpec], settings: JobSettings) -> None:
    if not tables or settings.embedding.when_full is not WhenFull.DISK:
        return
    if missing := missing_library():
        raise UsageError(f"--embedding_when_full=disk is invalid: {missing}")
    if not settings.embedding.memory_bytes and not any(table.options.max_rows for table in tables.values()):
        raise UsageError(
            "--embedding_when_full=disk moves rows to disk when tables are full, but this job has no limit for its "
            "tables. Set --embedding_memory_bytes, or max_rows of a table; or remove the flag."
        )


def _named(name: str, paths: Mapping[int, str]) -> int:
    """The table with this name: the path of its layer, or the end of it."""
    found = tables_named(name, paths)
    if len(found) == 1:
        return found[0]
    known = ", ".join(repr(path) for path in paths.values()) or "none"
    if found:
        raise UsageError(
            f"--embedding_tables sets {name!r}, which matches {len(found)} tables. The tables of the model are: "
            f"{known}. Use one of these names."
        )
    raise UsageError(
        f"--embedding_tables sets {name!r}, which is not an embedding table of the model. Its tables are: {known}. (A "
        "keras.layers.Embedding becomes a table at --embedding_threshold_bytes.)"
    )


def _check_given_rows(name: str, options: TableOptions) -> None:
    for setting, value in dataclasses.asdict(options).items():
        if value and setting not in ("learning_rate_multiplier", "rows_dtype"):
            raise UsageError(
                f"--embedding_tables sets {setting}={value} for {name!r}, a keras.layers.Embedding, which creates all "
                "its rows at the start. Remove the setting, or use an elasticcb.layers.Embedding."
            )

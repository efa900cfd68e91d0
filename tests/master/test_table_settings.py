from __future__ import annotations

from dataclasses import replace

import pytest

from elasticcb.errors import UsageError
from elasticcb.master.keras_host import with_settings
from elasticcb.settings import ClusterSettings, Command, EmbeddingOptions, JobSettings, RowsDtype, WhenFull
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_state import TableSpec

PATHS = {0: "users", 2: "left/items", 3: "right/items", 5: "films"}


def resolved(tables, command=Command.TRAIN, layer=None, **embedding):
    specs = {index: TableSpec(None, '"zeros"', options=layer or TableOptions()) for index in PATHS}
    specs[5] = TableSpec(100)  # a keras.layers.Embedding
    settings = JobSettings(
        command=command,
        embedding=EmbeddingOptions(tables=tables, **embedding),
        cluster=ClusterSettings(num_ps=2),
    )
    found = with_settings(specs, PATHS, settings)
    return {PATHS[index]: spec.options for index, spec in found.items()}


def test_what_is_set_by_name_wins_over_the_layer_and_this_over_what_is_set_for_all():
    layer = TableOptions(min_count=3, max_rows=10, learning_rate_multiplier=2.0)
    tables = {
        "users": {"max_rows": 0, "max_age": 5, "rows_dtype": "float32"},
        "left/items": {"min_count": 1},
        "right/items/embeddings": {},
    }
    found = resolved(tables, layer=layer, min_count=2, max_age=7, rows_dtype=RowsDtype.BFLOAT16)
    assert found["users"] == replace(layer, max_age=5, max_rows=0, rows_dtype=RowsDtype.FLOAT32)
    assert found["left/items"] == replace(layer, min_count=1, max_age=7, rows_dtype=RowsDtype.BFLOAT16)
    assert found["right/items"] == replace(layer, max_age=7, rows_dtype=RowsDtype.BFLOAT16)


def test_the_end_of_a_path_is_enough_where_no_other_table_has_it():
    paths = {0: "model_3/users", 1: "model_3/top/items", 2: "items"}
    specs = {index: TableSpec(None, '"zeros"') for index in paths}
    tables = {"users": {"max_age": 1}, "top/items": {"max_age": 2}, "items": {"max_age": 3}}
    settings = JobSettings(command=Command.TRAIN, embedding=EmbeddingOptions(tables=tables))
    found = with_settings(specs, paths, settings)
    assert [spec.options.max_age for spec in found.values()] == [1, 2, 3]


def test_rows_go_to_disk_only_where_something_limits_them():
    with pytest.raises(UsageError, match=r"EmbeddingOptions\.memory_bytes, or max_"):
        resolved({}, when_full=WhenFull.DISK)
    assert resolved({}, when_full=WhenFull.DISK, memory_bytes=1000)
    assert resolved({"users": {"max_rows": 9}}, when_full=WhenFull.DISK)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"user": {}},
            r"'user', which is not an embedding table .* are: 'users', 'left/items', 'right/items', 'films'\. ",
        ),
        ({"items": {}}, r"'items', which matches 2 tables.*'right/items', 'films'\. Use one of these"),
        ({"users": {}, "users/embeddings": {}}, "'users' twice"),
        ({"films": {"max_rows": 3}}, r"max_rows=3 for 'films', a keras.layers.Embedding, which creates all its rows"),
    ],
)
def test_names_and_settings_that_fit_no_table_are_refused(tables, message):
    with pytest.raises(UsageError, match=message):
        resolved(tables)
    assert resolved(tables, Command.EVALUATE)["users"] == TableOptions()  # where nothing is trained


def test_layer_of_keras_takes_a_multiplier_and_the_dtype_of_rows():
    given = {"learning_rate_multiplier": 0.5, "rows_dtype": "bfloat16"}
    assert resolved({"films": given})["films"] == replace(
        resolved({})["films"], learning_rate_multiplier=0.5, rows_dtype=RowsDtype.BFLOAT16
    )

from __future__ import annotations

import json

import numpy as np
import pytest

from elasticcb.checkpoint.parts import save_part
from elasticcb.checkpoint.shard_file import Part
from elasticcb.checkpoint.versions import begin_version, finish_version
from elasticcb.cli.main import main
from elasticcb.errors import ExitCode
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.sharding.table_state import TableState

DENSE = VariableSpec("dense/bias", (3,), "float32", True)
BOUNDED = VariableSpec("items/embeddings", (1000, 4), "float32", True, table=TableSpec(1000).to_json())
FREE = VariableSpec("users/embeddings", (0, 2), "float16", True, table=TableSpec(None).to_json())


def write_checkpoint(folder, specs, tables_of_servers, version=100):
    temporary = begin_version(folder, version)
    files = [
        save_part(temporary, Part(version, tables=tables), [], place, len(tables_of_servers))
        for place, tables in enumerate(tables_of_servers)
    ]
    parts = [[] for _ in files]
    return finish_version(temporary, version=version, specs=specs, parts=parts, files=files)


def state(ids, dim, hits, used, slots=("accumulator",), dtype=np.float32):
    rows = np.zeros((len(ids), dim), dtype)
    return TableState(np.array(ids), rows, dict.fromkeys(slots, rows), np.array(hits), np.array(used))


@pytest.fixture
def two_servers(tmp_path):
    return write_checkpoint(
        tmp_path,
        [DENSE, BOUNDED, FREE],
        [
            {1: state([0, 2, 4], 4, [9, 1, 5], [100, 60, 90]), 2: state([10**15], 2, [1], [99], (), np.float16)},
            {1: state([1, 3], 4, [9, 2], [50, 100]), 2: state([], 2, [], [], (), np.float16)},
        ],
    )


def run(capsys, *arguments):
    assert main(["table", *map(str, arguments)]) == ExitCode.DONE
    return capsys.readouterr().out


def test_rows_bytes_hits_and_ages_of_all_servers_are_told(two_servers, capsys):
    assert run(capsys, two_servers.parent, "--top=2").splitlines() == [
        f"{two_servers}, version 100",
        "",
        "items/embeddings",
        "  rows            5 of 1,000 ids (0.5 %), of 4 x float32",
        "  on servers      3, 2",
        "  size            160 bytes: rows 80 bytes and the optimizer's accumulator 80 bytes",
        "  lookups         least 1, 25 % 2, median 5, 75 % 9, 99 % 9, most 9",
        "  last trained    least 0, 25 % 0, median 10, 75 % 40, 99 % 50, most 50 versions ago",
        "  most looked up  id 0: 9 (34.6 %), id 1: 9 (34.6 %)",
        "",
        "users/embeddings",
        "  rows            1, of 2 x float16",
        "  on servers      1, 0",
        "  size            4 bytes: rows 4 bytes",
        "  lookups         least 1, 25 % 1, median 1, 75 % 1, 99 % 1, most 1",
        "  last trained    least 1, 25 % 1, median 1, 75 % 1, 99 % 1, most 1 versions ago",
        "  most looked up  id 1000000000000000: 1 (100 %)",
        "",
        "2 tables: 6 rows, 164 bytes",
    ]


def test_json_has_the_same_as_numbers(two_servers, capsys):
    found = json.loads(run(capsys, two_servers, "--json"))
    assert found["version"] == 100
    items = found["tables"][0]
    assert (items["rows"], items["row_bytes"], items["slot_bytes"], items["top"][2]) == (5, 80, 80, [4, 5])


def test_checkpoint_without_tables_says_so(tmp_path, capsys):
    folder = write_checkpoint(tmp_path, [DENSE], [{}])
    assert "no embedding tables" in run(capsys, folder)


def test_folder_that_holds_neither_a_checkpoint_nor_a_job_is_an_error(tmp_path, capsys):
    assert main(["table", str(tmp_path)]) == ExitCode.WRONG_USAGE
    said = capsys.readouterr().err
    assert f"{tmp_path} is not the folder of a job" in said
    assert "For a checkpoint, pass its URL" in said

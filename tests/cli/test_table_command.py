from __future__ import annotations

import json

import numpy as np
import pytest

from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.checkpoint.versions import begin_version, finish_version, server_file
from elasticcb.cli import table
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.cli.main import main
from elasticcb.errors import ExitCode
from elasticcb.layers.ids import id_of_text
from elasticcb.settings import JOB_FILE, STATUS_FILE, CheckpointSettings, Command, JobSettings
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import TableSpec, TableState
from elasticcb.storage import durable

DENSE = VariableSpec("dense/bias", (3,), "float32", True)
BOUNDED = VariableSpec("items/embeddings", (1000, 4), "float32", True, table=TableSpec(1000).to_json())
FREE = VariableSpec("users/embeddings", (0, 2), "float16", True, table=TableSpec(None).to_json())


def write_checkpoint(folder, specs, tables_of_servers, version=100):
    temporary = begin_version(folder, version)
    files = [
        write_part(temporary / server_file(place, len(tables_of_servers)), Part(version, tables=tables))
        for place, tables in enumerate(tables_of_servers)
    ]
    parts = [[] for _ in files]
    return finish_version(temporary, version=version, specs=specs, parts=parts, files=files)


def state(ids, dim, hits, used, slots=("accumulator",), dtype=np.float32):
    rows = np.zeros((len(ids), dim), dtype)
    held = {name: rows[:, :1].copy() for name in slots}  # one number a row, as of RowWiseAdagrad
    return TableState(np.array(ids), rows, held, np.array(hits), np.array(used))


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
        "  size            100 bytes: rows 80 bytes and the optimizer's accumulator 20 bytes",
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
        "2 tables: 6 rows, 104 bytes",
    ]


def test_json_has_the_same_as_numbers(two_servers, capsys):
    found = json.loads(run(capsys, two_servers, "--json"))
    assert found["version"] == 100
    items = found["tables"][0]
    assert (items["rows"], items["row_bytes"], items["slot_bytes"], items["top"][2]) == (5, 80, 20, [4, 5])


def test_damaged_rows_are_not_shown(two_servers, capsys):
    path = two_servers / server_file(1, 2)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["table", str(two_servers), "--id=1"]) != ExitCode.DONE
    assert f"{path} is damaged" in capsys.readouterr().err


def test_one_table_is_chosen_by_the_name_of_its_layer(two_servers, capsys):
    for name in ("users", "users/embeddings"):
        found = json.loads(run(capsys, two_servers, "--json", f"--table={name}"))
        assert [each["path"] for each in found["tables"]] == ["users/embeddings"]
    assert main(["table", str(two_servers), "--table=user"]) == ExitCode.WRONG_USAGE
    assert "no embedding table 'user'. The tables are: 'items', 'users'." in capsys.readouterr().err


def test_the_row_of_an_id_is_shown_in_every_table(two_servers, capsys):
    assert run(capsys, two_servers, "--id=3").splitlines() == [
        f"id 3 in {two_servers}, version 100",
        "",
        "items/embeddings",
        "  row             0, 0, 0, 0",
        "  norm            0, of 4 values on server 1",
        "  accumulator     norm 0",
        "  lookups         2",
        "  last trained    0 versions ago, at version 100",
        "",
        "users/embeddings",
        "  row             none on server 0: it has its initial value",
    ]
    found = json.loads(run(capsys, two_servers, f"--id={10**15}", "--json", "--table=users"))
    assert found["tables"][0] | {"slot_norms": {}} == {
        "path": "users/embeddings",
        "input_dim": None,
        "server": 0,
        "row": [0.0, 0.0],
        "hits": 1,
        "used": 99,
        "norm": 0.0,
        "slot_norms": {},
        "min_count": 1,
    }
    assert "ids are below 1,000" in run(capsys, two_servers, "--id=1000", "--table=items")


def test_a_string_is_found_by_its_hash_and_an_id_is_given_once(tmp_path, capsys):
    id = id_of_text("Gdańsk")
    folder = write_checkpoint(tmp_path, [FREE], [{0: state([id], 2, [4], [9], (), np.float16)}])
    assert run(capsys, folder, "--text=Gdańsk") == run(capsys, folder, f"--id={id}")
    assert "lookups         4" in run(capsys, folder, "--text=Gdańsk")
    assert run(capsys, folder, "--id=Gdańsk") == run(capsys, folder, f"--id={id}")
    for wrong in (["--text=a", "--id=1"], ["--id=-1"], [f"--id={2**63}"]):
        assert main(["table", str(folder), *wrong]) == ExitCode.WRONG_USAGE
    assert "exclude each other" in capsys.readouterr().err


def ended_job(folder, checkpoints):
    """The folder of a job that wrote into `checkpoints`."""
    settings = JobSettings(command=Command.TRAIN, checkpoint=CheckpointSettings(directory=str(checkpoints)))
    durable.write_document(folder / JOB_FILE, json.loads(settings.to_json()))
    durable.write_document(folder / STATUS_FILE, {"phase": "done"})


def test_of_a_job_that_has_ended_the_newest_checkpoint_is_shown(two_servers, tmp_path, capsys):
    job = tmp_path / "job"
    job.mkdir()
    ended_job(job, two_servers.parent)
    assert main(["table", str(job)]) == ExitCode.DONE
    shown, said = capsys.readouterr()
    assert shown.startswith(f"{two_servers}, version 100\n")
    assert "has ended. This is its newest checkpoint." in said
    ended_job(job, "")
    assert main(["table", str(job)]) == ExitCode.WRONG_USAGE
    assert "wrote no checkpoints (no --checkpoint_dir). Pass a checkpoint" in capsys.readouterr().err


def test_of_a_job_whose_master_is_gone_its_checkpoints_are_named(two_servers, tmp_path, capsys):
    job = tmp_path / "job"
    job.mkdir()
    ended_job(job, two_servers.parent)
    (job / STATUS_FILE).unlink()
    assert main(["table", str(job)]) == ExitCode.WRONG_USAGE
    assert f"To see its newest checkpoint: elasticcb table {two_servers.parent}" in capsys.readouterr().err


def test_of_a_job_on_kubernetes_the_master_s_pod_tells(capsys, monkeypatch):
    class Job(KubernetesJob):
        name, state, directory = "ctr", "running", "/jobs/ctr"

        def __init__(self):
            pass

        def run_beside_master(self, arguments):
            asked.append(arguments)
            return 0, 'a warning\n{"folder": "/jobs/ctr"}\n'

    asked, job = [], Job()
    monkeypatch.setattr(table, "KubernetesAPI", lambda namespace: namespace)
    monkeypatch.setattr(table, "KubernetesJob", lambda api, name: job)
    found = json.loads(run(capsys, "ctr", "--namespace=training", "--table=users", "--id=7", "--json"))
    assert found == {"folder": "ctr"}
    assert asked == [["table", "/jobs/ctr", "--top=5", "--table=users", "--id=7", "--json"]]
    job.state = "done"
    assert main(["table", "ctr", "--namespace=training"]) == ExitCode.WRONG_USAGE
    assert "The job ctr is done. Pass the folder or the URL of its checkpoints" in capsys.readouterr().err


def test_checkpoint_without_tables_says_so(tmp_path, capsys):
    folder = write_checkpoint(tmp_path, [DENSE], [{}])
    assert "no embedding tables" in run(capsys, folder)

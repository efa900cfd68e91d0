"""A setting is defined once: what a new field brings, in a copy of the package that has one more."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import elasticcb

FIELD = """
    toy_limit: int = setting(7, "What the toys may do.", unit="TOYS", minimum=1, maximum=9, because="Toys are few.")
"""
PROGRAM = """
import sys
import elasticcb
from elasticcb.cli.main import main
from elasticcb.settings import ClusterSettings, Command, JobSettings
from elasticcb.errors import UsageError

folder = sys.argv[1]
assert elasticcb.__file__.startswith(folder), elasticcb.__file__
settings = JobSettings(command=Command.TRAIN, cluster=ClusterSettings(toy_limit=8))
assert JobSettings.from_json(settings.to_json()) == settings
main(["train", "--help"])
main(["train", "--toy-limit=0"])
main(["train", f"--config={folder}/job.yaml"])
for options in ({"recovery": elasticcb.RecoveryOptions(toy_limit=0)}, {"toy_limit": 3}):
    try:
        elasticcb.Cluster(**options)
    except UsageError as error:
        print(error)
cluster = elasticcb.Cluster(recovery=elasticcb.RecoveryOptions(toy_limit=9))
print("the line that reads it:", cluster._settings.cluster.toy_limit)
from elasticcb.cli.reference import arguments_tables, options_tables
print(options_tables(), arguments_tables())
"""


def test_new_field_is_a_flag_a_key_an_argument_a_limit_and_a_row_in_the_docs(tmp_path, monkeypatch):
    package = tmp_path / "elasticcb"
    shutil.copytree(Path(elasticcb.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    sections = package / "settings" / "cluster.py"
    head, mark, rest = sections.read_text().partition("class RecoveryOptions(Section):\n")
    docstring, panel, fields = rest.partition("    PANEL = CLUSTER\n")
    sections.write_text(head + mark + docstring + panel + FIELD + fields)
    (tmp_path / "job.yaml").write_text("toy_limit: 10\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    help_line = next(line for line in done.stdout.splitlines() if "--toy_limit" in line)
    for words in ("TOYS", "What the toys may do.", "[default: 7]"):
        assert words in help_line
    assert "--toy_limit=0 can't be. Expected at least 1. Toys are few." in done.stderr
    assert f"--toy_limit=10 (in {tmp_path}/job.yaml) can't be. Expected at most 9. Toys are few." in done.stderr
    for words in (
        "RecoveryOptions(toy_limit=0) can't be. Expected at least 1. Toys are few.",
        "toy_limit=3 has its place in `recovery`: Cluster(recovery=elasticcb.RecoveryOptions(toy_limit=3)).",
        "the line that reads it: 9",
        "| `--toy_limit` | `TOYS` | `7` | all | What the toys may do. |",
        "| `toy_limit` | `7` | What the toys may do. |",
    ):
        assert words in done.stdout

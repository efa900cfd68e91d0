"""The folder that `elasticcb zoo new recommender` makes: its README, command by command, on less data."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from elasticcb.cli.main import main
from jobs import JobProcess
from warm import WarmProcess

pytestmark = pytest.mark.deep

pytest.importorskip("keras_rs", reason="Keras Recommenders is not installed: pip install 'elasticcb[recommender]'")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["zoo", "new", "recommender"]) == 0
    return tmp_path / "recommender"


def run_script(folder: Path, name: str, *arguments: str) -> str:
    errors = folder / "errors.txt"
    run = WarmProcess([*arguments], folder, dict(os.environ), folder / name, stderr=errors)
    printed = run.stdout.read()
    assert run.wait() == 0, errors.read_text()
    return printed


def train(folder: Path, start_job, config: str, **flags: int) -> dict[str, float]:
    """Runs a job of the kit; the metrics of its last evaluation."""
    job: JobProcess = start_job(
        "train", f"--config={config}", *(f"--{name}={value}" for name, value in flags.items()), cwd=folder
    )
    assert job.finish() == 0, job.output
    _, _, after = job.output.partition("Metrics of the last evaluation:\n")
    found = re.findall(r"^  (\w+) +([-+.\de]+)$", after.partition("\n\n")[0], re.MULTILINE)
    return {name: float(value) for name, value in found}


def recall_by_method(folder: Path) -> dict[str, float]:
    found = re.findall(r"^(.+): recall@10 ([.\d]+), NDCG@10 [.\d]+$", run_script(folder, "evaluate.py"), re.MULTILINE)
    return {method: float(recall) for method, recall in found}


def test_recommender_kit_is_trained_evaluated_and_serves(folder, start_job):
    printed = run_script(folder, "data.py", "--users=400", "--items=150", "--ratings=30")
    assert "10800 ratings to train on, 1200 to test, 150 films" in printed
    metrics = train(folder, start_job, "retrieval.yaml", num_workers=1, num_epochs=6, minibatch_size=96)
    assert metrics["in_batch_recall_at_10"] > 0.15  # by chance: 10 of 96
    metrics = train(folder, start_job, "ranking.yaml", num_workers=1, num_epochs=3, minibatch_size=128)
    assert metrics["auc"] > 0.7

    recall = recall_by_method(folder)
    assert recall["two towers"] > 1.3 * recall["popularity"] > 0

    lines = run_script(folder, "serve.py", "u0", "unknown", "--hour=20").splitlines()
    assert [line for line in lines if line.startswith("User")] == [
        "User u0, at 20 o'clock:",
        "User unknown, at 20 o'clock:",
    ]
    recommended = [re.fullmatch(r"  ([01]\.\d\d)  (Film \d+)", line).groups() for line in lines[2:12]]
    assert recommended == sorted(recommended, key=lambda row: -float(row[0]))
    train_rows = (folder / "data" / "train.csv").read_text().splitlines()
    seen = {row.split(",")[1].replace("m", "Film ") for row in train_rows if row.startswith("u0,")}
    assert len(recommended) == 10
    assert not seen & {title for _, title in recommended}


@pytest.mark.timeout(300)
def test_recommender_kit_takes_real_ratings(folder, start_job, shared_data):
    run_script(folder, "data.py", f"--movielens={shared_data / 'ml-100k' / 'u.data'}")
    for config in ("retrieval.yaml", "ranking.yaml"):
        metrics = train(folder, start_job, config, num_epochs=1)
    assert metrics["auc"] > 0.7
    assert "(19" in run_script(folder, "serve.py", "259")  # years of titles


def test_new_kit_replaces_no_file(folder, capsys):
    (folder / "data.py").unlink()
    assert main(["zoo", "new", "recommender", str(folder)]) == 2
    assert "already holds README.md, evaluate.py," in capsys.readouterr().err
    assert not (folder / "data.py").exists()

"""The model files and programs on the pages of README.md and docs/ run."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import numpy as np
import pytest
import yaml

from code_blocks import code_blocks
from deep_cases import deep_but
from elasticcb.cli.main import main
from jobs import job_settings, run_job
from warm import WarmProcess

ROOT = Path(__file__).parents[2]
README, TUTORIAL, MIGRATING = (ROOT / name for name in ("README.md", "docs/tutorial.md", "docs/migrating.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = 96
SCRIPT = "# script"  # first line of a fenced block that is a whole program
MARKER = "# model file"  # first line of a fenced block that is one; names the data if that isn't data.npz


def model_files(page: Path, marker: str = MARKER) -> list[str]:
    """The fenced Python blocks of a page that are whole model files, or begin with another marker."""
    return [block for block in code_blocks(page) if block.startswith(marker)]


def name_of_model(text: str) -> str:
    if "def custom_model(" in text:
        return "custom_model"
    return re.search(r"^class (\w+)\(keras\.Model\)", text, re.MULTILINE).group(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with `data.npz` and `data.csv`: four numbers, and which of the first three is the largest."""
    folder = tmp_path_factory.mktemp("data")
    x = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype("float32")
    y = x[:, :3].argmax(axis=1)
    np.savez(folder / "data.npz", x=x, y=y)
    lines = [",".join(map(str, [*row, label])) for row, label in zip(x, y, strict=True)]
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    return folder


def train(text: str, data: Path, folder: Path, name: str):
    """Trains a model file for two epochs, with all roles in this process."""
    path = folder / f"{name}.py"
    path.write_text(text)
    file = re.search(r"data\.\w+", text.partition("\n")[0])
    origin = str(data / (file.group() if file else "data.npz"))
    settings = job_settings(path, folder / "job", training=origin, validation=origin, minibatch_size=16, num_epochs=2)
    model = replace(settings.model, definition=f"{name}.{name_of_model(text)}")
    return run_job(replace(settings, model=model))


EXAMPLES = [*model_files(ROOT / "docs" / "model_file.md"), *model_files(MIGRATING)]


@pytest.mark.parametrize("number", deep_but(range(len(EXAMPLES)), 0, 6))
def test_model_file_of_a_page_trains(number, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary, _ = train(EXAMPLES[number], data, tmp_path, f"documented_{number}")
    assert summary.records_per_epoch == (RECORDS, RECORDS)
    assert summary.records_evaluated == RECORDS
    assert np.isfinite(list(summary.metrics.values())).all()
    assert ("def eval_metrics_fn" in EXAMPLES[number]) <= (len(summary.metrics) > 1)


def test_job_files_of_the_page_on_migrating_are_jobs_that_kubernetes_would_take(tmp_path):
    files = code_blocks(MIGRATING, r"yaml\n# job\.yaml")
    assert len(files) == 2
    for number, text in enumerate(files):
        (tmp_path / "job.yaml").write_text(text)
        written = tmp_path / f"{number}.yaml"
        assert main(["train", f"--config={tmp_path / 'job.yaml'}", f"--yaml={written}"]) == 0
        for manifest in yaml.safe_load_all(written.read_text()):
            kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_reference_names_the_metrics_of_its_model_with_two_outputs(data, tmp_path):
    text = next(example for example in EXAMPLES if '"kind": {"accuracy"' in example)
    summary, _ = train(text, data, tmp_path, "documented_outputs")
    assert set(summary.metrics) == {"loss", "kind_accuracy", "big_auc", "big_accuracy"}


def test_model_file_of_the_readme_learns_and_is_some_twenty_lines_long(tmp_path):
    (text,) = model_files(README)
    assert len([line for line in text.splitlines()[1:] if line.strip()]) <= 20
    path = tmp_path / "flowers.py"
    path.write_text(text)
    iris = ROOT / "model_zoo" / "iris"
    summary, _ = run_job(
        job_settings(
            path,
            tmp_path / "job",
            training=str(iris / "train.csv"),
            validation=str(iris / "test.csv"),
            reader_params={"header": True},
            minibatch_size=8,
            num_epochs=20,
        )
    )
    assert summary.records_per_epoch == (120,) * 20
    assert summary.metrics["accuracy"] > 0.8


SCRIPTS = {f"{page.name}-{number}": page for page in PAGES for number in range(len(model_files(page, SCRIPT)))}


def run_script(folder: Path, name: str) -> list[str]:
    """The lines that a program prints in its folder."""
    errors = folder / "errors.txt"
    run = WarmProcess([], folder, dict(os.environ), folder / name, stderr=errors)
    printed = run.stdout.read().splitlines()
    assert run.wait() == 0, errors.read_text()
    return printed


@pytest.mark.parametrize("name", deep_but(SCRIPTS, "README.md-0", "python_api.md-0"))
def test_program_of_a_page_runs_and_prints_what_its_last_lines_say(name, tmp_path):
    text = model_files(SCRIPTS[name], SCRIPT)[int(name.rpartition("-")[2])]
    (tmp_path / "program.py").write_text(text)
    assert run_script(tmp_path, "program.py") == re.findall(r"^# prints: (.*)$", text, re.MULTILINE)


@pytest.mark.deep
def test_tutorial_ends_with_a_model_that_is_served(tmp_path, start_job):
    files = dict(code_blocks(TUTORIAL, r"\w+\n# (\w+\.\w+)"))
    assert list(files) == ["make_clicks.py", "clicks.py", "job.yaml", "serve.py"]
    fewer = files["make_clicks.py"].replace("240_000", "24_000").replace("200_000", "20_000")
    for name, text in (files | {"make_clicks.py": fewer}).items():
        (tmp_path / name).write_text(text)
    assert run_script(tmp_path, "make_clicks.py") == []
    job = start_job("train", f"--config={tmp_path / 'job.yaml'}")
    assert job.finish() == 0, job.output
    assert float(re.search(r"^  auc +([\d.]+)", job.output, re.MULTILINE).group(1)) > 0.6
    best = run_script(tmp_path, "serve.py")
    assert len(best) == 5
    assert all(re.fullmatch(r"item-\d+ \d\.\d\d", line) for line in best)

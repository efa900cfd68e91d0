"""The model files and programs on the pages of README.md and docs/ run."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import fsspec
import kubernetes_validate
import numpy as np
import pytest
import yaml
from stores import S3Server

from code_blocks import code_blocks
from deep_cases import deep_but
from elasticcb.cli.main import main
from jobs import job_settings, run_job
from warm import WarmProcess

ROOT = Path(__file__).parents[2]
README, TUTORIAL, MIGRATING = (ROOT / name for name in ("README.md", "docs/tutorial.md", "docs/migrating.md"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = 96
SCRIPT = "# script"  # first line of a fenced block that is a whole program; "# script, with NAME" needs a package
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


EXAMPLES = model_files(ROOT / "docs" / "model_file.md")


@pytest.mark.parametrize("number", deep_but(range(len(EXAMPLES)), 0))
def test_model_file_of_a_page_trains(number, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary, _ = train(EXAMPLES[number], data, tmp_path, f"documented_{number}")
    assert summary.records_per_epoch == (RECORDS, RECORDS)
    assert summary.records_evaluated == RECORDS
    assert np.isfinite(list(summary.metrics.values())).all()
    assert ("def eval_metrics_fn" in EXAMPLES[number]) <= (len(summary.metrics) > 1)


def test_job_file_of_the_page_on_migrating_is_a_job_that_kubernetes_would_take(tmp_path):
    (text,) = code_blocks(MIGRATING, r"yaml\n# job\.yaml")
    (tmp_path / "job.yaml").write_text(text)
    written = tmp_path / "written.yaml"
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
    for package in re.findall(rf"^{SCRIPT}, with (\w+)$", text.partition("\n")[0]):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'elasticcb[test]'")
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


def run_commands(block: str, start_job) -> str:
    """What the `elasticcb` commands of a shell block print, one after another."""
    printed = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("elasticcb "):
            job = start_job(*shlex.split(line, comments=True)[1:])
            assert job.finish() == 0, job.output
            printed.append(job.output)
    assert printed
    return "\n".join(printed)


@pytest.mark.deep
def test_days_are_trained_one_after_the_other_also_with_a_new_feature(tmp_path, start_job):
    page = ROOT / "docs" / "daily_training.md"
    files = dict(code_blocks(page, r"\w+\n# (\w+\.\w+)"))
    assert list(files) == ["daily.py", "job.yaml"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "data").mkdir()
    random = np.random.default_rng(0)
    likes = random.random(40) < 0.5
    for day in (26, 27, 28):
        users, items = random.integers(40, size=2_000), random.integers(10, size=2_000)
        lines = [f"u{u},i{i},{'phone' if u % 2 else 'desk'},{likes[u]:d}" for u, i in zip(users, items, strict=True)]
        path = tmp_path / "data" / f"2026-11-{day}.csv"
        path.write_text("\n".join(["user,item,device,click", *lines]) + "\n")
    first, following, new = code_blocks(page, "sh")
    run_commands(first, start_job)
    printed = run_commands(following, start_job)
    assert float(re.search(r"^  auc +([\d.]+)", printed, re.MULTILINE)[1]) > 0.9  # of the day that was not trained yet
    features = '["user", "item", "device"]'
    assert f"`FEATURES` becomes `{features}`" in page.read_text(encoding="utf-8")
    (tmp_path / "daily.py").write_text(files["daily.py"].replace('["user", "item"]', features))
    assert "Loaded 5 of 7 variables from " in run_commands(new, start_job)
    exported = sorted((tmp_path / "models" / "clicks").glob("*/saved_model.pb"))
    assert [model.parent.name for model in exported] == ["20261126", "20261127", "20261128"]


@pytest.mark.deep
def test_job_of_which_everything_is_in_s3(tmp_path, start_job, monkeypatch):
    (block,) = code_blocks(ROOT / "docs" / "remote_storage.md", "sh")
    (tmp_path / "model_zoo").symlink_to(ROOT / "model_zoo")
    with S3Server("flowers") as server:
        store = fsspec.filesystem("s3", **server.options)
        for name in ("train.csv", "test.csv"):
            store.put_file(str(ROOT / "model_zoo" / "iris" / name), f"flowers/data/{name}")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert "accuracy" in run_commands(block, start_job)
        assert "done" in run_commands("elasticcb status s3://flowers/jobs/first", start_job)
        assert store.glob("flowers/checkpoints/version-*/manifest.json")

"""The notebooks run from beginning to end, and what is saved in them is fit to be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: pip install 'elasticcb[test]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'elasticcb[test]'")
pytest.importorskip("keras_rs", reason="Keras Recommenders is not installed: pip install 'elasticcb[recommender]'")
for _module in ("ipykernel", "matplotlib"):
    pytest.importorskip(_module, reason=f"{_module} is not installed: pip install 'elasticcb[test]'")

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.ipynb"
KIT = ROOT / "elasticcb" / "cli" / "zoo" / "templates" / "recommender"
NOTEBOOKS = [TUTORIAL, KIT / "recommender.ipynb"]
LARGEST = 150_000  # bytes of a file, with its plots


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    """Neither reads nor writes the settings of who runs the tests."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def printed_by(path: Path, folder: Path) -> str:
    """Runs a notebook in a folder; what its cells print, without errors and warnings."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    return "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_saved_with_plots_and_without_traces_of_a_machine(path):
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    text = "".join(output.get("text", "") for output in outputs(notebook))
    for trace in ("/work", "/tmp", "/home", "/root", "Warning", "WARNING", "Traceback"):
        assert trace not in text
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs(notebook))


@pytest.mark.timeout(300)
def test_tutorial_runs_and_trains_on_after_a_worker_is_killed(tmp_path):
    printed = printed_by(TUTORIAL, tmp_path)
    assert "1000 batches were trained" in printed
    for name in ("accuracy", "loss"):
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{name}: ") and "by Keras" in line)
        on_cluster, by_keras = (float(part.split()[0]) for part in line.partition(": ")[2].split(", "))
        assert on_cluster == pytest.approx(by_keras, abs=2e-6)
    assert (tmp_path / "model.keras").exists()


@pytest.mark.timeout(300)
def test_notebook_of_the_recommender_kit_runs(tmp_path):
    folder = tmp_path / "recommender"
    shutil.copytree(KIT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    from test_recommender import run_script

    run_script(folder, "data.py", "--users=200", "--items=100")
    printed = printed_by(folder / "recommender.ipynb", folder)
    assert "Epoch 5/5" in printed
    assert "For user u0:" in printed

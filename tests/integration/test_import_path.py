"""Master, workers and servers import the same code, whatever lies in the folder where a job is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elasticcb.process.import_path import adopt_path, python_code
from jobs import linear_data, train_flags, write_model_file

# `random` and `numpy` are names of modules that all processes import, `surprise` is one that none has.
TRAPS = ("random.py", "numpy.py", "surprise.py", "elasticcb/__init__.py")
COMMAND = str(Path(sys.executable).with_name("elasticcb"))

MODEL = """
    import json
    import os
    import sys

    import keras

    import beside
    from package import inside

    with open(os.environ["PATHS"], "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "path": sys.path, "argv": sys.argv[1:]}) + "\\n")
    try:
        import surprise
    except ImportError:
        pass
    else:
        raise RuntimeError("the current folder is on the import path")

    def custom_model():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(beside.UNITS)])

    def loss(labels, predictions):
        return inside.loss(labels, predictions)

    def optimizer():
        return keras.optimizers.SGD(0.01)
"""


@pytest.fixture
def trap(tmp_path):
    """A folder in which Python finds the wrong modules, when it looks there."""
    folder = tmp_path / "trap"
    for name in TRAPS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"raise RuntimeError('{name} of the current folder was imported')\n")
    return folder


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A model file with helpers beside it; its processes note their import paths in `paths`."""
    folder = tmp_path / "zoo"
    write_model_file(folder, MODEL)
    (folder / "beside.py").write_text("UNITS = 1\n")
    (folder / "package").mkdir()
    (folder / "package" / "inside.py").write_text(
        "import keras\ndef loss(labels, predictions):\n    return keras.losses.huber(labels, predictions)\n"
    )
    linear_data(folder, train=400, test=80)
    monkeypatch.setenv("PATHS", str(tmp_path / "paths"))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return folder


def paths_of(tmp_path):
    """By process, the import path that it had."""
    noted = map(json.loads, (tmp_path / "paths").read_text().splitlines())
    return {each["pid"]: each["path"] for each in noted}


def run(*command, cwd):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_current_folder_is_on_the_import_path_of_no_process(tmp_path, trap, zoo):
    run(COMMAND, "train", *train_flags(zoo, "model_file", job_dir=tmp_path / "job"), cwd=trap)
    paths = paths_of(tmp_path)
    assert len(paths) == 3  # servers without tables do not open the program
    (path,) = {tuple(path) for path in paths.values()}
    assert path[0] == str(zoo)
    assert not {"", str(trap)} & set(path)


def test_python_m_leaves_the_current_folder_out(trap):
    for name in ("elasticcb/__init__.py", "random.py", "numpy.py"):  # by which Python itself would go wrong
        (trap / name).unlink()
    (trap / "elasticcb").rmdir()
    (trap / "rich_click.py").write_text("raise RuntimeError('the current folder is on the import path')\n")
    assert run(sys.executable, "-m", "elasticcb", "--version", cwd=trap).startswith("elasticcb, version")


def test_a_process_started_from_nothing_does_not_look_into_the_current_folder(trap):
    code = python_code("elasticcb.cli.main", True)
    assert run(sys.executable, "-c", code, "--version", cwd=trap).startswith("elasticcb, version")


# All else that the processes of a job import, Keras or the program's own process does, too: there the file would do
# harm without any job.
@pytest.mark.deep  # test_python_api_processes.py has a program with a module beside it
@pytest.mark.parametrize("forked", [True, False])
def test_a_file_beside_a_program_takes_no_place_of_what_its_job_needs_and_workers_have_its_path_in_order(
    tmp_path, trap, forked
):
    for name in ("click", "rich_click"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the user was imported')\n")
    (tmp_path / "mine.py").write_text("UNITS = 3\n")
    write_model_file(
        tmp_path,
        """
        import sys

        sys.path.insert(0, "first")
        import keras
        import numpy as np

        import elasticcb
        from elasticcb.cluster.local import backend

        def path():
            import sys
            return list(sys.path)

        def units():
            import mine
            return mine.UNITS

        if __name__ == "__main__":
            if sys.argv[2] == "False":
                backend.can_fork = lambda: False
            import mine

            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(mine.UNITS)])
            model.compile("sgd", "mse")
            with elasticcb.Cluster(num_workers=1, num_ps=1, job_dir=sys.argv[1]) as cluster:
                cluster.fit(model, np.ones((16, 2)), np.ones((16, 3)), verbose=0)
                assert cluster.schedule(units).fetch() == 3
                assert cluster.schedule(path).fetch() == sys.path
                sys.path.insert(0, "/later")
                found = cluster.schedule(path).fetch()
                assert found == sys.path, (found, sys.path)
        """,
        "program",
    )
    run(sys.executable, tmp_path / "program.py", tmp_path / "job", str(forked), cwd=trap)


def test_a_folder_that_stands_first_in_one_process_does_so_in_the_other(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/own", "/shared"])
    adopt_path(["/script", "/shared", "/more", "/own"])
    assert sys.path == ["/script", "/own", "/shared", "/more"]

"""The built package, in an empty folder."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import elasticcb, keras, numpy as np

    print(elasticcb.__file__)
    x = np.random.default_rng(0).normal(size=(640, 4)).astype("float32")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
    with elasticcb.Cluster(2) as cluster:
        print(len(cluster.fit(model, x, x.sum(axis=1, keepdims=True), epochs=3, verbose=0).epoch))
"""


@pytest.mark.deep
def test_program_runs_from_the_wheel_in_an_empty_folder(tmp_path):
    def run(*command, **more):
        done = subprocess.run([sys.executable, *map(str, command)], text=True, capture_output=True, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    root = Path(__file__).parents[2]
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "dist", root)
    (wheel,) = (tmp_path / "dist").iterdir()
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "program.py").write_text(textwrap.dedent(PROGRAM))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    file, epochs = run("program.py", cwd=tmp_path / "empty", env=environment).split()
    assert Path(file).is_relative_to(tmp_path / "site")
    assert epochs == "3"

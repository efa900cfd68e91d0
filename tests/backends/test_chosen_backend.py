"""Which backend a process uses, and who asks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elasticcb.cluster.external import command_line
from elasticcb.cluster.role import RoleProcess
from elasticcb.compute import registry
from elasticcb.errors import UsageError

PACKAGE = Path(registry.__file__).parents[1]
# Layers, too, ask what a variable is, and not what Keras runs on.
ASKS = re.compile(r"keras\.backend\.backend\(|KERAS_BACKEND\W*[\])]|environ.*KERAS_BACKEND")


def test_only_the_registry_asks_what_keras_runs_on():
    asking = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if ASKS.search(path.read_text("utf-8"))}
    others = {
        "callbacks/saved_model_exporter.py",  # sets it for a process that it starts
        "data/batch_sources/iterables.py",  # as Keras's `fit` iterates
    }
    assert asking <= {"compute/registry.py", *others}
    assert 'VARIABLE = "KERAS_BACKEND"' in (PACKAGE / "compute" / "registry.py").read_text("utf-8")


def chosen(tmp_path, **environment):
    """What a new process says, which has not imported Keras."""
    program = "from elasticcb.compute.registry import *; print(chosen_backend()); check_chosen_backend()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KERAS_")}
    clean |= {"HOME": str(tmp_path)} | environment
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True)
    return done.stdout.strip(), done.stderr


def test_a_backend_is_chosen_by_the_environment_else_by_the_file_of_keras_else_it_is_tensorflow(tmp_path):
    assert chosen(tmp_path)[0] == "tensorflow"
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text(json.dumps({"backend": "jax"}))
    assert chosen(tmp_path)[0] == "jax"
    assert chosen(tmp_path, KERAS_BACKEND="torch")[0] == "torch"
    assert chosen(tmp_path, KERAS_HOME=str(tmp_path / "elsewhere"))[0] == "tensorflow"


def test_what_is_unknown_or_not_installed_is_told_before_keras_is_imported(tmp_path, monkeypatch):
    name, error = chosen(tmp_path, KERAS_BACKEND="openvino")
    assert name == "openvino"
    assert "Keras runs on 'openvino' here. Expected 'tensorflow' or 'jax' or 'torch'" in error
    monkeypatch.setitem(registry.BACKENDS, "no_such_package", ("no_module", "NoClass"))
    monkeypatch.setattr(registry, "chosen_backend", lambda: "no_such_package")
    monkeypatch.setattr(sys, "modules", {name: each for name, each in sys.modules.items() if name != "keras"})
    with pytest.raises(UsageError, match=r"'no_such_package' is not installed\. Install it \(pip install"):
        registry.check_chosen_backend()


def test_servers_run_on_tensorflow_and_workers_on_what_the_job_runs_on():
    worker, ps = (RoleProcess(role=role, master="127.0.0.1:1", keras_backend="jax") for role in ("worker", "ps"))
    assert [each.environment("INFO")["KERAS_BACKEND"] for each in (worker, ps)] == ["jax", "tensorflow"]
    # As those who start processes themselves are told.
    begins = "KERAS_BACKEND=jax ELASTICCB_JOB_TOKEN=TOKEN elasticcb worker"
    assert command_line(worker, "TOKEN").startswith(begins)
    assert command_line(ps, "TOKEN").startswith("ELASTICCB_JOB_TOKEN=TOKEN elasticcb ps")


def test_a_job_is_resumed_on_its_backend_unless_the_user_has_chosen_one(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    registry.keep_backend("jax")
    assert os.environ["KERAS_BACKEND"] == "jax"
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    registry.keep_backend("jax")
    assert os.environ["KERAS_BACKEND"] == "torch"
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")


def test_a_worker_on_another_backend_than_its_job_is_refused():
    registry.check_backend_of_job("tensorflow")
    registry.check_backend_of_job("")  # a master of an earlier release does not say it
    with pytest.raises(UsageError, match=r"'tensorflow' in this worker, but on 'jax' .* KERAS_BACKEND=jax"):
        registry.check_backend_of_job("jax")


def test_a_process_whose_keras_is_another_can_t_be_a_server(monkeypatch):
    monkeypatch.setattr(registry, "chosen_backend", lambda: "torch")
    with pytest.raises(UsageError, match=r"Keras runs on 'torch' in this process, but parameter servers need"):
        registry.use_backend_of_servers()

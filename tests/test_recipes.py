"""The recipes of CONTRIBUTING.md: each is followed in a copy of the package, file by file, and what it adds works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[1]


class Copy:
    """A copy of the package that a recipe changes.

    Attributes:
        folder: that it is in.
        touched: the files that were changed or made, as "elasticcb/…".
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.touched: set[str] = set()
        shutil.copytree(ROOT / "elasticcb", folder / "elasticcb", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "lint" / "reference.py", folder)

    def make(self, path: str, text: str) -> None:
        file = self.folder / path
        assert not file.exists()
        file.write_text(textwrap.dedent(text).lstrip())
        self.touched.add(path)

    def insert(self, path: str, before: str, text: str) -> None:
        """Puts lines before the only place of `before`."""
        file = self.folder / path
        content = file.read_text()
        assert content.count(before) == 1, f"{path} has {before!r} {content.count(before)} times"
        file.write_text(content.replace(before, text + before))
        self.touched.add(path)

    def run(self, code: str) -> str:
        """What a program prints that imports the copy."""
        program = self.folder / "program.py"
        program.write_text(textwrap.dedent(code))
        done = subprocess.run([sys.executable, str(program)], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def files_of(recipe: str) -> set[str]:
    """The files of the package that CONTRIBUTING.md names for a recipe."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^### {recipe}\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`(elasticcb/[\w/]+\.pyi?)`", section))


def test_a_data_format(copy):
    copy.make(
        "elasticcb/data/my_format.py",
        '''
        """Records of four bytes."""

        from collections.abc import Iterator
        from typing import Any

        from elasticcb.data.content import File
        from elasticcb.data.file_index import FileIndex
        from elasticcb.data.file_reader import FileReader
        from elasticcb.data.stacking import object_array


        class _OpenedMyFormat:
            complete = True
            layout = ""
            memory_bytes = disk_bytes = 0

            def __init__(self, file: File) -> None:
                self.file = file
                self.count = file.identity.size // 4

            def index(self) -> FileIndex:
                return FileIndex(self.file.identity, self.count)

            def read(self, start: int, end: int, size: int) -> Iterator[Any]:
                for first in range(start, end, size):
                    last = min(first + size, end)
                    data = self.file.read(4 * first, 4 * last)
                    yield object_array([data[at : at + 4] for at in range(0, len(data), 4)])


        class MyFormatReader(FileReader):
            def _open(self, file: File, index: FileIndex | None, enough: int | None) -> _OpenedMyFormat:
                return _OpenedMyFormat(file)
        ''',
    )
    copy.insert(
        "elasticcb/data/formats.py",
        '    Format("parquet",',
        '    Format("my_format", (".four",), "my_format.MyFormatReader"),\n',
    )
    printed = copy.run(
        """
        from pathlib import Path
        from elasticcb.data.formats import open_reader

        Path("a.four").write_bytes(b"aaaabbbbcccc")
        reader = open_reader("a.four")
        (source,) = reader.sources()
        print(source.count, [chunk.tolist() for chunk in reader.read_chunks(source.name, 1, 3)])
        """
    )
    assert printed == "3 [[b'bbbb', b'cccc']]\n"
    assert copy.touched == files_of("A data format")


def test_a_callback(copy):
    copy.make(
        "elasticcb/callbacks/my_callback.py",
        '''
        """Counts epochs."""

        import keras


        class MyCallback(keras.callbacks.Callback):
            epochs = 0

            def on_epoch_end(self, epoch, logs=None):
                self.epochs += 1
        ''',
    )
    copy.insert(
        "elasticcb/callbacks/__init__.pyi",
        "from .saved_model_exporter import",
        "from .my_callback import MyCallback as MyCallback\n",
    )
    printed = copy.run(
        """
        import sys
        import elasticcb.callbacks as callbacks

        assert "keras" not in sys.modules
        callback = callbacks.MyCallback()
        callback.on_epoch_end(0)
        print("MyCallback" in callbacks.__all__, callback.epochs)
        """
    )
    assert printed == "True 1\n"
    assert copy.touched == files_of("A callback")


def test_a_setting(copy):
    copy.insert(
        "elasticcb/settings/cluster.py",
        "    lost_updates: LostUpdates = setting(",
        '    toy_limit: int = setting(7, "Toys.", unit="TOYS", minimum=1, maximum=9, because="Toys are few.")\n',
    )
    (copy.folder / "job.yaml").write_text("toy_limit: 10\n")
    printed = copy.run(
        """
        import contextlib
        import os
        import sys

        os.environ["COLUMNS"] = "300"
        import elasticcb
        from elasticcb.cli.main import main
        from elasticcb.errors import UsageError
        from elasticcb.settings import ClusterSettings, Command, JobSettings
        from reference import arguments_table, options_tables

        settings = JobSettings(command=Command.TRAIN, cluster=ClusterSettings(toy_limit=8))
        assert JobSettings.from_json(settings.to_json()) == settings
        with contextlib.redirect_stderr(sys.stdout):
            for flags in ("--help-all", "--toy-limit=0", "--config=job.yaml"):
                main(["train", flags])
        for options in ({"recovery": elasticcb.RecoveryOptions(toy_limit=0)}, {"toy_limit": 3}):
            try:
                elasticcb.Cluster(**options)
            except UsageError as error:
                print(error)
        elasticcb.Cluster(recovery=elasticcb.RecoveryOptions(toy_limit=9))
        print(options_tables(), arguments_table())
        """
    )
    help_line = next(line for line in printed.splitlines() if "--toy_limit" in line)
    for words in ("TOYS", "Toys.", "[default: 7]"):
        assert words in help_line
    for words in (
        "--toy_limit=0 is invalid. Expected at least 1. Toys are few.",
        f"--toy_limit=10 (in {copy.folder}/job.yaml) is invalid. Expected at most 9. Toys are few.",
        "RecoveryOptions(toy_limit=0) is invalid. Expected at least 1. Toys are few.",
        "toy_limit=3 belongs in `recovery`: Cluster(recovery=elasticcb.RecoveryOptions(toy_limit=3)).",
        "| `--toy_limit=TOYS` | `7` | all | Toys. |",
        "| `recovery=elasticcb.RecoveryOptions(…)` | `toy_limit`, ",
    ):
        assert words in printed
    assert copy.touched == files_of("A setting") == {"elasticcb/settings/cluster.py"}


def test_a_compute_backend(copy):
    copy.make(
        "elasticcb/compute/my_framework.py",
        """
        from elasticcb.compute.backend import Backend


        class MyFramework(Backend):
            def build(self, spec, model, batch, mode): ...

            def outputs(self, model, batch): ...

            def find_tables(self, model, batch, mode, allowed, validation=None): ...

            def computation(self, held): ...
        """,
    )
    copy.insert(
        "elasticcb/compute/registry.py",
        '    "tensorflow": (',
        '    "my_framework": ("elasticcb.compute.my_framework", "MyFramework"),\n',
    )
    printed = copy.run(
        """
        import keras

        from elasticcb.compute.registry import backend

        keras.backend.backend = lambda: "my_framework"
        print(type(backend()).__name__)
        """
    )
    assert printed == "MyFramework\n"
    assert copy.touched == files_of("A compute backend")


def test_an_update_rule(copy):
    copy.insert(
        "elasticcb/settings/training.py",
        "    non_finite: NonFinite = setting(",
        '    my_rule: bool = setting(False, "Merges every second movement with the next one.")\n',
    )
    copy.insert(
        "elasticcb/ps/update_policy.py",
        "def policy_of(",
        textwrap.dedent(
            """
            class MyRule(AtOnce):
                def due(self, lost_workers: Collection[int]) -> list[PushName]:
                    return [] if len(self.waiting) % 2 else self.flush()


            """
        ).lstrip(),
    )
    copy.insert(
        "elasticcb/ps/update_policy.py",
        "    if training.updates is Updates.ASYNC:\n",
        "    if training.my_rule:\n        return MyRule()\n",
    )
    printed = copy.run(
        """
        from elasticcb.ps.update_policy import PushName, policy_of
        from elasticcb.settings import TrainingSettings

        policy = policy_of(TrainingSettings(my_rule=True), float)
        for sequence in (1, 2):
            policy.come(PushName(0, sequence))
            print(len(policy.due(())))
        """
    )
    assert printed.split() == ["0", "2"]
    assert copy.touched == files_of("An update rule")


def test_a_metric(copy):
    copy.insert(
        "elasticcb/master/prometheus.py",
        '    yield _gauge("tasks",',
        '    yield _gauge("my_metric", "Tasks of all types and states.", sum(seen.tasks.values()))\n',
    )
    printed = copy.run(
        """
        from prometheus_client import CollectorRegistry, generate_latest

        from elasticcb.cluster.inprocess import InProcessCluster
        from elasticcb.master.master import Master
        from elasticcb.master.prometheus import JobCollector
        from elasticcb.settings import ClusterSettings

        registry = CollectorRegistry()
        registry.register(JobCollector(Master(ClusterSettings(), InProcessCluster(print), print).observe))
        (line,) = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("elasticcb_my")]
        print(line)
        """
    )
    assert printed == "elasticcb_my_metric 0.0\n"
    assert copy.touched == files_of("A metric")

"""Holds the rooms of the package: what belongs in each, and that imports go one way, by reading the imports.

`python tests/test_layering.py` writes the map of the rooms into docs/overview.md.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "elasticcb"
OVERVIEW = ROOT / "docs" / "overview.md"

# Floor by floor, in the order of imports: a room imports from rooms on the floors above it in this table, also within
# functions and for types alone. Rooms of one floor do not know each other.
FLOORS: tuple[dict[str, str], ...] = (
    {"": "what everybody uses: `errors`, `settings`, `keras_private`"},
    {"proto": "the messages and services, generated from `proto/elasticcb.proto`"},
    {"process": "a single process: logs, signals, limits, statistics"},
    {"security": "access to a job: its token, and certificates"},
    {"rpc": "bytes between processes: servers, connections, frames; shared memory on one machine, streams to others"},
    {"tf": "uses of TensorFlow besides Keras: tensors and arrays, variables, compiled functions"},
    {"sharding": "which server holds what: dense weights, and rows of embedding tables"},
    {"optimizers": "inspects Keras optimizers: their variables, their state, and how it can be split"},
    {"serialization": "Keras and Python objects as bytes"},
    {"storage": "local and remote folders and files"},
    {"checkpoint": "persistent state of a model: the files of snapshots"},
    {"data": "records and batches: `reader.py` is the interface, one format per file"},
    {"callbacks": "`placement.py` says where hooks run, `dispatch.py` calls them; one callback per file"},
    {"model": "the user's model, its weights, losses, metrics and input pipeline"},
    {"predictions": "predictions as columns and as files"},
    {"layers": "embedding layers whose rows are on the servers"},
    {"compute": "the interface to the compute framework (`backend.py`), one backend per file or folder"},
    {"serving": "exports for serving: their folder, what writes and what reads them"},
    {"clients": "how the processes of a job call each other"},
    {"dashboard": "the live dashboard of a job: a process that queries the master and serves browsers"},
    {"cluster": "backends that start processes: this machine, Kubernetes, Ray, threads, people"},
    {
        "master": "hands out tasks, evaluates, watches processes; its state machines are pure",
        "worker": "runs batches: data in, gradients out",
        "ps": "a parameter server: holds weights and rows, and applies gradients",
    },
    {"roles": "the main functions of a job's processes"},
    {
        "api": "the Python API: `Cluster`, `fit`, `evaluate`, `predict`",
        "sidecar": "evaluates and exports checkpoints of a job, also during training",
    },
    {"cli": "the command line; no TensorFlow until a job starts"},
    {"launch": "the process that imports TensorFlow once and forks the others"},
)
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
AT_THE_ROOT = {"__init__", "__main__", "errors", "keras_private", "settings"}
ON_TOP = {"elasticcb", "elasticcb.__main__"}  # import what users call

PURE = (
    "elasticcb.sharding.partition",
    "elasticcb.cluster.kubernetes.fate",
    "elasticcb.cluster.kubernetes.flags",
    "elasticcb.cluster.kubernetes.pods",
    "elasticcb.master.accounting",
    "elasticcb.master.task",
    "elasticcb.master.autoscaler",
    "elasticcb.master.batch_log",
    "elasticcb.master.epochs",
    "elasticcb.master.evaluation",
    "elasticcb.master.events",
    "elasticcb.master.job_machine",
    "elasticcb.master.leases",
    "elasticcb.master.members",
    "elasticcb.master.roster",
    "elasticcb.master.shards",
    "elasticcb.master.stream_ranges",
    "elasticcb.master.stragglers",
    "elasticcb.master.task_sources",
    "elasticcb.master.task_queue",
    "elasticcb.master.speeds",
    "elasticcb.ps.embedding_table",
    "elasticcb.ps.id_index",
    "elasticcb.ps.table_limits",
    "elasticcb.ps.table_rows",
    "elasticcb.ps.table_snapshot",
    "elasticcb.ps.update_policy",
)
NOT_IN_PURE = {
    "asyncio", "concurrent", "datetime", "grpc", "keras", "multiprocessing", "socket", "subprocess",
    "tensorflow", "threading", "time",
}  # fmt: skip

# Imported before anybody knows whether TensorFlow is needed: its import takes seconds.
LIGHT = ("elasticcb", "elasticcb.errors", "elasticcb.settings", "elasticcb.data", "elasticcb.cli.main")
HEAVY = {"keras", "tensorflow"}


def name_of(path: Path) -> str:
    parts = ("elasticcb", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Templates of `elasticcb zoo init` are users' files.
FILES = {
    name_of(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "_pb2" not in path.name and "templates" not in path.relative_to(PACKAGE).parts
}


@functools.cache
def imports_of(module: str, at_import_only: bool = False) -> frozenset[str]:
    """Names of the modules that `module` imports; `at_import_only` leaves out what its functions import."""
    path = FILES[module]
    found = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8")), at_import_only):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if is_module(inner) else base)
    return frozenset(found)


def is_module(name: str) -> bool:
    # Generated code (`_pb2`) may not be there before the package is built.
    return name in FILES or "_pb2" in name.rsplit(".", 1)[-1]


def walk(node: ast.AST, at_import_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if at_import_only:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from walk(other, at_import_only)
                continue
        yield from walk(child, at_import_only)


def room_of(module: str) -> str:
    """ "" is the root, which `settings` belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() and parts[1] not in AT_THE_ROOT else ""


def inner_imports(module: str) -> set[str]:
    """Modules of this package that `module` imports; the package itself, which is on top, is left out."""
    return {name for name in imports_of(module) if name.startswith("elasticcb.")}


def loaded_with(module: str) -> set[str]:
    """Every module that importing `module` loads, as far as this package's own files tell."""
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        # Importing a.b.c runs a, then a.b, then a.b.c.
        for each in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
            if each not in loaded:
                loaded.add(each)
                if each in FILES:
                    waiting += imports_of(each, at_import_only=True)
    return loaded


def test_every_file_stands_in_a_room():
    outside = [
        name
        for name, path in FILES.items()
        if room_of(name) not in FLOOR_OF or (path.parent == PACKAGE and path.stem not in AT_THE_ROOT)
    ]
    assert not outside, f"Outside all rooms of tests/test_layering.py: {', '.join(outside)}"
    assert not set(FLOOR_OF) - {room_of(name) for name in FILES}, "rooms without files"


@pytest.mark.parametrize("room", FLOOR_OF)
def test_a_room_imports_only_from_rooms_above_it(room):
    wrong = []
    for module in FILES:
        if room_of(module) == room and module not in ON_TOP:
            for name in inner_imports(module):
                other = room_of(name)
                if other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
                    wrong.append(f"{module} imports {name}")
    assert not wrong, wrong


def test_modules_do_not_import_each_other_in_a_circle():
    arrows = {module: set(inner_imports(module)) - {module} for module in FILES if module not in ON_TOP}
    while arrows:
        ends = {module for module, targets in arrows.items() if not targets & arrows.keys()}
        assert ends, f"Some of these import each other in a circle: { {m: sorted(t) for m, t in arrows.items()} }"
        arrows = {module: targets for module, targets in arrows.items() if module not in ends}


def test_no_two_classes_have_one_name():
    files: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in files.items() if len(modules) > 1}


def rooms_as_markdown() -> str:
    rows = [f"| `elasticcb/{room}{'/' if room else ''}` | {text} |" for floor in FLOORS for room, text in floor.items()]
    return "\n".join(["| room | what belongs there |", "|---|---|", *rows])


def with_map(page: str) -> str:
    """The page, with the map of the rooms between its marks."""
    before, rest = page.split("<!-- rooms -->\n")
    _, after = rest.split("<!-- end of rooms -->")
    return f"{before}<!-- rooms -->\n{rooms_as_markdown()}\n<!-- end of rooms -->{after}"


def test_the_map_in_the_overview_is_that_of_the_rooms():
    page = OVERVIEW.read_text(encoding="utf-8")
    assert page == with_map(page), "run: python tests/test_layering.py"


@pytest.mark.parametrize("module", PURE)
def test_pure_module_knows_no_threads_no_clock_no_network_and_no_keras(module):
    own = {name.split(".")[0] for name in imports_of(module)}
    loaded = {name.split(".")[0] for name in loaded_with(module)}
    assert not (own | loaded) & NOT_IN_PURE


@pytest.mark.parametrize("module", [name for name in PURE if name.startswith("elasticcb.master")])
def test_pure_modules_of_the_master_know_no_messages(module):
    assert not {name for name in loaded_with(module) if name.startswith(("elasticcb.proto", "google"))}


@pytest.mark.parametrize("module", LIGHT)
def test_light_module_does_not_load_tensorflow(module):
    heavy = {name for name in loaded_with(module) if name.split(".")[0] in HEAVY}
    assert not heavy, f"importing {module} loads {sorted(heavy)}"


def test_reader_of_imports_sees_all_kinds(tmp_path, monkeypatch):
    file = tmp_path / "sample.py"
    file.write_text(
        "import os.path as p\n"
        "from . import errors\n"
        "from .master.task import Task\n"
        "from elasticcb import settings, __version__\n"
        "if TYPE_CHECKING:\n    import keras\n"
        "def f():\n    import time\n"
        "class C:\n    import json\n"
    )
    monkeypatch.setitem(FILES, "elasticcb.sample", file)
    always = {"os.path", "elasticcb.errors", "elasticcb.master.task", "elasticcb", "elasticcb.settings", "json"}
    assert imports_of("elasticcb.sample", at_import_only=True) == always
    assert imports_of("elasticcb.sample") == always | {"keras", "time"}


def test_no_two_files_of_the_tests_have_one_name():
    # pytest imports them by it, and helpers are found by it, wherever they are.
    paths: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.name != "conftest.py":
            paths.setdefault(path.name, []).append(str(path))
    assert not [same for same in paths.values() if len(same) > 1]


if __name__ == "__main__":
    OVERVIEW.write_text(with_map(OVERVIEW.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit()

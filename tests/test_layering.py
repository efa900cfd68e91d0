"""Holds the arrows between the layers of the package, by reading its imports.

errors, settings, tensors, proto
   → rpc, model_spec, data, callbacks, cluster, and what else master, worker and ps share
      → master | worker | ps         (siblings never import each other; ps/partition.py is shared)
         → roles
            → api → cli
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "elasticcb"

# Units, which are the files and folders of the package, by layer. A layer imports from those above it.
LAYERS = (
    ("foundation", {"errors", "settings", "tensors", "proto", "status", "logs"}),
    ("shared", set()),  # every unit that has no other place
    ("processes", {"master", "worker", "ps"}),
    ("roles", {"roles"}),
    ("api", {"api"}),
    ("command line", {"cli", "zygote", "__main__"}),
)
SHARED = 1
PROCESSES = 2

# A file of a unit that belongs to another layer than its unit.
MOVED = {"elasticcb.ps.partition": SHARED}

PURE = (
    "elasticcb.buckets",
    "elasticcb.cluster.pod_fate",
    "elasticcb.cluster.pod_flags",
    "elasticcb.cluster.pods",
    "elasticcb.master.accounting",
    "elasticcb.master.answers",
    "elasticcb.master.autoscaler",
    "elasticcb.master.batch_log",
    "elasticcb.master.epochs",
    "elasticcb.master.evaluation",
    "elasticcb.master.leases",
    "elasticcb.master.queue_state",
    "elasticcb.master.roster",
    "elasticcb.master.shards",
    "elasticcb.master.stragglers",
    "elasticcb.master.supplies",
    "elasticcb.master.task",
    "elasticcb.master.task_queue",
    "elasticcb.master.task_record",
    "elasticcb.master.todo",
    "elasticcb.ps.embedding_table",
    "elasticcb.ps.growing_array",
    "elasticcb.ps.id_index",
    "elasticcb.ps.partition",
    "elasticcb.ps.replica_log",
    "elasticcb.ps.table_candidates",
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
LIGHT = (
    "elasticcb", "elasticcb.errors", "elasticcb.settings", "elasticcb.data", "elasticcb.cli.main", *PURE,
)  # fmt: skip
HEAVY = {"keras", "tensorflow"}


def name_of(path: Path) -> str:
    parts = ("elasticcb", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_pb2" not in path.name}


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


def unit_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def layer_of(module: str) -> int:
    if module in MOVED:
        return MOVED[module]
    unit = unit_of(module)
    return next((place for place, (_, units) in enumerate(LAYERS) if unit in units), SHARED)


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


@pytest.mark.parametrize("module", [name for name in FILES if name != "elasticcb"])
def test_a_module_imports_only_from_its_own_layer_and_those_before_it(module):
    own = layer_of(module)
    wrong = [f"{name} ({LAYERS[layer_of(name)][0]})" for name in inner_imports(module) if layer_of(name) > own]
    assert not wrong, f"{module} ({LAYERS[own][0]}) imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("module", [name for name in FILES if layer_of(name) == PROCESSES])
def test_master_worker_and_ps_never_import_each_other(module):
    wrong = {name for name in inner_imports(module) if layer_of(name) == PROCESSES and unit_of(name) != unit_of(module)}
    assert not wrong, f"{module} imports its siblings {', '.join(sorted(wrong))}"


def test_units_of_one_layer_do_not_import_each_other_in_a_circle():
    arrows: dict[str, set[str]] = {}
    for module in FILES:
        if module in MOVED or module == "elasticcb":
            continue
        targets = {unit_of(name) for name in inner_imports(module) if name not in MOVED}
        arrows.setdefault(unit_of(module), set()).update(targets - {unit_of(module)})
    while arrows:
        ends = {unit for unit, targets in arrows.items() if not targets & arrows.keys()}
        assert ends, f"These import each other in a circle: { {u: sorted(t) for u, t in arrows.items()} }"
        arrows = {unit: targets for unit, targets in arrows.items() if unit not in ends}


@pytest.mark.parametrize("module", [name for name in PURE if name in FILES])
def test_pure_module_knows_no_threads_no_clock_no_network_and_no_keras(module):
    own = {name.split(".")[0] for name in imports_of(module)}
    loaded = {name.split(".")[0] for name in loaded_with(module)}
    assert not (own | loaded) & NOT_IN_PURE


@pytest.mark.parametrize("module", [name for name in PURE if name.startswith("elasticcb.master")])
def test_pure_modules_of_the_master_know_no_messages(module):
    assert not {name for name in loaded_with(module) if name.startswith(("elasticcb.proto", "google"))}


@pytest.mark.parametrize("module", [name for name in LIGHT if name in FILES])
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

"""An object is complete when it is made: no attribute of a class is created outside its `__init__`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "elasticcb"
MAKERS = {"__init__", "__new__", "__post_init__"}

# What they are derived from, in Keras and the standard library, makes attributes that these set.
OF_LIBRARIES = {"Embedding", "RowVariable", "LogFile"}


def created(function: ast.FunctionDef) -> set[str]:
    """Attributes of its first argument that a function sets."""
    own = {argument.arg for argument in function.args.args[:1]}
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in own and not node.attr.startswith("__")
    }


def is_static(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id.endswith("method") for each in function.decorator_list)


def classes(source: str) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def known_of(found: ast.ClassDef) -> set[str]:
    """What there is once an object is made, and what has a setter."""
    known: set[str] = set()
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known.add(node.target.id)
        elif isinstance(node, ast.Assign):
            known |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            known |= {node.name} | (created(node) if node.name in MAKERS else set())
    return known


def late(sources: dict[str, str]) -> dict[str, set[str]]:
    """By class, the attributes that are created outside of what makes an object of it or of its bases."""
    found = [each for source in sources.values() for each in classes(source)]
    known: dict[str, set[str]] = {}
    for each in found:
        known.setdefault(each.name, set()).update(known_of(each))
    born: dict[str, set[str]] = {}
    for each in found:
        bases = {base.id for base in each.bases if isinstance(base, ast.Name)}
        inherited = set().union(*(known.get(base, set()) for base in bases))
        methods = [node for node in each.body if isinstance(node, ast.FunctionDef) and not is_static(node)]
        missing = set().union(*map(created, methods)) - known[each.name] - inherited
        if missing:
            born.setdefault(each.name, set()).update(missing)
    return born


def test_attributes_are_created_when_the_object_is_made():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if "_pb2" not in path.name]
    born = late({str(path): path.read_text(encoding="utf-8") for path in files})
    others = {name: names for name, names in born.items() if name not in OF_LIBRARIES}
    assert not others, f"Create them in __init__: {others}"


def test_an_attribute_that_is_born_late_is_found():
    source = "class A:\n  def __init__(self): self.a = 1\n  def f(self): self.a, self.b = 2, 3\n"
    derived = "class B(A):\n  def g(self): self.a = self.c = 4\n"
    assert late({"one": source, "two": derived}) == {"A": {"b"}, "B": {"c"}}

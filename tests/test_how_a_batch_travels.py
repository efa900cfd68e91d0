"""docs/how_a_batch_travels.md names files and functions that are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how_a_batch_travels.md").read_text(encoding="utf-8")
NAMED = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def defined(body):
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in defined(node.body))


def test_the_page_names_functions():
    assert len(NAMED) > 25


@pytest.mark.parametrize(("file", "function"), NAMED)
def test_function_is_there(file, function):
    tree = ast.parse((ROOT / "elasticcb" / file).read_text(encoding="utf-8"))
    assert function in defined(tree.body)

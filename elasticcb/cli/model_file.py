"""Finds and parses a model file without running it: its path, and the names that it defines."""

from __future__ import annotations

import ast
import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticcb.errors import UsageError

_MAX_LISTED = 12  # names listed in a message
# Names and modules that indicate what a file does, without running it.
# Importing these does not mean that the file compiles a model.
_WELL_KNOWN = sys.stdlib_module_names | {"elasticcb", "keras", "numpy", "tensorflow"}
_COMPILES = frozenset({"compile", "compile_from_config", "load_model"})
_HAS_LOSS = frozenset({"ActivityRegularization", "add_loss", "compute_loss", "losses", "train_step"})
_UNKNOWN = frozenset({"__import__", "eval", "exec", "getattr", "globals", "import_module", "setattr", "vars"})


@dataclass(frozen=True)
class ModelFile:
    """A model file, parsed.

    Args:
        path: absolute path of the file.
        names: names bound at its top level, in order.
        complete: False if running the file may define more names (`from x import *`).
        mentioned: all names in it: variables, attributes, functions and arguments.
        modules: top-level modules that it imports.
    """

    path: Path
    names: tuple[str, ...]
    complete: bool
    mentioned: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    def may_define(self, name: str) -> bool:
        return name in self.names or not self.complete

    def complaint(self, name: str, flag: str) -> str:
        """The message that the file does not define `name`, which was given with `flag`."""
        public = {found: found for found in self.names if not found.startswith("_")}
        return f"{self.path} does not define {name!r}, which {flag} names. {_suggest(name, public)}"

    def can_compile(self) -> bool:
        """Whether the file may return a compiled model."""
        unknown = not self.complete or self.mentioned & _UNKNOWN or not self.modules <= _WELL_KNOWN
        return bool(unknown or self.mentioned & _COMPILES)

    def can_lose(self) -> bool:
        """Whether its models may have a loss without the file's `loss` function, compiled or not."""
        adds = self.mentioned & _HAS_LOSS or any("regularizer" in name for name in self.mentioned)
        return bool(adds) or self.can_compile()


def check_zoo(zoo: Path, flag: str) -> None:
    """Raises `UsageError` if `zoo` is not a folder."""
    if not zoo.is_dir():
        problem = "is a file" if zoo.exists() else "does not exist"
        raise UsageError(
            f"{flag} names {zoo}, which {problem}. Expected the folder that holds the model files."
            + _nearest_folder(zoo)
        )


def find_model_file(zoo: Path, definition: str, definition_flag: str) -> ModelFile:
    """Finds and parses the file that `definition` ("folder.file.function") names in `zoo`.

    Raises:
        UsageError: the file does not exist or contains a syntax error.
    """
    module, _, name = definition.rpartition(".")
    parts = module.split(".")
    if not module or not all(part.isidentifier() for part in [*parts, name]):
        raise UsageError(
            f"{definition_flag} is not of the form FOLDER.FILE.NAME. Expected the dotted path of a file in the model "
            f"zoo, then a function in it, e.g. mnist.custom_model. {_there([*_models(zoo, name).values()])}"
        )
    path = zoo.joinpath(*parts).with_suffix(".py")
    if not path.is_file():
        raise UsageError(
            f"{definition_flag} names the file {path}, which does not exist. "
            f"{_suggest(module, _models(zoo, name))} The last part of --model_def is the function in the file."
        )
    return parse_model_file(path)


def parse_model_file(path: Path) -> ModelFile:
    """Raises `UsageError` with file and line of a syntax error."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        line = f"\n    {error.text.strip()}" if error.text else ""
        raise UsageError(
            f"{path}:{error.lineno}: the model file contains a syntax error: {error.msg}.{line}"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"The model file {path} can't be read: {error}.") from error
    names = dict.fromkeys(_bound_names(tree.body))
    complete = "*" not in names and "__getattr__" not in names
    return ModelFile(
        path,
        tuple(name for name in names if name != "*"),
        complete,
        frozenset(_mentioned_names(tree)),
        frozenset(_imported_modules(tree)),
    )


def _mentioned_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level or node.module is None else node.module.partition(".")[0]


def _bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that `body` binds in its own scope; "*" for a star import."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0]
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
        # Names inside `if`, `try`, `with`, `for` and `match` are also at the top level.
        for part in ("body", "orelse", "finalbody"):
            yield from _bound_names(getattr(statement, part, []))
        for branch in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from _bound_names(branch.body)


def _models(zoo: Path, name: str) -> dict[str, str]:
    """Possible values of --model_def, by their part that names a file: "mnist.mnist_functional.custom_model".

    Args:
        name: the requested name in the file; files that define it, a `custom_model` or a `...Model` are model files,
            others are helpers.
    """
    found: dict[str, str] = {}
    for pattern in ("*.py", "*/*.py", "*/*/*.py"):
        for path in zoo.glob(pattern):
            parts = path.relative_to(zoo).with_suffix("").parts
            if all(part.isidentifier() for part in parts):
                with contextlib.suppress(UsageError):
                    names = parse_model_file(path).names
                    models = [each for each in (name, "custom_model") if each in names]
                    models += [each for each in names if each.endswith("Model") and each != "Model"]
                    found |= {".".join(parts): ".".join([*parts, each]) for each in models[:1]}
    return dict(sorted(found.items()))


def _suggest(name: str, available: Mapping[str, str]) -> str:
    """Suggests names similar to `name`."""
    close = difflib.get_close_matches(name, available, n=3)
    # The right file in the wrong folder, or without the folder.
    close += [other for other in available if other.split(".")[-1] == name.split(".")[-1] and other not in close]
    shown = " or ".join(available[each] for each in close[:3])
    return (f"Did you mean {shown}? " if close else "") + _there([*available.values()])


def _there(available: list[str]) -> str:
    if not available:
        return "Found none."
    listed = ", ".join(available[:_MAX_LISTED])
    return f"Found: {listed}{', …' if len(available) > _MAX_LISTED else ''}."


def _nearest_folder(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f" Did you mean {path.parent / close[0]}?" if close else ""

"""The user's own modules: files that are imported, but not installed. Their functions and classes travel by value."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import site
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

_PACKAGE = os.path.join(str(Path(__file__).resolve().parents[1]), "")


@functools.cache
def _installed() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {folder for folder in sys.path if any(Path(folder).glob("*.dist-info"))}  # of `pip install --target`
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders if folder)


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to this project."""
    place = os.path.realpath(file)
    in_other_folder = any(f"{os.sep}{name}{os.sep}" in place for name in ("site-packages", "dist-packages"))
    return in_other_folder or place.startswith((*_installed(), _PACKAGE)) or file.startswith("<frozen")


def is_own(name: str) -> bool:
    """Whether a module that is imported is a file of the user's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name != "__main__" and isinstance(file, str) and file.endswith(".py") and not is_installed(file)


def is_of_user(name: str) -> bool:
    """The same, or the script."""
    return name == "__main__" or is_own(name)


_known: dict[str, tuple[Any, bool]] = {}  # modules by name, and whether they are own ones: there are thousands


def _all_own() -> Iterator[tuple[str, Any]]:
    for name, module in sys.modules.copy().items():  # other threads may import
        known = _known.get(name)
        if known is None or known[0] is not module:
            known = _known[name] = module, is_own(name)
        if known[1]:
            yield name, module


@contextlib.contextmanager
def by_value(imported: Collection[str]) -> Iterator[None]:
    """Context in which cloudpickle takes functions and classes of own modules by value, except for those in
    `imported`."""
    before = cloudpickle.list_registry_pickle_by_value()
    modules = [module for name, module in _all_own() if name not in imported and name not in before]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def used_by(function: types.FunctionType) -> Iterator[tuple[str, set[str]]]:
    """Own modules that a function refers to as modules, with the names in it that the function may use."""
    names = set(names_in(function.__code__))
    for name in names:
        module = function.__globals__.get(name)
        if isinstance(module, types.ModuleType) and is_own(module.__name__):
            yield module.__name__, names & vars(module).keys()


@functools.lru_cache(maxsize=10_000)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function uses."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of globals that a function uses: those that travel with it."""
    return tuple(cloudpickle.cloudpickle._extract_code_globals(code))


def values_of(module: str, names: Collection[str]) -> dict[str, Any]:
    """What a module has under these names now."""
    return {name: vars(sys.modules[module])[name] for name in sorted(names)}


def set_values(module: str, values: Mapping[str, Any]) -> None:
    """Gives them to the module here, which is imported if need be."""
    vars(importlib.import_module(module)).update(values)

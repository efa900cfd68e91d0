"""What the hooks of a callback read and change, found in their source."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Attributes that the caller of the hooks sets.
GIVEN = frozenset({"params", "model", "_model", "validation_data"})
_CHANGING = frozenset(
    {
        "add", "append", "appendleft", "assign", "assign_add", "assign_sub", "clear", "discard", "extend",
        "extendleft", "insert", "pop", "popitem", "popleft", "put", "put_nowait", "remove", "reset_state",
        "reset_states", "reverse", "rotate", "setdefault", "sort", "update", "update_state", "fill", "subtract",
    }
)  # fmt: skip
_ADDING = frozenset({"add", "append", "appendleft", "extend", "insert", "setdefault", "put"})
_OF_ELEMENTS = frozenset({"get", "setdefault", "values", "items", "pop"})  # their results are parts of the object
_SETS_WEIGHTS = frozenset({"set_weights", "load_weights", "load_own_variables"})
_SETS_VALUES = frozenset({"assign", "assign_add", "assign_sub", "set_value"})
_NOTHING = object()
_RATES = frozenset({"learning_rate", "lr", "_learning_rate"})


@dataclass(frozen=True)
class Variable:
    """A variable that functions share: of an enclosing function, or of their module."""

    name: str
    home: int  # the identity of its cell, or of its module's variables

    def __str__(self) -> str:
        return f"the variable {self.name}"


Slot = str | Variable  # the name of an attribute, or a variable


@dataclass
class Use:
    """What a hook, and the methods that it calls, do.

    Attributes:
        reads: attributes and variables that it reads, except to change them.
        changes: those that it sets, or changes in place.
        collects: containers to which it adds.
        sets: what it sets of the model: "the learning rate", "stop_training", "weights", "the model".
        decides: attributes and variables that decide when, or to what, it sets these.
        has_model: whether it uses `self.model`.
        homes: where each variable was found: a function that refers to it.
        is_whole: whether the source of all of them was found.
    """

    reads: set[Slot] = field(default_factory=set)
    changes: set[Slot] = field(default_factory=set)
    collects: set[Slot] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    decides: set[Slot] = field(default_factory=set)
    has_model: bool = False
    homes: dict[Variable, str] = field(default_factory=dict)  # the name of the method
    is_whole: bool = True

    def add(self, other: Use) -> None:
        self.reads |= other.reads
        self.changes |= other.changes
        self.collects |= other.collects
        self.sets |= other.sets
        self.decides |= other.decides
        self.has_model = self.has_model or other.has_model
        self.homes |= other.homes
        self.is_whole = self.is_whole and other.is_whole


def use_of(callback: Any, hooks: Iterable[str]) -> Use:
    """What `hooks` of `callback` do; empty for hooks whose source can't be found."""
    total = Use()
    seen: set[tuple[str, int]] = set()
    pending: list[_Call] = [(name, _method(callback, name), set()) for name in hooks]
    while pending:
        name, method, decides = pending.pop()
        function = inspect.unwrap(method) if callable(method) else None
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or (name, id(function.__code__)) in seen:
            continue
        seen.add((name, id(function.__code__)))
        nodes = _nodes(function)
        total.is_whole = total.is_whole and bool(nodes)
        for node in nodes:
            bound = inspect.ismethod(method) or name in _properties(type(callback))
            found = _Reader(callback, function, name, node, bound)
            if found.use.sets:
                found.use.decides |= decides
            total.add(found.use)
            pending += [(each, called, decides | more) for each, called, more in found.calls]
    return total


def uses_model(callback: Any, hook: str) -> bool:
    """Whether a hook reads or sets something of the model, as far as its source tells."""
    use = use_of(callback, [hook])
    return use.has_model or bool(use.sets) or not use.is_whole


def _method(callback: Any, name: str) -> Any:
    found = inspect.getattr_static(callback, name, None)
    return found.fget if isinstance(found, property) else getattr(callback, name, None)


def _properties(kind: type) -> set[str]:
    return {name for each in kind.__mro__ for name, value in vars(each).items() if isinstance(value, property)}


_Call = tuple[str, Any, set[Slot]]  # name, method, and what decides about the call and its arguments
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _nodes(function: types.FunctionType) -> list[_FunctionNode]:
    """The definitions that may be the function's: several for lambdas on one line."""
    code = function.__code__
    by_line = _definitions("".join(linecache.getlines(code.co_filename, function.__globals__)))
    arguments = code.co_varnames[: code.co_argcount]
    return [
        node
        for node in by_line.get(code.co_firstlineno, ())
        if getattr(node, "name", "<lambda>") == code.co_name
        and tuple(each.arg for each in (*node.args.posonlyargs, *node.args.args)) == arguments
    ]


@functools.lru_cache(maxsize=32)
def _definitions(source: str) -> dict[int, list[_FunctionNode]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[int, list[_FunctionNode]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _FunctionNode):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            found.setdefault(first, []).append(node)
    return found


@dataclass(frozen=True)
class _Path:
    """What an expression refers to: a root, and the names of the attributes on the way."""

    root: Slot | None  # None: the callback itself
    names: tuple[str, ...] = ()


class _Reader(ast.NodeVisitor):
    """Reads one function. `calls`: other methods of the callback that it calls."""

    def __init__(
        self, callback: Any, function: types.FunctionType, name: str, node: _FunctionNode, bound: bool
    ) -> None:
        self.use, self.calls = Use(), list[_Call]()
        self._conditions: list[set[Slot]] = []  # of the statements around the current one
        self._statement: set[Slot] = set()  # what the current one reads
        self._values: dict[str, set[Slot]] = {}  # what the values of local variables depend on
        self._callback, self._function, self._name = callback, function, name
        code = function.__code__
        self._self = code.co_varnames[0] if bound and code.co_argcount else ""
        self._locals = set(code.co_varnames) | set(code.co_cellvars)
        self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        self._aliases: dict[str, _Path] = {}
        body = node.body if isinstance(node.body, list) else [node.body]
        for _ in range(2):  # so that an alias of a loop's last lines is known in its first
            for each in body:
                self.visit(each)

    # ------------------------------------------------------------ expressions

    def _path(self, node: ast.AST) -> _Path | None:
        """What an expression is a part of; None: something else."""
        if isinstance(node, ast.Name):
            if node.id == self._self and self._self:
                return _Path(None)
            if node.id in self._aliases:
                return self._aliases[node.id]
            variable = self._variable(node.id)
            return None if variable is None else _Path(variable)
        if isinstance(node, ast.Attribute):
            path = self._path(node.value)
            if path is None:
                return None
            return _Path(node.attr) if path == _Path(None) else _Path(path.root, (*path.names, node.attr))
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self._path(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_ELEMENTS:
            return self._path(node.func.value)
        return None

    def _variable(self, name: str) -> Variable | None:
        """A variable outside of the function that holds data."""
        value = self._value(name)
        if value is _NOTHING or isinstance(value, types.ModuleType) or callable(value):
            return None
        return Variable(name, id(self._cells.get(name, self._function.__globals__)))

    def _value(self, name: str) -> Any:
        """The value of a variable outside of the function; `_NOTHING`: there is none."""
        if name in self._cells:
            try:
                return self._cells[name].cell_contents
            except ValueError:
                return _NOTHING
        is_global = name not in self._locals and not hasattr(builtins, name)
        return self._function.__globals__.get(name, _NOTHING) if is_global else _NOTHING

    def _changes(self, node: ast.AST, attributes: tuple[str, ...] = ()) -> None:
        """Something that `node` refers to, or an attribute of it, is changed."""
        path = self._path(node)
        if path is None or path.root is None:
            return
        if path.root in GIVEN:
            self._sets((*path.names, *attributes))
        else:
            self._note(self.use.changes, path.root)

    def _sets(self, names: tuple[str, ...]) -> None:
        """Part of the model is set."""
        self._decide()
        if "stop_training" in names:
            self.use.sets.add("stop_training")
        elif _RATES & set(names):
            self.use.sets.add("the learning rate")
        else:
            self.use.sets.add("the model")

    def _decide(self) -> None:
        self.use.decides |= self._deciding

    @property
    def _deciding(self) -> set[Slot]:
        return self._statement.union(*self._conditions)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)):
            self._statement = self._read_in(node)
        if isinstance(node, (ast.If, ast.While, ast.For)):
            self._statement = self._read_in(node.iter if isinstance(node, ast.For) else node.test)
            self._conditions.append(self._statement)
            super().visit(node)
            if not any(isinstance(each, (ast.Return, ast.Continue, ast.Break, ast.Raise)) for each in ast.walk(node)):
                self._conditions.pop()  # else it also decides about what follows
        else:
            super().visit(node)

    def _read_in(self, node: ast.AST) -> set[Slot]:
        """What an expression or a simple statement depends on."""
        found: set[Slot] = set()
        for each in ast.walk(node):
            is_read = isinstance(each, (ast.Attribute, ast.Name)) and isinstance(each.ctx, ast.Load)
            path = self._path(each) if is_read else None
            if path is not None and path.root is not None and path.root not in GIVEN:
                found.add(path.root)
                if (
                    isinstance(path.root, str)
                    and not path.names
                    and path.root not in (self._name, *vars(self._callback))
                ):
                    found |= use_of(self._callback, [path.root]).reads
            if isinstance(each, ast.Name):
                found |= self._values.get(each.id, set())
        return found

    def _note(self, slots: set[Slot], slot: Slot) -> None:
        slots.add(slot)
        if isinstance(slot, Variable):
            self.use.homes[slot] = self._name

    # ------------------------------------------------------------ nodes

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            slot = self._variable(node.id)
            if slot is not None:
                self._note(self.use.reads, slot)
        elif node.id not in self._locals:  # `global` or `nonlocal`
            slot = self._variable(node.id)
            if slot is not None:
                self._note(self.use.changes, slot)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if isinstance(node.ctx, ast.Load):
            if path is not None and path.root is not None and not path.names and isinstance(path.root, str):
                self._read(path.root)
            self.visit(node.value)
            return
        self._stores(node, path)
        if path is None or path.names or not isinstance(path.root, str):
            self.visit(node.value)

    def _stores(self, node: ast.Attribute, path: _Path | None) -> None:
        if path is not None and path.root is not None:
            if not path.names and isinstance(path.root, str) and path.root not in GIVEN:
                self.use.changes.add(path.root)
            elif path.names:
                self._changes(node.value, (node.attr,))
        elif path is None and node.attr in (*_RATES, "stop_training"):
            self._sets((node.attr,))  # of an object that this function got elsewhere

    def _read(self, name: str) -> None:
        if name in GIVEN:
            self.use.has_model = self.use.has_model or name in ("model", "_model")
            return
        found = inspect.getattr_static(self._callback, name, None)
        if isinstance(found, property):
            self.calls.append((name, found.fget, self._deciding))
        elif isinstance(found, (types.FunctionType, staticmethod, classmethod)) and name not in vars(self._callback):
            self.calls.append((name, getattr(self._callback, name), self._deciding))
        else:
            self.use.reads.add(name)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._changes(node.value)
            if self._is_plain(node.value):
                self.visit(node.slice)
                return
        self.generic_visit(node)

    def _is_plain(self, node: ast.AST) -> bool:
        """Whether it only names something that is changed, and so is not read."""
        while isinstance(node, ast.Subscript):
            node = node.value
        path = self._path(node)
        return isinstance(node, (ast.Attribute, ast.Name)) and path is not None and not path.names

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.target)
        if isinstance(node.target, ast.Name):
            self._changes(node.target)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._alias(target, node.value)
            for each in ast.walk(target):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    self._values[each.id] = self._deciding
            self.visit(target)

    def visit_For(self, node: ast.For) -> None:
        self._alias_items(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._alias_items(node.target, node.iter)
        self.generic_visit(node)

    def _alias_items(self, target: ast.AST, items: ast.AST) -> None:
        """Items of `items` become `target`, one after another."""
        if isinstance(items, ast.Call) and isinstance(target, ast.Tuple):
            of = getattr(items.func, "id", "")
            if of == "zip" and len(items.args) == len(target.elts):
                for each, argument in zip(target.elts, items.args, strict=True):
                    self._alias(each, argument)
                return
            if of == "enumerate" and len(target.elts) == 2 and items.args:
                self._alias_items(target.elts[1], items.args[0])
                return
        self._alias(target, items)

    def _alias(self, target: ast.AST, value: ast.AST) -> None:
        path = self._path(value)
        names = [each for each in ast.walk(target) if isinstance(each, ast.Name) and each.id in self._locals]
        for each in names if isinstance(target, (ast.Name, ast.Tuple)) else ():
            if path is None or path == _Path(None):
                self._aliases.pop(each.id, None)
            else:
                self._aliases[each.id] = path

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name == "super" and self._self:
            self.generic_visit(node)
            return
        if isinstance(function, ast.Attribute):
            if _is_super(function.value):
                self._calls_super(name)
            path = self._path(function.value)
            if name in _SETS_WEIGHTS and path is not None and (path.root in GIVEN or path.root is None):
                self.use.sets.add("weights")
                self._decide()
            elif name in _CHANGING and path is not None:
                self._changes(function.value, ("weights",))
                if name in _ADDING and path.root is not None and path.root not in GIVEN:
                    self.use.collects.add(path.root)
            elif path is not None and self._is_of_user(path):
                self._changes(function.value)
        if isinstance(function, ast.Name) and node.args and self._path(node.args[0]) == _Path(None):
            called = self._value(function.id)
            if isinstance(called, types.FunctionType):
                self.calls.append((name, types.MethodType(called, self._callback), self._deciding))
        if name in _SETS_VALUES:
            for argument in (*node.args, *([function.value] if isinstance(function, ast.Attribute) else ())):
                names = {each.attr for each in ast.walk(argument) if isinstance(each, ast.Attribute)}
                if names & _RATES:
                    self.use.sets.add("the learning rate")
                    self._decide()
        if name == "setattr" and node.args:
            self._changes(node.args[0], tuple(str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)))
        if isinstance(function, ast.Attribute) and name in _CHANGING and self._is_plain(function.value):
            for each in (*node.args, *(keyword.value for keyword in node.keywords)):
                self.visit(each)
            return
        self.generic_visit(node)

    def _calls_super(self, name: str) -> None:
        for kind in type(self._callback).__mro__:
            method = vars(kind).get(name)
            if isinstance(method, types.FunctionType) and method.__code__ is not self._function.__code__:
                self.calls.append((name, types.MethodType(method, self._callback), self._deciding))

    def _is_of_user(self, path: _Path) -> bool:
        """Whether a method of a user's object is called, which may change the object."""
        if not isinstance(path.root, str) or path.root in GIVEN or path.names:
            return False
        value = vars(self._callback).get(path.root)
        return value is not None and not isinstance(value, types.ModuleType) and _is_users(type(value))


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"


def _is_users(kind: type) -> bool:
    """Whether a class is neither built in nor of an installed package."""
    try:
        file = inspect.getfile(kind)
    except (TypeError, OSError):
        return kind.__module__ == "__main__"
    return "site-packages" not in file and "dist-packages" not in file and not file.startswith(_STANDARD_LIBRARY)


_STANDARD_LIBRARY = inspect.getfile(ast).rpartition("/")[0]


def in_words(slots: Iterable[Slot]) -> str:
    """For messages."""
    return ", ".join(sorted(f"self.{slot}" if isinstance(slot, str) else str(slot) for slot in slots))

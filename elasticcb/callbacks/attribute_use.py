"""What the hooks of a callback read and change, found in their source."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elasticcb.serialization import own_modules

# Attributes that the caller of the hooks sets.
_MODEL = frozenset({"model", "_model"})
GIVEN = _MODEL | {"params", "validation_data"}
# Methods that change their object. Those of the user's classes also may.
_CHANGING = frozenset(
    {
        "add", "append", "appendleft", "assign", "assign_add", "assign_sub", "clear", "discard", "extend",
        "extendleft", "fill", "insert", "load_weights", "pop", "popitem", "popleft", "put", "put_nowait", "remove",
        "reset_state", "reset_states", "reverse", "rotate", "set_weights", "setdefault", "sort", "subtract", "update",
        "update_state",
    }
)  # fmt: skip
_OF_ELEMENTS = frozenset({"get", "setdefault", "values", "items", "pop"})  # their results are parts of the object
_RATES = frozenset({"learning_rate", "lr", "_learning_rate"})
_WEIGHTS = frozenset({"set_weights", "load_weights"})
_TRAINING = (("fit",), ("train_on_batch",))
# Functions that take a model and do not use its optimizer.
_ABOUT = frozenset({"callable", "getattr", "hasattr", "id", "isinstance", "print", "repr", "setattr", "str", "type"})
# Names behind an optimizer.
_STATE = frozenset(
    {
        *((name,) for name in ("variables", "trainable_variables", "apply", "apply_gradients")),
        *((name,) for name in ("load_own_variables", "save_own_variables")),
        *(("iterations", name) for name in ("assign", "assign_add", "assign_sub")),
    }
)


@dataclass(frozen=True)
class Variable:
    """A variable that functions share.

    Attributes:
        home: its cell, or the variables of its module.
    """

    name: str
    home_id: int
    home: Any = field(compare=False)

    def __str__(self) -> str:
        return f"the variable {self.name}"

    @property
    def value(self) -> Any:
        return self.home[self.name] if isinstance(self.home, dict) else self.home.cell_contents

    def set(self, value: Any) -> None:
        if isinstance(self.home, dict):
            self.home[self.name] = value
        else:
            self.home.cell_contents = value


Slot = str | Variable  # the name of an attribute, or a variable


@dataclass
class Use:
    """What hooks, and the methods that they call, do.

    Attributes:
        reads: attributes and variables that they read, except to change them.
        changes: those that they set, or change in place.
        fills: those that they change in place.
        variables: those of `changes` that are variables, in the order of the source.
        sets: what they set of the model: "the learning rate", "stop_training", "weights", "the model".
        of_optimizers: whether they read or write the state of an optimizer.
        is_whole: whether the source of all of them was found.
    """

    reads: set[Slot] = field(default_factory=set)
    changes: set[Slot] = field(default_factory=set)
    fills: set[Slot] = field(default_factory=set)
    variables: list[Variable] = field(default_factory=list)
    sets: set[str] = field(default_factory=set)
    of_optimizers: bool = False
    is_whole: bool = True

    def change(self, slot: Slot) -> None:
        if isinstance(slot, Variable) and slot not in self.changes:
            self.variables.append(slot)
        self.changes.add(slot)


def use_of(callback: Any, hooks: Iterable[str]) -> Use:
    """What `hooks` of `callback` do."""
    use = Use()
    seen: set[Any] = set()
    pending = [getattr(callback, name, None) for name in sorted(hooks)]
    while pending:
        method = pending.pop()
        function = inspect.unwrap(method) if callable(method) else None
        is_bound = inspect.ismethod(method)
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and function not in seen:
            seen.add(function)
            nodes = _nodes(function)
            use.is_whole = use.is_whole and bool(nodes)
            for node in nodes:
                pending += _Reader(use, callback, function, is_bound).read(node)
    return use


def uses_model(callback: Any, hook: str) -> bool:
    """Whether a hook reads or sets something of the model, as far as its source tells."""
    use = use_of(callback, [hook])
    return bool(use.sets or use.reads & _MODEL) or not use.is_whole


_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _nodes(function: types.FunctionType) -> list[_FunctionNode]:
    """The definitions that may be the function's: several for lambdas on one line."""
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    nodes = _definitions("".join(linecache.getlines(code.co_filename, function.__globals__)))
    return [
        node
        for node in nodes.get(code.co_firstlineno, ())
        if getattr(node, "name", "<lambda>") == code.co_name
        and tuple(each.arg for each in (*node.args.posonlyargs, *node.args.args)) == arguments
    ]


@functools.lru_cache(maxsize=32)
def _definitions(source: str) -> dict[int, list[_FunctionNode]]:
    """By their first lines."""
    found: dict[int, list[_FunctionNode]] = {}
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        if isinstance(node, _FunctionNode):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            found.setdefault(first, []).append(node)
    return found


class _Reader(ast.NodeVisitor):
    """Adds what one function does to `use`."""

    def __init__(self, use: Use, callback: Any, function: types.FunctionType, is_bound: bool) -> None:
        self._use, self._callback, self._globals = use, callback, function.__globals__
        code = function.__code__
        self._self = code.co_varnames[0] if is_bound and code.co_argcount else ""
        self._locals = {*code.co_varnames, *code.co_cellvars}
        self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        self._parts: dict[str, tuple[Slot | None, tuple[str, ...]]] = {}  # what local variables are parts of
        self._not_read: set[ast.AST] = set()  # names of what is only changed
        self._called: list[Any] = []

    def read(self, node: _FunctionNode) -> list[Any]:
        """Returns other methods of the callback that the function calls."""
        body = node.body if isinstance(node.body, list) else [node.body]
        for each in [*body, *body]:  # twice, because the last lines of a loop come before its first ones
            self.visit(each)
        return self._called

    # ------------------------------------------------------------ what an expression refers to

    def _path(self, node: ast.AST) -> tuple[Slot | None, tuple[str, ...]]:
        """The attribute or variable that an expression is a part of, and the names of attributes on the way."""
        if isinstance(node, ast.Name):
            return self._parts.get(node.id) or (self._data(node.id), ())
        if isinstance(node, ast.Attribute):
            if self._is_self(node.value):
                return node.attr, ()
            root, names = self._path(node.value)
            return root, (*names, node.attr)
        whole = _whole(node)
        return (None, ()) if whole is None else self._path(whole)

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and bool(self._self) and node.id == self._self

    def _outer(self, name: str) -> Variable | None:
        """A variable outside of the function."""
        home: Any = self._cells.get(name)
        if home is None and name not in self._locals and name in self._globals:
            home = self._globals
        return None if home is None or home == types.CellType() else Variable(name, id(home), home)

    def _data(self, name: str) -> Variable | None:
        """The same, if it holds data."""
        found = self._outer(name)
        return None if found is None or isinstance(found.value, types.ModuleType) or callable(found.value) else found

    # ------------------------------------------------------------ changes

    def _change(self, node: ast.AST, name: str = "") -> None:
        """What `node` refers to is changed: by setting its attribute `name`, or by calling its method."""
        root, path = self._path(node)
        names = {*path, name}
        if names & _RATES:
            self._use.sets.add("the learning rate")
        elif "stop_training" in names:
            self._use.sets.add("stop_training")
        elif root in GIVEN:
            self._use.sets.add("weights" if names & _WEIGHTS else "the model")
        if root is not None and root not in GIVEN:
            self._use.change(root)
            self._use.fills.add(root)

    def _is_state(self, root: Slot | None, names: tuple[str, ...]) -> bool:
        """Whether these are the names of an optimizer's state, or of a rate; those of `model.optimizer` excepted, whose
        rate and steps are known without."""
        import keras  # not above: the command line reads where hooks run, without it

        value = root.value if isinstance(root, Variable) else vars(self._callback).get(root)
        if isinstance(value, keras.optimizers.Optimizer):
            names = ("optimizer", *names)
        if root in GIVEN and names in _TRAINING:
            return True
        if names[1:2] and names[1] in _RATES and names[0] != "optimizer":
            return True
        if "optimizer" not in names:
            return False
        own = names[names.index("optimizer") + 1 :]
        return own[:1] in _STATE or own[:2] in _STATE or (own != () and own[0].startswith("_") and own[0] not in _RATES)

    def _gives_model(self, node: ast.Call) -> bool:
        """Whether a call saves something, or gives the model to other code: both may read its optimizer."""
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = self._outer(function.value.id) if isinstance(function.value, ast.Name) else None
            if function.attr == "save" and not (owner and isinstance(owner.value, types.ModuleType)):
                return True
            is_followed = self._is_self(function.value) or isinstance(function.value, ast.Call)
        else:
            is_followed = getattr(function, "id", "") in _ABOUT
        return not is_followed and any(map(self._is_model, (*node.args, *(each.value for each in node.keywords))))

    def _is_model(self, node: ast.AST) -> bool:
        import keras  # as above

        root, names = self._path(node)
        if isinstance(root, str):
            return not names and (root in _MODEL or isinstance(vars(self._callback).get(root), keras.Model))
        outer = self._outer(node.id) if isinstance(node, ast.Name) else None
        return outer is not None and isinstance(outer.value, keras.Model)

    def _only_change(self, node: ast.AST | None) -> None:
        """A statement changes `node`, and does not read it."""
        while node is not None:
            self._not_read.add(node)
            node = _whole(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name, is_load = node.attr, isinstance(node.ctx, ast.Load)
        self._use.of_optimizers = self._use.of_optimizers or self._is_state(*self._path(node))
        if not self._is_self(node.value):
            if not is_load:
                self._change(node.value, name)
            self.visit(node.value)
        elif not is_load:
            self._use.change(name)
        elif node not in self._not_read:
            self._use.reads.add(name)
            found = inspect.getattr_static(self._callback, name, None)
            if isinstance(found, property) and found.fget is not None:
                self._called.append(types.MethodType(found.fget, self._callback))
            elif isinstance(found, (types.FunctionType, staticmethod, classmethod)):
                self._called.append(getattr(self._callback, name))

    def visit_Name(self, node: ast.Name) -> None:
        variable = self._data(node.id)
        if variable is not None and not isinstance(node.ctx, ast.Load):
            self._use.change(variable)
        elif variable is not None and node not in self._not_read:
            self._use.reads.add(variable)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._change(node.value)
            self._only_change(node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._change(node.target)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGING:
            self._only_change(call.func.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        self._use.of_optimizers = self._use.of_optimizers or self._gives_model(node)
        if isinstance(function, ast.Attribute):
            name = function.attr
            root, names = self._path(function.value)
            owner = self._outer(function.value.id) if isinstance(function.value, ast.Name) else None
            if owner is not None and isinstance(owner.value, types.ModuleType):
                self._follow(getattr(owner.value, name, None))
            if name in _CHANGING or (not names and self._is_users(root, name)):
                self._change(function.value, name)
            if isinstance(function.value, ast.Call) and getattr(function.value.func, "id", "") == "super":
                methods = [vars(kind).get(name) for kind in type(self._callback).__mro__]
                self._called += [types.MethodType(each, self._callback) for each in methods if callable(each)]
        else:
            name = getattr(function, "id", "")
            called = self._outer(name)
            if called is not None and arguments and self._is_self(arguments[0]) and callable(called.value):
                self._called.append(types.MethodType(called.value, self._callback))
            elif called is not None:
                self._follow(called.value)
            elif name == "next" and arguments:
                self._change(arguments[0])
        if arguments and name in ("setattr", "set_value"):
            words = [str(each.value) for each in arguments[1:2] if isinstance(each, ast.Constant)]
            self._change(arguments[0], *(words if name == "setattr" else ()))
        self.generic_visit(node)

    def _follow(self, function: Any) -> None:
        """The user's function may change variables of its module, or of a scope."""
        if isinstance(function, types.FunctionType) and not own_modules.is_installed(function.__code__.co_filename):
            self._called.append(function)

    def _is_users(self, root: Slot | None, method: str) -> bool:
        """Whether the method of an object is in the user's code, and so may change it."""
        if root is None or root in GIVEN:
            return False
        value = root.value if isinstance(root, Variable) else vars(self._callback).get(root)
        code = getattr(getattr(type(value), method, None), "__code__", None)
        return code is not None and not own_modules.is_installed(code.co_filename)

    # ------------------------------------------------------------ local variables

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._locals |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        self.visit_For(node)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        """`target` becomes `value`, or each of its elements."""
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = [value] * len(targets)
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("zip", "enumerate"):
            values = [*values[: len(targets) - len(value.args)], *value.args]
        for each, one in zip(targets, values, strict=False):
            if isinstance(each, ast.Tuple):
                self._bind(each, one)
            elif isinstance(each, ast.Name) and each.id in self._locals:
                self._parts[each.id] = self._path(one)


def _whole(node: ast.AST) -> ast.AST | None:
    """What an expression is an element of."""
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_ELEMENTS:
        return node.func.value
    return None


def in_words(slots: Iterable[Slot]) -> str:
    """For messages."""
    return ", ".join(sorted(f"self.{slot}" if isinstance(slot, str) else str(slot) for slot in slots))

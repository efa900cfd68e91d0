"""Determines the ids that a step will look up: runs it up to its last lookup, without side effects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # there is no public API to observe each operation
from torch.utils.weak import WeakTensorKeyDictionary

from elasticcb.compute import unknown_ids
from elasticcb.keras_private import embeddings_of, set_value_of, value_of
from elasticcb.layers.table_layers import TableLayer
from elasticcb.optimizers.traits import model_optimizers

Step = Callable[[Any], Any]
# Called with an operation, its input tensors, and its outputs.
_Note = Callable[[Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
_ROWS, _RANDOM = "rows", "random"  # what a tensor depends on; otherwise the path of a variable


class _Done(BaseException):
    """The last lookup was made. Not an Exception, because Keras would wrap it."""


class IdRecording:
    """Records the layers' lookups while a step runs, and returns placeholder rows.

    Args:
        calls: how often each is looked up, after which the step ends; None: run it completely.
    """

    def __init__(self, layers: Mapping[int, TableLayer], calls: Mapping[int, int] | None = None) -> None:
        self._layers = layers
        self.asked: dict[int, list[torch.Tensor]] = {}
        self._left = -1 if calls is None else sum(calls.values())

    def lookup(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """A placeholder for the rows of `ids`."""
        self.asked.setdefault(index, []).append(ids.detach())
        self._left -= 1
        if not self._left:
            raise _Done
        return self._stand_in(self._layers[index], ids)

    def _stand_in(self, layer: TableLayer, ids: torch.Tensor) -> torch.Tensor:
        return embeddings_of(layer).value.new_zeros(()).expand(*ids.shape, layer.output_dim)

    def run(self, model: keras.Model, step: Step, batch: Any) -> None:
        with unaffected(model), contextlib.suppress(_Done), torch.no_grad():
            step(batch)


class Uses(IdRecording):
    """Also determines why rows can't be known beforehand, by running a step completely."""

    def __init__(self, model: keras.Model, layers: Mapping[int, TableLayer]) -> None:
        super().__init__(layers)
        self._model = model
        self._depends: Any = WeakTensorKeyDictionary()  # tensor -> dependencies of its values
        self._ids_depend: dict[int, frozenset[str]] = {}  # by table
        self._other_uses: set[int] = set()
        self._answers = False
        self._sources: dict[int, int | str] = {}  # by address of a variable: its table, or its path
        self._changed: set[str] = set()  # paths of variables

    def lookup(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        self._ids_depend[index] = self._ids_depend.get(index, frozenset()) | self._depends.get(ids, frozenset())
        return super().lookup(index, ids)

    def _stand_in(self, layer: TableLayer, ids: torch.Tensor) -> torch.Tensor:
        self._answers = True
        # through which gradients reach the layer's variable
        rows = (embeddings_of(layer).value.sum() * 0).expand(*ids.shape, layer.output_dim)
        self._answers = False
        self._depends[rows] = frozenset({_ROWS})
        return rows

    def run(self, model: keras.Model, step: Step, batch: Any) -> None:
        with contextlib.ExitStack() as stack:
            for layer in self._layers.values():
                stack.enter_context(_one_row(layer))
            scope = stack.enter_context(unaffected(model))
            tables = {id(embeddings_of(layer)): index for index, layer in self._layers.items()}
            self._sources = {}
            for variable in model.variables:
                self._sources[_memory_of(variable.value)] = tables.get(id(variable), variable.path)
            stack.enter_context(_Operations(self._note))
            step(batch)
            self._changed = {
                variable.path for variable in model.variables if scope.get_current_value(variable) is not None
            }

    def _note(self, operation: Any, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        if _tells_nothing(operation) or self._answers:
            return
        found = frozenset({_RANDOM} if _is_random(operation) else ())
        for tensor in given:
            source = self._sources.get(_memory_of(tensor))
            if isinstance(source, str):
                found |= {source}
            elif source is not None and not _is_view(operation):
                self._other_uses.add(source)
            found |= self._depends.get(tensor, frozenset())
        if found:
            for tensor in results:
                self._depends[tensor] = self._depends.get(tensor, frozenset()) | found

    def problems(self) -> dict[int, str]:
        """Why rows can't be determined beforehand, by table."""
        found = {}
        trainable = {variable.path for variable in self._model.trainable_variables}
        for index in self._layers:
            depends = self._ids_depend.get(index, frozenset())
            if index in self._other_uses:
                found[index] = unknown_ids.OTHER_USES
            elif _ROWS in depends:
                found[index] = unknown_ids.BY_ROWS
            elif _RANDOM in depends:
                found[index] = (
                    "its ids depend on random numbers, which may be others when the step runs. Compute ids "
                    "only from the features; draw random ids in the input pipeline."
                )
            elif depends & trainable:
                found[index] = unknown_ids.by_weights(min(depends & trainable))
            elif depends & self._changed:
                found[index] = unknown_ids.by_changed(min(depends & self._changed))
        return found


@contextlib.contextmanager
def unaffected(model: keras.Model) -> Iterator[keras.StatelessScope]:
    """Undoes changes of variables and random state by a step in the context. Optimizers do nothing."""
    before = {optimizer: vars(optimizer).get("apply") for optimizer in model_optimizers(model)}
    for optimizer in before:
        vars(optimizer)["apply"] = lambda *args, **kwargs: None
    try:
        with torch.random.fork_rng(devices=()), keras.StatelessScope() as scope:
            yield scope
    finally:
        for optimizer, apply in before.items():
            if apply is None:
                del vars(optimizer)["apply"]
            else:
                vars(optimizer)["apply"] = apply
        model.zero_grad()


@contextlib.contextmanager
def _one_row(layer: TableLayer) -> Iterator[None]:
    """The layer's variable has a single row, so its gradient needs little memory."""
    variable: Any = embeddings_of(layer)
    before = value_of(variable)
    set_value_of(
        variable, torch.nn.Parameter(before.new_zeros((1, layer.output_dim)), requires_grad=variable.trainable)
    )
    try:
        yield
    finally:
        set_value_of(variable, before)


class _Operations(TorchDispatchMode):
    """Reports each operation in the context, including those that compute gradients."""

    def __init__(self, note: _Note) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, _tensors((args, kwargs)), _tensors(result))
        return result


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory: the same for views."""
    return int(tensor.untyped_storage().data_ptr())


def _tells_nothing(operation: Any) -> bool:
    """Whether an operation's result does not depend on its inputs' values, like a shape."""
    return operation.overloadpacket in _SHAPES


def _is_view(operation: Any) -> bool:
    """Whether it only creates a view of its input's memory, without reading it."""
    return operation.overloadpacket in _NAMES


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(structure) if isinstance(value, torch.Tensor)]


_SHAPES = {
    torch.ops.aten.zeros_like, torch.ops.aten.ones_like, torch.ops.aten.full_like, torch.ops.aten.empty_like,
    torch.ops.aten.new_zeros, torch.ops.aten.new_ones, torch.ops.aten.new_full, torch.ops.aten.new_empty,
}  # fmt: skip
_NAMES = {torch.ops.aten.detach, torch.ops.aten.alias}

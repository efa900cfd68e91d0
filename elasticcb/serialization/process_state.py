"""State of a process that changes what a program computes: Keras's configuration, seeds, switches of the frameworks,
absl flags, levels of loggers, and the working directory."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from tensorflow.python.eager import context
from tensorflow.python.framework import config as tensorflow_config

from elasticcb.keras_private import global_state, layers_of
from elasticcb.process import forwarded_logs
from elasticcb.serialization import own_modules
from elasticcb.serialization.object_paths import objects_in

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads, sets

_KERAS: dict[str, _Switch] = {
    "floatx": (keras.config.floatx, keras.config.set_floatx),
    "epsilon": (keras.config.epsilon, keras.config.set_epsilon),
    "image_data_format": (keras.config.image_data_format, keras.config.set_image_data_format),
    "dtype_policy": (keras.config.dtype_policy, keras.config.set_dtype_policy),
    "flash_attention": (
        keras.config.is_flash_attention_enabled,
        lambda on: keras.config.enable_flash_attention() if on else keras.config.disable_flash_attention(),
    ),
}
_TENSORFLOW: dict[str, _Switch] = {
    "functions_run_eagerly": (tf.config.functions_run_eagerly, tf.config.run_functions_eagerly),
    "tensor_float_32": (
        tf.config.experimental.tensor_float_32_execution_enabled,
        tf.config.experimental.enable_tensor_float_32_execution,
    ),
    "determinism": (
        tensorflow_config.is_op_determinism_enabled,
        lambda on: (tensorflow_config.enable_op_determinism if on else tensorflow_config.disable_op_determinism)(),
    ),
}
_SEED_GENERATOR = "global_seed_generator"  # of layers and operations without a seed of their own
_JAX = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_disable_jit", "jax_debug_nans",
)  # fmt: skip


def read_switches() -> dict[str, Any]:
    """What must be set before variables are created."""
    return {name: get() for name, (get, _) in _switches().items()}


def set_switches(values: Mapping[str, Any]) -> None:
    """Gives them to this process; those of frameworks that it has not imported are ignored."""
    for name, (get, put) in _switches().items():
        if name in values and get() != values[name]:
            put(values[name])


def read() -> dict[str, Any]:
    """Seeds, flags, loggers and the working directory of this process; can be pickled by `carry`."""
    return {
        "random": {
            **read_python(),
            "keras": global_state.get_global_attribute(_SEED_GENERATOR),  # None: not used yet
            "tensorflow": _tensorflow_seed(),
        },
        "flags": _flags(),
        "loggers": forwarded_logs.read_loggers(),
        "directory": _directory(),
    }


def write(state: Mapping[str, Any]) -> tuple[Any, Any]:
    """Gives it to this process, except that of PyTorch if it has not imported it. Returns the state of the given
    generator of Keras, and of the one that is used here."""
    seeds = state["random"]
    write_python(seeds)
    if seeds["tensorflow"] not in (None, _seeding.given):
        tf.random.set_seed(seeds["tensorflow"][0])
        _seeding.given = seeds["tensorflow"]
    _set_generator(seeds["keras"])
    _set_flags(state["flags"])
    forwarded_logs.set_loggers(state["loggers"])
    if state["directory"] != _directory():
        with contextlib.suppress(OSError):  # another machine may not have it
            os.chdir(state["directory"])
    own = global_state.get_global_attribute(_SEED_GENERATOR)
    return getattr(seeds["keras"], "state", None), getattr(own, "state", None)


@contextlib.contextmanager
def without_draws(model: keras.Model, of_python: bool) -> Iterator[None]:
    """Context whose random numbers do not count, nor other changes of variables besides the weights: those that losses,
    metrics, methods of the user's and attributes of layers hold, such as Keras's generators, are set back at the end,
    and so are the generators of Python, NumPy and PyTorch, also those that these use, if `of_python`. (Variables that
    layers track: first_batch.py; other attributes: SharedAttributes.)
    """
    shared = global_state.get_global_attribute(_SEED_GENERATOR)
    own = [layer for layer in layers_of(model) if own_modules.is_of_user(type(layer).__module__)]
    untracked = [each for layer in own for each in vars(layer).values() if isinstance(each, tf.Variable)]
    roots = [getattr(model, "loss", None), model.metrics, {*map(type, own)}, untracked, shared]
    found = list(objects_in(roots))
    weights = {id(each) for each in model.weights}
    kinds = (keras.Variable, tf.Variable)
    variables = [each for each in found if isinstance(each, kinds) and id(each) not in weights]
    before = [(each, np.array(each.numpy())) for each in variables]
    own_draws = [(put, get()) for get, put in filter(None, map(draws_of, found))] if of_python else []
    python = read_python()
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        for put, drawn in own_draws:
            put(drawn)
        own = global_state.get_global_attribute(_SEED_GENERATOR)
        drawn = read_python()
        write_python(python)
        if shared is None and own is not None:
            own.state.assign(keras.random.SeedGenerator().state)  # which draws the same seed from Python's generator
        write_python(python if of_python else drawn)


def read_python() -> dict[str, Any]:
    """The random states of Python, NumPy and PyTorch."""
    torch = sys.modules.get("torch")
    drawn = None if torch is None else torch.get_rng_state().numpy()
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": drawn}


def write_python(seeds: Mapping[str, Any]) -> None:
    random.setstate(seeds["python"])
    np.random.set_state(seeds["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and seeds["torch"] is not None:
        torch.set_rng_state(torch.from_numpy(seeds["torch"]))


class Draws:
    """The random states of Python, NumPy and PyTorch, and of the generator of Keras in the thread that creates this."""

    def __init__(self) -> None:
        self._of_thread = vars(global_state.GLOBAL_STATE_TRACKER)

    def read(self) -> dict[str, Any]:
        """In any thread."""
        generator = self._of_thread.get(_SEED_GENERATOR)  # None: not used yet
        return {**read_python(), "keras": None if generator is None else np.array(generator.state.numpy())}

    def write(self, drawn: Mapping[str, Any]) -> None:
        if drawn["keras"] is not None:
            if self._of_thread.get(_SEED_GENERATOR) is None:
                self._of_thread[_SEED_GENERATOR] = keras.random.SeedGenerator()
            self._of_thread[_SEED_GENERATOR].state.assign(drawn["keras"])
        write_python(drawn)  # last: a new generator of Keras draws from Python's


def draws_of(generator: Any) -> _Switch | None:
    """What reads and sets the state of a random generator of Python, NumPy or PyTorch; None: it is something else."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, functools.partial(setattr, bits, "state")  # each time a new dict
    if isinstance(generator, np.random.RandomState):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(generator, getattr(torch, "Generator", ())):
        drawn: Any = generator
        return lambda: drawn.get_state().numpy(), lambda state: drawn.set_state(torch.from_numpy(state))
    return None


def drawing(mine: Any, kind: type, state: Any) -> Any:
    """The random generator `mine`, or a new one if that is of another kind, with a state that `draws_of` has read."""
    if type(mine) is not kind:
        is_numpy = issubclass(kind, np.random.Generator)
        mine = kind(getattr(np.random, state["bit_generator"])()) if is_numpy else kind()
    draws = draws_of(mine)
    assert draws is not None
    draws[1](state)
    return mine


class _Seeding:
    """Calls of `tf.random.set_seed`: each begins all sequences of random numbers again, and makes TensorFlow compile
    again."""

    source: Any = None  # there is a new one after each call
    calls = 0
    given: tuple[int, int] | None = None  # by the caller to this process
    replaced: tuple[int, int] | None = None  # the given one for which this process has set its own


_seeding = _Seeding()


def _tensorflow_seed() -> tuple[int, int] | None:
    """The seed, and the number of the call that has set it."""
    source = getattr(context.context(), "_rng", None)
    if source is not _seeding.source:
        _seeding.source, _seeding.calls = source, _seeding.calls + 1
    seed = context.global_seed()
    return None if seed is None else (seed, _seeding.calls)


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _set_generator(given: keras.random.SeedGenerator | None) -> None:
    """Keeps the generator of this process, if it has one, because compiled functions use it."""
    own = global_state.get_global_attribute(_SEED_GENERATOR)
    if own is None:
        global_state.set_global_attribute(_SEED_GENERATOR, given)
    else:
        own.state.assign((given or keras.random.SeedGenerator()).state)


def use_own_seeds(index: int) -> None:
    """Makes this process draw other random numbers than those with another index."""
    drawn = random.getrandbits(31) + index
    random.seed(drawn)
    np.random.seed(drawn)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(drawn)
    if _seeding.given is not None and _seeding.replaced != _seeding.given:
        tf.random.set_seed(_seeding.given[0] + index)
        _seeding.replaced = _seeding.given
    generator = global_state.get_global_attribute(_SEED_GENERATOR)
    if generator is not None:
        diverge(generator, index)


def diverge(generator: keras.random.SeedGenerator, index: int) -> None:
    """Makes a generator draw other numbers than its copies in processes with another index."""
    state = generator.state
    state.assign(state + np.array([index, 0], keras.backend.standardize_dtype(state.dtype)))


def _switches() -> dict[str, _Switch]:
    found = {**_KERAS, **_TENSORFLOW}
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is not None and hasattr(jax, "config"):
        for name in _JAX:
            if name in jax.config.values:
                found[name] = (
                    functools.partial(jax.config.values.__getitem__, name),
                    functools.partial(jax.config.update, name),
                )
    if torch is not None and hasattr(torch, "get_default_dtype"):
        found["torch_dtype"] = (
            lambda: str(torch.get_default_dtype()).partition(".")[2],
            lambda name: torch.set_default_dtype(getattr(torch, name)),
        )
        found["torch_matmul"] = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        found["torch_deterministic"] = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    return found


def _flags() -> tuple[bool, dict[str, Any]]:
    """Whether flags were parsed, and those that the user's modules define or that have been changed."""
    found = {}
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        by_user = module not in sys.modules or module == "__main__" or own_modules.is_own(module)
        # Flags refuse to be pickled.
        found.update({each.name: (type(each), vars(each)) for each in defined if by_user or each.value != each.default})
    return flags.FLAGS.is_parsed(), found


def _set_flags(given: tuple[bool, dict[str, Any]]) -> None:
    parsed, found = given
    for name, (kind, attributes) in found.items():
        flag = flags.FLAGS[name] if name in flags.FLAGS else kind.__new__(kind)
        vars(flag).update(attributes)
        if name not in flags.FLAGS:
            flags.FLAGS[name] = flag
    if parsed and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()

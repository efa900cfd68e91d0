"""The catalogue of small programs, as users write them; `test_programs.py` trains each of them.

Their modules add to it. A program is a function that makes a model and its data, the same at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers

RECORDS, BATCH = 32, 8


@dataclass
class Given:
    """What `fit` is called with, and what is compared afterwards.

    Attributes:
        test: what `evaluate` and `predict` are called with, if that is not `x` and `y`.
        then: what the program does after its first `fit`, with `fit` as a function of the model and `fit`'s arguments.
        after: values of the program that are the same afterwards.
    """

    model: keras.Model
    x: Any
    y: Any = None
    sample_weight: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    test: tuple[Any, Any] | None = None
    then: Callable[[Callable[..., Any]], Any] | None = None
    after: Callable[[], Any] = list


@dataclass(frozen=True)
class Case:
    """One line of a list in docs/keras_support.md.

    Attributes:
        make: a new model, the same at each call, and its data.
        tolerance: how far weights and logs may be from those of `fit`, relative to the largest.
        everywhere: it runs on JAX and PyTorch as well.
    """

    group: str
    what: str
    make: Callable[[], Given]
    tolerance: float
    everywhere: bool


CASES: dict[str, Case] = {}


def case(
    group: str, what: str, tolerance: float = 1e-5, everywhere: bool = False
) -> Callable[[Callable[[], Given]], Callable[[], Given]]:
    def add(make: Callable[[], Given]) -> Callable[[], Given]:
        @functools.wraps(make)
        def seeded() -> Given:
            keras.utils.clear_session(free_memory=False)
            keras.utils.set_random_seed(3)
            return make()

        assert make.__name__ not in CASES, f"{make.__name__} is there twice"
        CASES[make.__name__] = Case(group, what, seeded, tolerance, everywhere)
        return seeded

    return add


def normal(*shape: int, seed: int = 5) -> Any:
    return np.random.default_rng([seed, *shape]).normal(size=(RECORDS, *shape)).astype("float32")


def integers(high: int, *shape: int, low: int = 0) -> Any:
    return np.random.default_rng([high, *shape]).integers(low, high, (RECORDS, *shape)).astype("int32")


def dense(*, dtype: Any = None, units: int = 1, **options: Any) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh", dtype=dtype), layers.Dense(units, dtype=dtype)]
    )
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"], **options})
    return model


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"], **options})
    return model

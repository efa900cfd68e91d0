"""Models as bytes: what comes back is the same model, whatever it is made of."""

from __future__ import annotations

import abc
import collections
import enum
import functools
import gc
import importlib
import re
import socket
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import elasticcb
from elasticcb.errors import UsageError
from elasticcb.serialization import carry
from elasticcb.serialization.reducers import Hollow

T = TypeVar("T")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def sent(model):
    """A copy whose weights are those that servers send."""
    return carry.loads(carry.dumps(model, "model", hollow=Hollow(model.weights)))


def restored(model):
    """A copy by way of bytes, with the weights."""
    model(X)
    copy = sent(model)
    copy(X)
    copy.set_weights(model.get_weights())
    return copy


def assert_same(copy, model):
    assert type(copy).__name__ == type(model).__name__
    assert len(copy.weights) == len(model.weights)
    np.testing.assert_allclose(copy(X), model(X), rtol=1e-6)


class Both(keras.Model):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def call(self, x):
        return ops.mean(self.first(x), -1, keepdims=True) + self.second(x)


def test_a_layer_in_two_functional_models_stays_one():
    inputs = keras.Input((4,))
    hidden = layers.Dense(2)(inputs)
    model = Both(keras.Model(inputs, hidden), keras.Model(inputs, layers.Dense(4)(hidden)))
    copy = restored(model)
    assert_same(copy, model)
    assert copy.first.layers[1] is copy.second.layers[1]


def test_a_layer_that_a_graph_and_a_model_within_it_call_stays_one():
    shared = keras.Sequential([keras.Input((4,)), layers.Dense(4, "tanh")])
    inner_inputs = keras.Input((4,))
    inner = keras.Model(inner_inputs, shared(inner_inputs))
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Add()([inner(shared(inputs)), shared(shared(shared(inputs)))]))
    assert_same(restored(model), model)


def test_a_sequential_class_that_makes_its_layers_does_not_make_them_twice():
    class Stack(keras.Sequential):
        def __init__(self, units):
            super().__init__([layers.Dense(units), layers.Dense(1)])
            self.units = units

    model = Stack(3)
    copy = restored(model)
    assert_same(copy, model)
    assert copy.units == 3


def test_a_functional_class_with_a_constructor_and_layers_of_its_own():
    class Scaled(keras.Model):
        def __init__(self, units, activation):
            inputs = keras.Input((4,))
            super().__init__(inputs, layers.Dense(units, activation)(inputs))
            self.last = layers.Dense(1)
            self.factors = {"a": (2.0, 3)}

        def call(self, x):
            return self.factors["a"][0] * self.last(super().call(x))

    model = Scaled(3, lambda x: 2 * x)
    assert_same(restored(model), model)


def test_classes_below_keras_layers_with_a_constructor_of_their_own():
    class Wide(layers.Dense):
        def __init__(self):
            super().__init__(3, activation="tanh")
            self.factor = 2.0

        def call(self, x):
            return self.factor * super().call(x)

        def get_config(self):
            raise ValueError("no config")

    class Recurrent(layers.LSTM):
        def __init__(self, units):
            super().__init__(units)

    wide = Wide()
    wide.factor = 5.0
    model = keras.Sequential([wide, layers.Reshape((3, 1)), Recurrent(2)])
    assert_same(restored(model), model)


def test_weights_in_lists_and_in_the_order_in_which_they_were_made():
    class Mixed(layers.Layer):
        def build(self, shape):
            b = self.add_weight((4,), "ones", name="b")
            a = self.add_weight((4,), "zeros", name="a")
            self.a, self.b = a, b
            self.more = [self.add_weight((4,), "ones", name=f"more{i}") for i in range(2)]
            self.count = self.add_weight((), "zeros", trainable=False, name="count")

        def call(self, x):
            return x * self.b + self.a + self.more[0] - self.more[1] + self.count

    model = keras.Sequential([Mixed()])
    model(X)
    model.set_weights([np.full(v.shape, i + 2.0) for i, v in enumerate(model.weights)])
    copy = restored(model)
    assert_same(copy, model)
    assert [v.name for v in copy.weights] == [v.name for v in model.weights]


def test_what_keras_keeps_of_an_earlier_compile_comes_back():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.compile("adam")
    again = sent(model)
    again.build((None, 2))
    history = [each.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0).history for each in (model, again)]
    assert history[0].keys() == history[1].keys() == {"loss", "mae"}
    assert model.get_compile_config()["metrics"] is None


def test_saving_leaves_the_model_and_its_functions_as_they_were():
    double = lambda x: 2 * x  # noqa: E731
    model = Both(layers.Dense(2, double), layers.Lambda(double, output_shape=(4,)))
    model(X)
    before = set(vars(model)), set(vars(model.first))
    sent(model)
    assert (set(vars(model)), set(vars(model.first))) == before
    assert double.__name__ == "<lambda>"
    assert keras.saving.get_registered_name(Both) == "Both"


def test_a_model_that_a_function_refers_to_travels_with_its_weights():
    teacher = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    teacher.set_weights([np.full((4, 1), 0.5), np.ones(1)])

    def distance(y, y_pred):
        return ops.abs(teacher(y) - y_pred)

    copy = carry.loads(carry.dumps(distance, "a function"))
    np.testing.assert_allclose(copy(X, 0.0), distance(X, 0.0), rtol=1e-6)


def test_a_function_that_refers_to_the_model_refers_to_the_same_model_in_the_copy():
    model = Both(layers.Dense(2), layers.Dense(4))
    model.compile("sgd", lambda y, y_pred: ops.mean(y - y_pred) * len(model.weights))
    model(X)
    copy = sent(model)
    assert copy._compile_loss._user_loss.__closure__[0].cell_contents is copy


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Event, threading.local])
def test_locks_are_made_anew(make):
    model = Both(layers.Dense(2), layers.Dense(4))
    model.lock = make()
    model(X)
    assert type(sent(model).lock) is type(model.lock)


def test_what_cannot_be_sent_is_named_by_its_path():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Dense(1)])
    model.layers[1].client = socket.socket()
    with pytest.raises(UsageError, match=r"model.layers\[1\].client: a socket can't be sent to workers"):
        sent(model)
    model.layers[1].client.close()

    data = tf.data.Dataset.range(3)
    with pytest.raises(UsageError, match=r"loss.data: .*can't be sent to workers.*elasticcb.DatasetFactory"):
        carry.dumps(lambda: list(data), "loss")


class NamedLikeTheFrameworks(keras.layers.Layer):
    """Has attributes with names such as those in which TensorFlow and `fit` keep something."""

    def __init__(self):
        super().__init__()
        self._self_attention, self.history = keras.layers.Dense(2), [1.0]

    def call(self, inputs):
        return self._self_attention(inputs) * self.history[-1]


def test_a_cluster_is_refused_by_its_path():
    with pytest.raises(UsageError, match=re.escape("callbacks[0]['run']: a Cluster can't be sent")):
        carry.dumps({"run": elasticcb.Cluster()}, "callbacks[0]")


def test_attributes_of_layers_may_have_names_like_those_of_the_frameworks():
    model = keras.Sequential([keras.Input((2,)), NamedLikeTheFrameworks()])
    copy = carry.loads(carry.dumps(model, "model"))
    np.testing.assert_array_equal(copy(np.ones((1, 2))), model(np.ones((1, 2))))


def test_a_weak_reference_to_nothing_stays_one():
    gone = weakref.ref(keras.layers.Dense(1))
    gc.collect()
    assert carry.loads(carry.dumps(gone, "gone"))() is None


def test_an_optimizer_for_servers_is_as_before_its_first_step():
    class Boosted(keras.optimizers.Adam):
        def __init__(self, boost):
            super().__init__(0.1)
            self.boost = boost

    optimizer = keras.optimizers.LossScaleOptimizer(Boosted(3.0))
    optimizer.build([keras.Variable(np.ones((2, 3)))])
    optimizer.inner_optimizer.iterations.assign(7)
    hollow = Hollow(optimizers=[optimizer], portable=True)
    copy = carry.loads(carry.dumps(optimizer, "an optimizer", hollow=hollow))
    inner = copy.inner_optimizer
    assert not copy.built
    assert not inner.built
    assert (inner.boost, int(inner.iterations.numpy()), len(inner.variables)) == (3.0, 0, 2)
    copy.build([keras.Variable(np.ones((4,)))])
    assert [tuple(each.shape) for each in inner._momentums] == [(4,)]


def test_modules_of_the_user_travel_with_their_present_values(tmp_path, monkeypatch):
    (tmp_path / "own_settings.py").write_text("SCALE = 1.0\n\n\ndef scaled(x):\n    return SCALE * x\n")
    (tmp_path / "own_functions.py").write_text(
        "import threading\nimport own_settings\n\n\ndef doubled(x):\n    return 2 * own_settings.scaled(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_functions")
    settings = sys.modules["own_settings"]
    settings.SCALE = 5.0
    data = carry.dumps(own.doubled, "a function")
    for name in ("own_functions", "own_settings"):
        monkeypatch.delitem(sys.modules, name)
    assert carry.loads(data)(1) == 10.0


def test_a_module_and_its_functions_have_one_set_of_globals(tmp_path, monkeypatch):
    (tmp_path / "counts_of_steps.py").write_text("N = 0\n\n\ndef count():\n    global N\n    N += 1\n")
    (tmp_path / "steps_that_count.py").write_text(
        "import counts_of_steps as c\n\n\ndef step():\n    c.count()\n    c.N += 10\n    c.count()\n    return c.N\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    step = importlib.import_module("steps_that_count").step
    sys.modules["counts_of_steps"].N = 100
    data = carry.dumps_graph({"step": step}, {}, {}, Hollow(), None)[0]
    for name in ("counts_of_steps", "steps_that_count"):
        monkeypatch.delitem(sys.modules, name)
    assert carry.loads(data)["step"]() == 112
    assert "steps_that_count" not in sys.modules  # only functions of it travel


def test_a_deep_graph_needs_no_deep_recursion():
    inputs = x = keras.Input((4,))
    for _ in range(400):
        x = layers.Activation("tanh")(x)
    model = keras.Model(inputs, x)
    assert len(sent(model).layers) == len(model.layers)


def test_large_arrays_are_mapped_from_a_file_and_may_be_changed(tmp_path):
    array = np.arange(1 << 18, dtype="float64")

    def dumped():
        return carry.dumps_graph({"a": array}, {}, {}, Hollow(), tmp_path)[0]

    copy = carry.loads(dumped())["a"]
    copy[0] = 5.0
    again = dumped()
    assert len(again) < 1000
    np.testing.assert_array_equal(carry.loads(again)["a"], array)


@pytest.fixture
def elsewhere(monkeypatch):
    """Reads as another process does, which has none of the classes."""

    def read(data):
        with monkeypatch.context() as patched:
            patched.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
            patched.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", weakref.WeakKeyDictionary())
            return carry.loads(data)

    return read


def test_classes_have_their_attributes_and_are_not_defined_again(elsewhere):
    classes = {}

    class Registering(abc.ABCMeta):
        def __new__(cls, name, bases, content, *, key, **options):
            made = super().__new__(cls, name, bases, content, **options)
            classes[key] = made
            return made

        def __init__(cls, name, bases, content, **options):
            super().__init__(name, bases, content)

        def __setattr__(cls, name, value):
            if not name.startswith("_"):
                raise AttributeError("constant")
            super().__setattr__(name, value)

    class Shape(Generic[T], metaclass=Registering, key="shape"):
        labels: ClassVar = []

        def __init_subclass__(cls, *, label):
            super().__init_subclass__()
            cls.labels.append((cls.corners, label))

        @abc.abstractmethod
        def area(self): ...

    class Square(Shape[int], key="square", label="square"):
        corners = 4

        def area(self):
            return classes["square"] is type(self)

    Shape.register(int)
    copy = elsewhere(carry.dumps(Square, "a class"))
    base = copy.__base__
    assert copy is not Square
    assert (copy().area(), copy.labels, copy.__orig_bases__) == (True, [(4, "square")], (base[int],))
    assert issubclass(int, base)
    with pytest.raises(TypeError, match="abstract"):
        base()

    class Circle(Shape[int], key="circle", label="circle"):
        corners = 0

    assert elsewhere(carry.dumps((Circle, Square), "classes"))[0].labels == [(4, "square"), (0, "circle")]


def test_enums_keep_aliases_and_what_their_members_have(elsewhere):
    class Planet(enum.Enum):
        EARTH = (5.0, 6.0)
        HOME = EARTH

        def __init__(self, mass, radius):
            self.mass, self.radius = mass, radius

    class Letter(str, enum.Enum):
        A = "a"

        def __new__(cls, value):
            made = str.__new__(cls, value)
            made._value_, made.upper_case = value, value.upper()
            return made

    class Access(enum.IntFlag):
        READ = 1
        WRITE = 2
        ALL = 3

    class Operation(enum.Enum):
        PLUS = (lambda a, b: a + b,)

        def __init__(self, function):
            self.function = function

    used = Access.READ | 8
    enums = [Planet, Letter, Access, Operation]
    members = [Planet.HOME, Letter.A, Access.ALL, Operation.PLUS, used, enum.Enum]
    for order in (lambda a, b: [a, b], lambda a, b: [b, a]):
        data = carry.dumps(order(enums, members), "enums")
        (planet, letter, access, operation), found = order(*elsewhere(data))
        assert found == [planet.EARTH, letter.A, access.ALL, operation.PLUS, access(9), enum.Enum]
        assert planet is not Planet
        assert (planet["HOME"].mass, planet((5.0, 6.0)), list(planet)) == (5.0, planet.EARTH, [planet.EARTH])
        assert (letter("a").upper_case, letter.A + "b") == ("A", "ab")
        assert (access.READ | access.WRITE, access.ALL.name, access.READ + 1) == (access.ALL, "ALL", 2)
        assert operation.PLUS.function(1, 2) == 3
    assert carry.loads(data)[0] == members


def test_objects_with_slots_come_there_and_back(elsewhere):
    class Point:
        __slots__ = ("__weak", "x")

        def __init__(self, x):
            self.x = self.__weak = x

        def both(self):
            return self.x, self.__weak

    there = elsewhere(carry.dumps(Point(3), "a point"))
    assert type(there) is not Point
    assert (there.both(), hasattr(there, "__dict__")) == ((3, 3), False)


@functools.cache
def fibonacci(number):
    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)


class Squares:
    @functools.lru_cache(maxsize=2, typed=True)  # noqa: B019
    def of(self, number):
        return number**2


def test_functions_with_a_cache_begin_with_an_empty_one(elsewhere):
    fibonacci(5)
    copy, kind = elsewhere(carry.dumps((fibonacci, Squares), "functions"))
    assert copy is not fibonacci
    assert copy.cache_info().currsize == 0
    assert (copy(10), copy.__name__, copy.cache_parameters()["maxsize"]) == (55, "fibonacci", None)
    assert (kind().of(3), kind.of.cache_parameters()) == (9, {"maxsize": 2, "typed": True})


def test_weak_references_of_all_kinds_refer_to_what_travels():
    model = keras.Sequential([layers.Dense(2)])
    named = weakref.WeakValueDictionary(model=model)
    copy, method, named = carry.loads(carry.dumps((model, weakref.WeakMethod(model.fit), named), "references"))
    assert method().__self__ is copy
    assert named["model"] is copy


class Slots:
    __slots__ = ("client",)


class Lazy(Mapping):
    """Whose items are somewhere else."""

    def __init__(self, client):
        self.client = client

    def __getitem__(self, key):
        raise AssertionError

    def __iter__(self):
        raise AssertionError

    def __len__(self):
        raise AssertionError


def test_what_cannot_be_sent_is_found_in_objects_of_all_kinds_without_their_methods():
    slots = Slots()
    with socket.socket() as client:
        slots.client = client
        found = {
            "slots.client": slots,
            "deque[0]": collections.deque([client]),
            "partial.args[0]": functools.partial(print, client),
            "array[0]": np.array([client], object),
            "lazy.client": Lazy(client),
        }
        for path, value in found.items():
            with pytest.raises(UsageError, match=rf"^{re.escape(path)}: a socket can't be sent"):
                carry.dumps(value, re.split(r"[.\[]", path)[0])


def test_a_chain_that_is_too_long_is_refused_in_a_short_message():
    class Node:
        def __init__(self, after):
            self.after = after

    last = None
    for _ in range(20_000):
        last = Node(last)
    with pytest.raises(UsageError, match=r"^node\.after.*a chain of objects .* is too long") as caught:
        carry.dumps(last, "node")
    assert len(str(caught.value)) < 1000
    while last is not None:  # Python would free it by a recursion
        last = last.after


def test_functions_of_one_scope_share_its_variables():
    count = 1

    def rise():
        nonlocal count
        count += 1

    def factorial(number):
        return number * factorial(number - 1) if number else count

    def early():
        return late

    again, others, missing = carry.loads(carry.dumps((rise, factorial, early), "functions"))
    again()
    assert others(3) == 12
    assert factorial(3) == 6
    with pytest.raises(NameError):
        missing()
    late = 0

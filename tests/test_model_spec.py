"""Model files: what they may hold, and what is said about those that are wrong."""

from __future__ import annotations

import sys
import textwrap

import keras
import numpy as np
import pytest

from elasticcb.callbacks import PredictionOutputsProcessor
from elasticcb.compute.registry import backend
from elasticcb.errors import DataError, ModelFileError
from elasticcb.model.input_pipeline import open_pipeline
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.model_file import ModelSpec
from elasticcb.model.spec import input_names
from elasticcb.settings import Command, DataSettings, JobSettings, Mode, ModelSettings, TrainingSettings

HEAD = """
import keras
import numpy as np
import tensorflow as tf

import elasticcb.callbacks
"""
GOOD = {
    "custom_model": """
        def custom_model():
            return keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(1)])
    """,
    "loss": """
        def loss(labels, predictions):
            return keras.losses.mean_squared_error(labels, predictions)
    """,
    "optimizer": """
        def optimizer():
            return keras.optimizers.SGD(0.5)
    """,
    "feed": """
        def feed(dataset, mode, metadata):
            if mode == "prediction":
                return dataset.map(lambda record: record["x"])
            return dataset.map(lambda record: (record["x"], record["y"]))
    """,
}


@pytest.fixture
def write(tmp_path):
    """Writes a model file; parts replace those of a good one. Returns the settings of a job with it."""

    names: list[str] = []

    def write(more: str = "", **parts: str) -> JobSettings:
        texts = [HEAD, *({**GOOD, **parts}.values()), more]
        name = f"model_{abs(hash(tmp_path))}_{len(names)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text("\n".join(textwrap.dedent(text) for text in texts))
        x = np.arange(24, dtype=np.float32).reshape(8, 3)
        np.savez(tmp_path / "data.npz", x=x, y=x[:, :1])
        data = str(tmp_path / "data.npz")
        return JobSettings(
            command=Command.TRAIN,
            name="job",
            directory=str(tmp_path),
            model=ModelSettings(zoo=str(tmp_path), definition=f"{name}.custom_model"),
            data=DataSettings(training=data, validation=data, prediction=data),
            training=TrainingSettings(minibatch_size=2),
        )

    yield write
    for name in names:
        sys.modules.pop(name, None)


def build(settings: JobSettings, mode: Mode = Mode.TRAINING) -> tuple[ModelSpec, keras.Model]:
    """What every process does before it works."""
    spec = ModelSpec(settings.model)
    model = spec.build_model()
    metrics = ModelMetrics(model, spec.make_eval_metrics())
    if mode is Mode.TRAINING:
        spec.require_trainable(model)
    backend().build(spec, model, open_pipeline(settings, spec, mode).first_batch(), mode)
    metrics.reset()
    spec.make_callbacks()
    return spec, model


def first_loss(settings: JobSettings) -> float:
    """The loss of the first batch of two records, at present weights."""
    spec = ModelSpec(settings.model)
    model = spec.build_model()
    ModelMetrics(model, spec.make_eval_metrics())
    return float(model.test_step(open_pipeline(settings, spec, Mode.TRAINING).first_batch())["loss"])


ONES = """
    def custom_model():
        ones = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([keras.Input((3,)), ones])
"""
# Of records [0, 1, 2] and [3, 4, 5] with ones as weights: predictions 3 and 12, labels 0 and 3.
SQUARES = np.array([9.0, 81.0])
REGULARIZATION = 0.3


@pytest.mark.parametrize(
    ("loss", "weighted", "unweighted"),
    [
        (GOOD["loss"], True, SQUARES.mean()),
        ("def loss(labels, predictions):\n    return tf.square(labels - predictions)", True, SQUARES.mean()),
        ("loss = keras.losses.MeanSquaredError()", True, SQUARES.mean()),
        ("loss = keras.losses.MeanSquaredError", True, SQUARES.mean()),
        ("loss = 'mse'", True, SQUARES.mean()),
        ("def loss(y, p):\n    return tf.reduce_sum(tf.square(y - p))", False, SQUARES.sum()),
        ("def loss(y, p, w):\n    return tf.reduce_mean((y - p)[:, 0] ** 2 * (1 if w is None else w))", True, 45.0),
        (
            "def loss(y, p, *, sample_weight=None): return tf.reduce_mean((y - p) ** 2) * (sample_weight or 1)",
            True,
            45.0,
        ),
    ],
)
def test_loss_may_be_given_in_many_ways(write, loss, weighted, unweighted):
    assert first_loss(write(custom_model=ONES, loss=loss)) == pytest.approx(unweighted + REGULARIZATION)
    feed = """
        def feed(dataset, mode, metadata):
            return dataset.map(lambda record: (record["x"], record["y"], record["y"][0] + 1))
    """
    if not weighted:
        with pytest.raises(ModelFileError, match="returns one number for the whole batch"):
            build(write(custom_model=ONES, loss=loss, feed=feed))


def test_sample_weights_of_feed_weigh_a_loss_that_takes_none(write):
    feed = """
        def feed(dataset, mode, metadata):
            return dataset.map(lambda record: (record["x"], record["y"], record["y"][0] + 1))
    """
    expected = np.mean(SQUARES * [1, 4]) + REGULARIZATION
    for loss in (
        GOOD["loss"],
        "loss = 'mse'",
        "def loss(labels, predictions):\n    return (labels - predictions) ** 2",
    ):
        assert first_loss(write(custom_model=ONES, loss=loss, feed=feed)) == pytest.approx(expected)


def test_class_of_a_model_and_its_parameters(write):
    settings = write(
        custom_model="""
            class custom_model(keras.Model):
                def __init__(self, units):
                    super().__init__()
                    self.dense = keras.layers.Dense(units)

                def call(self, x):
                    return self.dense(x)
        """
    )
    model_settings = ModelSettings(zoo=settings.model.zoo, definition=settings.model.definition, params={"units": 1})
    spec = ModelSpec(model_settings)
    model = spec.build_model()
    backend().build(spec, model, open_pipeline(settings, spec, Mode.TRAINING).first_batch(), Mode.TRAINING)
    assert [tuple(weight.shape) for weight in model.weights] == [(3, 1), (1,)]


def test_first_batch_gives_its_size_to_no_layer(write):
    settings = write(
        custom_model="""
            def custom_model():
                return keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
        """
    )
    _, model = build(settings)
    assert (model.input_shape, model.layers[0].output.shape) == ((None, 3), (None, 2))


def test_optimizer_may_be_a_name_and_wins_over_that_of_a_compiled_model(write):
    compiled = """
        def custom_model():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model
    """
    spec, model = build(write(custom_model=compiled, optimizer="optimizer = 'adam'"))
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert isinstance(spec.make_optimizer(), keras.optimizers.Adam)


def test_optimizer_of_the_file_scales_the_loss_as_that_of_the_compiled_model_does(write):
    compiled = """
def custom_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=8.0)
    model.compile(scaled, "mse")
    return model
"""
    model = build(write(custom_model=compiled, optimizer="def optimizer():\n    return keras.optimizers.SGD()"))[1]
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.SGD)
    assert model.optimizer.initial_scale == 8.0


class TestMistakes:
    @pytest.mark.parametrize(
        ("parts", "mode", "words"),
        [
            ({"feed": ""}, "training", None),  # the reader brings one for x and y
            ({"loss": ""}, "training", r"has no loss. Define `loss\(labels, predictions\)` in the file, or return"),
            ({"optimizer": ""}, "training", r"can't be trained.*`optimizer\(\)`"),
            ({"loss": "loss = 3"}, "training", r"`loss` in .* is 3. Expected a function of \(labels, predictions\)"),
            ({"loss": "def loss(y): return y"}, "training", r"takes \(y\). Expected loss\(labels, predictions\)"),
            ({"loss": "def loss(y, p): return None"}, "training", "returned None .*Expected a floating-point"),
            ({"loss": "def loss(y, p): return tf.argmax(p, 1)"}, "training", "int64.*Expected a floating-point"),
            ({"loss": "def loss(y, p): return y @ p"}, "training", r"(?s)first batch.*features tensor\(2, 3\) float32"),
            ({"optimizer": "def optimizer(): return 3"}, "training", "provides no valid optimizer: 3"),
            ({"optimizer": "optimizer = keras.optimizers.SGD()"}, "training", "Make it a function"),
            ({"custom_model": "def custom_model(): return 3"}, "training", "returned int; expected a keras.Model"),
            ({"custom_model": "custom_model = keras.Sequential()"}, "training", "Make it a function"),
            (
                {"feed": "def feed(d, mode, metadata): return d.map(lambda r: (r['x'], r['x'], r['y'], r['y']))"},
                "training",
                r"returns tuples of 4 in training; expected \(features, labels\)",
            ),
            ({"feed": "def feed(d, mode, metadata): return d.map(lambda r: r['x'])"}, "training", "gives no labels"),
            (
                {"feed": "", "feed_batch": "def feed_batch(records, mode, metadata): return records['x']"},
                "training",
                r"`feed_batch` in \S+ gives no labels",
            ),
            ({"feed": "def feed(d, mode, metadata): return d.cache()"}, "training", "caches, .*Remove `cache`"),
            ({"feed": "def feed(d, mode, metadata): return d.repeat()"}, "training", "repeats, .*the number of epochs"),
            ({"feed": "def feed(d, mode, metadata): return d.batch(2)"}, "training", "batches, but"),
            ({"feed": "def feed(d, mode, metadata): return d.ignore_errors()"}, "training", "ignores errors"),
            (
                {"feed": "def feed(d, mode, metadata): return tf.data.Dataset.from_tensors((1, 2))"},
                "training",
                "not derived from its argument",
            ),
            ({"feed": "def feed(d, mode, metadata): return None"}, "training", "returned NoneType; expected a tf.data"),
            ({"feed": "def feed(dataset): return dataset"}, "training", r"raised TypeError: feed\(\) takes 1 pos"),
            (
                {"feed": "def feed(d, mode, metadata): return d.map(lambda r: (r['x'], r['z']))"},
                "training",
                r"feed\(\) in .* raised KeyError: 'z'",
            ),
            (
                {"feed": "def feed(d, mode, metadata): return d.map(lambda r: (r['x'], r['y']))"},
                "prediction",
                "(?s)In prediction, the data must be only features",
            ),
            (
                {
                    "more": "def eval_metrics_fn(): return {'clicks': {'auc': keras.metrics.AUC()}}",
                    "custom_model": """
                    def custom_model():
                        x = keras.Input((3,))
                        return keras.Model(x, {"click": keras.layers.Dense(1)(x)})
                 """,
                    "loss": "def loss(y, p): return keras.losses.mean_squared_error(y, p['click'])",
                },
                "training",
                "unknown output 'clicks'. The model's outputs and labels are: click",
            ),
            ({"more": "def eval_metrics_fn(): return [keras.metrics.AUC()]"}, "training", "expected a dict"),
            ({"more": "def eval_metrics_fn(): return {'auc': 'auc'}"}, "training", "as the metric 'auc'"),
            (
                {"more": "def eval_metrics_fn():\n  m = keras.metrics.AUC()\n  return {'a': m, 'b': m}"},
                "training",
                "the same metric object twice",
            ),
            ({"more": "def callbacks(): return keras.callbacks.Callback"}, "training", "expected a list"),
            ({"more": "def callbacks(): return [1]"}, "training", r"returned 1 in its list"),
            ({"more": "import nothing_of_this_name"}, "training", "can't be imported: ModuleNotFoundError"),
            ({"more": "def f(:"}, "training", "can't be imported: SyntaxError"),
            ({"more": "raise SystemExit(4)"}, "training", "can't be imported: SystemExit: 4"),
            ({"custom_model": "def custom_model(): exit(4)"}, "training", "in .* raised SystemExit: 4"),
            ({"optimizer": "optimizer = 'addam'"}, "training", "'addam', which is not the name of a Keras opt"),
        ],
    )
    def test_is_one_clear_error(self, write, parts, mode, words):
        if words is None:
            build(write(**parts), Mode(mode))
            return
        with pytest.raises(ModelFileError, match=words) as caught:
            build(write(**parts), Mode(mode))
        assert "elasticcb/" not in caught.value.user_traceback

    def test_traceback_has_the_users_lines_alone(self, write):
        model = """
            def custom_model():
                return build()

            def build():
                return keras.layers.Dense("many")
        """
        with pytest.raises(ModelFileError) as caught:
            build(write(custom_model=model))
        lines = caught.value.user_traceback.splitlines()
        assert lines[0].startswith("Traceback")
        assert sum(line.strip().startswith("File") for line in lines) == 2
        assert "Dense" in lines[-2] or "Dense" in lines[-3]

    def test_examples_of_different_shapes_tell_how_to_batch_them(self, write):
        feed = """
            def feed(dataset, mode, metadata):
                return dataset.map(lambda record: (record["x"][: tf.cast(record["y"][0], tf.int32)], record["y"]))
        """
        with pytest.raises(DataError, match=r"ragged_batch\(1\)") as caught:
            build(write(feed=feed))
        assert "function_node" not in str(caught.value)

    def test_feed_that_drops_all_records_is_told(self, write):
        feed = "def feed(dataset, mode, metadata): return dataset.filter(lambda record: record['y'][0] < 0)"
        with pytest.raises(DataError, match="returned no examples for all 8 records"):
            build(write(feed=feed))


def test_first_batch_is_found_behind_records_that_feed_drops(write):
    feed = """
        def feed(dataset, mode, metadata):
            kept = dataset.filter(lambda record: record["y"][0] > 20)
            return kept.map(lambda record: (record["x"], record["y"]))
    """
    settings = write(feed=feed)
    pipeline = open_pipeline(settings, ModelSpec(settings.model), Mode.TRAINING)
    assert pipeline.first_batch()[1].numpy().tolist() == [[21.0]]
    assert not pipeline.keeps_order


@pytest.mark.parametrize(
    ("arguments", "options", "keeps_order"),
    [
        ("num_parallel_calls=2", "", True),
        ("num_parallel_calls=2, deterministic=False", "", False),
        ("num_parallel_calls=2", "options.deterministic = False", False),
    ],
)
def test_maps_that_may_change_the_order_do_not_count_progress(write, arguments, options, keeps_order):
    feed = f"""
        def feed(dataset, mode, metadata):
            options = tf.data.Options()
            {options}
            return dataset.map(lambda record: (record["x"], record["y"]), {arguments}).with_options(options)
    """
    settings = write(feed=feed)
    assert open_pipeline(settings, ModelSpec(settings.model), Mode.TRAINING).keeps_order is keeps_order


def test_one_named_feature_of_a_model_of_one_input_is_no_warning(write, recwarn):
    feed = """
        def feed(dataset, mode, metadata):
            return dataset.map(lambda record: ({"x": record["x"]}, record["y"]))
    """
    build(write(feed=feed))
    assert not [warning for warning in recwarn if "structure" in str(warning.message)]


class TestPredictionOutputsProcessor:
    def test_class_of_the_model_file_is_used(self, write):
        plain = "class PredictionOutputsProcessor:\n    def process(self, predictions, worker_id): pass"
        spec = ModelSpec(write(plain).model)
        (callback,) = spec.make_callbacks()
        assert isinstance(callback, PredictionOutputsProcessor)

    def test_subclass_of_ours_is_used_once(self, write):
        derived = """
            class PredictionOutputsProcessor(elasticcb.callbacks.BasePredictionOutputsProcessor):
                def process(self, predictions, worker_id): pass
        """
        spec = ModelSpec(write(derived).model)
        (callback,) = spec.make_callbacks()
        assert type(callback) is spec.module.PredictionOutputsProcessor
        spec.module.callbacks = lambda: [spec.module.PredictionOutputsProcessor()]
        assert len(spec.make_callbacks()) == 1

    def test_our_own_class_when_imported_is_not(self, write):
        spec = ModelSpec(write("from elasticcb.callbacks import PredictionOutputsProcessor").model)
        assert spec.make_callbacks() == []


def test_inputs_of_models_have_names_where_keras_passes_a_dict_by_them():
    inputs = {name: keras.Input((), name=name) for name in ("b", "a")}
    output = keras.ops.add(*inputs.values())
    assert input_names(keras.Model(inputs, output)) == ("b", "a")
    assert input_names(keras.Model(list(inputs.values()), output)) == ("b", "a")
    assert input_names(keras.Sequential([keras.layers.Dense(1)])) is None
    assert input_names(keras.Model({"both": list(inputs.values())}, output)) is None

    class Own(keras.Model):
        """Its step may use other columns."""

    assert input_names(Own(inputs, output)) is None

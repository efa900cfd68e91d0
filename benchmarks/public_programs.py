"""Public Keras programs on a cluster, compared with Keras's own `fit`.

    python benchmarks/public_programs.py --keras_rs=CHECKOUT --keras_io=CHECKOUT [--only=vae,dcn]
        [--results=FOLDER] [--into=PAGE]

The programs are the examples of keras-rs, and examples and guides of keras.io; none of their code is here. Each runs
three times in a process of its own, with small generated data (generated_data.py): as it is, and with
`cluster.fit(model, …)` in place of `model.fit(…)` (also `evaluate` and `predict`) on one worker and on two. So that
results can be compared, data is not shuffled, dropout is off, and each call trains two epochs of some batches.
A checkout of keras.io may be several folders, separated by commas; the first that has a program counts.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import publish, table_parser

ROWS, BATCHES, EPOCHS = 256, 4, 2
SAME, NEAR = 1e-3, 0.25  # relative differences
LIMIT = 900  # seconds for a program


@dataclass(frozen=True)
class Program:
    """A file of a checkout.

    Attributes:
        sizes: what is made smaller: parts of its text, and what stands there instead.
        missing: why it can't run here.
    """

    path: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""


# In every program.
SMALLER = {
    "100_000": "1_000",
    "90_000": "800",
    "85_000": "2_500",
    "80_000": "2_400",
    "70_000": "2_000",
    "20_000": "600",
    "15_000": "500",
    "10_000": "1_000",
    "batch(1000)": "batch(40)",
    "shuffle=True": "shuffle=False",
    "BATCH_SIZE = 512": "BATCH_SIZE = 32",
    "BATCH_SIZE = 1024": "BATCH_SIZE = 16",
    "BATCH_SIZE = 2048": "BATCH_SIZE = 64",
    "BATCH_SIZE = 4096": "BATCH_SIZE = 64",
    "BATCH_SIZE = 265": "BATCH_SIZE = 64",
    "batch_size = 265": "batch_size = 64",
    "batch_size=265": "batch_size=64",
    "maxlen = 200": "maxlen = 30",
    "LIST_PER_USER = 50": "LIST_PER_USER = 5",
    "MAX_CONTEXT_LENGTH = 200": "MAX_CONTEXT_LENGTH = 12",
}

KERAS_RS = [
    Program("examples/basic_ranking.py"),
    Program("examples/basic_retrieval.py"),
    Program("examples/data_parallel_retrieval.py", missing="distributes the model by itself (`keras.distribution`)"),
    Program("examples/dcn.py", {"range(10)": "range(1)"}),
    # Keras 3.15 has one dimension less there.
    Program("examples/deep_recommender.py", {'_X_raw_user_age"], axis=-1': '_X_raw_user_age"]'}),
    Program("examples/listwise_ranking.py"),
    Program("examples/multi_task.py"),
    Program("examples/sas_rec.py"),
    Program("examples/scann.py"),
    Program("examples/sequential_retrieval.py"),
    Program("examples/ml_perf/main.py", missing="needs a TPU with SparseCore"),
]

TABLES, SERIES, TEXT = "examples/structured_data", "examples/timeseries", "examples/nlp"
IMAGES, RECIPES = "examples/generative", "examples/keras_recipes"
# In older checkouts.
KERAS_3 = {f"tf.{name}(": f"keras.ops.{name}(" for name in ("expand_dims", "unstack", "stack", "squeeze")}
KERAS_3["tf.range(start=0, limit=sequence_length - 1, delta=1)"] = "keras.ops.arange(sequence_length - 1)"
MNIST = {"60000": "640", "10000": "160"}  # as images() in generated_data.py makes it
KERAS_IO = [
    Program(f"{TABLES}/classification_with_grn_and_vsn.py", KERAS_3),
    Program(f"{TABLES}/collaborative_filtering_movielens.py"),
    Program(f"{TABLES}/deep_neural_decision_forests.py", {"num_trees = 25": "num_trees = 3"}),
    Program(f"{TABLES}/imbalanced_classification.py", {"/Users/fchollet/Downloads/": ""}),
    Program(f"{TABLES}/movielens_recommendations_transformers.py", KERAS_3),
    Program(f"{TABLES}/structured_data_classification_from_scratch.py"),
    Program(f"{TABLES}/structured_data_classification_with_feature_space.py"),
    Program(f"{TABLES}/tabtransformer.py", {"tf.data.": "tf_data."}),
    Program(f"{TABLES}/wide_deep_cross_networks.py", KERAS_3),
    Program(f"{SERIES}/timeseries_anomaly_detection.py"),
    Program(f"{SERIES}/timeseries_classification_from_scratch.py"),
    Program(f"{SERIES}/timeseries_classification_transformer.py", {"_blocks=4": "_blocks=1"}),
    Program(f"{SERIES}/timeseries_traffic_forecasting.py"),
    Program(f"{SERIES}/timeseries_weather_forecasting.py", {"show_heatmap(df)": "pass"}),
    Program(f"{TEXT}/addition_rnn.py", {"TRAINING_SIZE = 50000": "TRAINING_SIZE = 600", "epochs = 30": "epochs = 3"}),
    Program(f"{TEXT}/bidirectional_lstm_imdb.py"),
    Program(f"{TEXT}/lstm_seq2seq.py", {"latent_dim = 256": "latent_dim = 32", "range(20)": "range(1)"}),
    Program(
        f"{TEXT}/neural_machine_translation_with_transformer.py",
        {"latent_dim = 2048": "latent_dim = 64", 'os["KERAS_BACKEND"]': 'os.environ["KERAS_BACKEND"]'},
    ),
    Program(f"{TEXT}/pretrained_word_embeddings.py", {'os.path.expanduser("~"), ".keras/datasets/': '"'}),
    Program(f"{TEXT}/text_classification_from_scratch.py"),
    Program(
        f"{TEXT}/text_classification_with_switch_transformer.py",
        {"example = 200": "example = 20", "inputs, training)": "inputs, training=False)"},
    ),
    Program(f"{TEXT}/text_classification_with_transformer.py", {"inputs, training)": "inputs, training=False)"}),
    Program(f"{IMAGES}/conditional_gan.py"),
    Program(
        f"{IMAGES}/ddim.py",
        {"[32, 64, 96, 128]": "[8, 16]", '"imagenet"': "None"},
    ),
    Program(f"{IMAGES}/lstm_character_level_text_generation.py", {"(epochs)": "(1)", "(400)": "(2)"}),
    Program(f"{IMAGES}/pixelcnn.py", {"n_residual_blocks = 5": "n_residual_blocks = 1"}),
    Program(f"{IMAGES}/text_generation_with_miniature_gpt.py", {"vocab_size = 20000": "vocab_size = 200"}),
    Program(f"{IMAGES}/vae.py"),
    Program(f"{IMAGES}/wgan_gp.py"),
    Program(f"{RECIPES}/antirectifier.py"),
    Program(f"{RECIPES}/endpoint_layer_pattern.py"),
    Program(f"{RECIPES}/memory_efficient_embeddings.py", {"1700": "1000", "vocabulary) // 50": "vocabulary) // 5"}),
    Program(f"{RECIPES}/sklearn_metric_callbacks.py", {"self.model = model": "pass"}),
    Program(f"{RECIPES}/subclassing_conv_layers.py", {'padding="valid"': 'padding="VALID"'}),
    Program(f"{RECIPES}/tensorflow_numpy_models.py"),
    Program(f"{RECIPES}/trainer_pattern.py"),
    Program("guides/custom_train_step_in_tensorflow.py"),
    Program("guides/functional_api.py", {**MNIST, "VGG19()": "VGG19(weights=None)"}),
    Program("guides/making_new_layers_and_models_via_subclassing.py", MNIST),
    Program("guides/training_with_built_in_methods.py", MNIST),
    Program("guides/transfer_learning.py", {"(150, 150": "(75, 75", '"imagenet"': "None"}),
    Program("guides/writing_your_own_callbacks.py", {"np.Inf": "np.inf"}),
]


# ---------------------------------------------------------------- in the process of a program

METHODS = ("fit", "evaluate", "predict")


class Calls(ast.NodeTransformer):
    """`model.fit(…)` becomes `_calls.call("fit", model, …)`, but in classes: their methods are the program's own."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            function = ast.parse("_calls.call", mode="eval").body
            arguments = [ast.Constant(node.func.attr), node.func.value, *node.args]
            return ast.copy_location(ast.Call(function, arguments, node.keywords), node)
        return node


def rewritten(text: str, sizes: Mapping[str, str]) -> str:
    for old, new in {**SMALLER, **sizes}.items():
        text = text.replace(old, new)
    tree = Calls().visit(ast.parse(text))
    place = next((i for i, each in enumerate(tree.body) if isinstance(each, (ast.Import, ast.ImportFrom))), 0)
    while isinstance(tree.body[place], ast.ImportFrom) and tree.body[place].module == "__future__":
        place += 1
    tree.body.insert(place, ast.parse("import _calls").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


class Recorder:
    """Carries out a program's calls in one way, and keeps what they come to.

    Args:
        cluster: None for Keras.
    """

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.results: list[tuple[str, dict[str, float]]] = []

    def call(self, name: str, model: Any, *args: Any, **options: Any) -> Any:
        import keras

        if not isinstance(model, keras.Model):
            return getattr(model, name)(*args, **options)
        if name != "predict":  # programs compare outputs with all of their data
            args = tuple(shortened(each) for each in args)
            for key in ("x", "y", "sample_weight", "validation_data"):
                if options.get(key) is not None:
                    options[key] = shortened(options[key])
        options["verbose"] = 0
        if name == "fit":
            options |= {"epochs": min(options.get("epochs", 1), EPOCHS), "shuffle": False}
            if options.get("steps_per_epoch"):
                options["steps_per_epoch"] = BATCHES
            if isinstance(options.get("validation_freq"), int):
                options["validation_freq"] = 1
        if self.cluster is None:
            found = getattr(model, name)(*args, **options)
        else:
            found = getattr(self.cluster, name)(model, *args, **options)
        self.results.append((name, numbers(name, found)))
        return found


def shortened(data: Any) -> Any:
    """The first records or batches."""
    import keras
    import numpy as np
    import tensorflow as tf

    if isinstance(data, tf.data.Dataset):
        return data.take(BATCHES)
    if isinstance(data, (np.ndarray, tf.Tensor)) and data.ndim:
        return data[:ROWS]
    if isinstance(data, (list, tuple, dict)):
        return keras.tree.map_structure(lambda each: shortened(each) if hasattr(each, "shape") else each, data)
    return data.iloc[:ROWS] if hasattr(data, "iloc") else data


def csv_dataset(read: Any, *args: Any, **options: Any) -> Any:
    """In the order of its files, and of plain dicts: Keras 3 takes the entries of others in their order."""

    def plain(features: Any, *label: Any) -> Any:
        return (dict(features), *label) if label else dict(features)

    return read(*args, **{**options, "shuffle": False}).map(plain)


def numbers(name: str, found: Any) -> dict[str, float]:
    """Of a call: the logs of the last epoch, those of an evaluation, or the mean of each output."""
    import keras
    import numpy as np

    if name == "fit":
        return {key: float(np.mean(values[-1])) for key, values in found.history.items()}
    if isinstance(found, dict) and name == "evaluate":
        return {key: float(np.mean(value)) for key, value in found.items()}
    flat = [np.asarray(each) for each in keras.tree.flatten(found)]
    return {f"{name} {i}": float(np.mean(each)) for i, each in enumerate(flat) if each.dtype.kind in "biuf"}


def adapt(layer: Any, argument: str, change: Any) -> None:
    """Changes what the constructor of a layer gets as its first argument."""
    construct = layer.__init__

    @functools.wraps(construct)
    def adapted(self: Any, *args: Any, **options: Any) -> None:
        if argument in options:
            options[argument] = change(options[argument])
        construct(self, *map(change, args[:1]), *args[1:], **options)

    adapted.__signature__ = inspect.signature(construct)  # type: ignore[attr-defined]
    layer.__init__ = adapted  # Keras looks at its arguments


def imported(text: str) -> list[str]:
    """The modules that a program imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return sorted({*found} - {"_calls"})


def run(path: str, sizes: Mapping[str, str], kind: str, into: str) -> None:
    """Runs a program in each way, and writes what it came to."""
    import generated_data
    import keras
    import tensorflow as tf

    import elasticcb
    from elasticcb.errors import UsageError

    module: Any = types.ModuleType("_calls")
    sys.modules["_calls"] = module
    generated_data.install()
    tf.data.Dataset.shuffle = lambda self, *_, **__: self
    tf.data.experimental.make_csv_dataset = functools.partial(csv_dataset, tf.data.experimental.make_csv_dataset)
    adapt(keras.layers.Dropout, "rate", lambda rate: 0.0)
    adapt(keras.layers.Embedding, "input_dim", int)  # Keras 3.15 refuses NumPy's integers, which programs give it
    script = Path("program.py").absolute()
    script.write_text(rewritten(Path(path).read_text(encoding="utf-8"), sizes), encoding="utf-8")
    for name in imported(script.read_text(encoding="utf-8")):  # some draw random numbers
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    ways: dict[str, Any] = {}
    for workers in (0, 1, 2):
        keras.utils.clear_session(free_memory=False)
        generated_data.random_numbers.bit_generator.state = type(generated_data.random_numbers.bit_generator)(0).state
        cluster = elasticcb.Cluster(workers, kind=kind, log_level="WARNING") if workers else None
        keras.utils.set_random_seed(1)
        recorder = Recorder(cluster)
        module.call = recorder.call
        error = ""
        try:
            runpy.run_path(str(script), run_name="__main__")
        except UsageError as refusal:
            error = f"refused: {refusal}"
        except BaseException as failure:
            traceback.print_exc()
            error = f"failed: {type(failure).__name__}: {failure}"
        if cluster is not None:
            cluster.close()
        ways[str(workers)] = {"results": recorder.results, "error": error}
        Path(into).write_text(json.dumps(ways))
        if not workers and error:
            return


# ---------------------------------------------------------------- the table


def compared(way: Any, keras_way: Any, workers: int) -> str:
    """What a cell of the table says."""
    if way is None:
        return "failed: took too long"
    if way["error"]:
        return one_line(way["error"])
    worst, what = -1.0, ""
    for (name, found), (_, expected) in zip(way["results"], keras_way["results"], strict=workers == 1):
        if found.keys() != expected.keys():
            return f"differs: {name} returned {', '.join(found)}, Keras {', '.join(expected)}"
        for key, value in expected.items():
            if workers > 1 and not key.endswith("loss"):  # which batches a worker gets is another matter
                continue
            difference = abs(found[key] - value) / max(abs(value), 1e-2)
            if not difference <= worst:  # or not a number
                worst, what = difference, f"{key} {found[key]:.4g} for {value:.4g}"
    if worst <= SAME:
        return "same" if what else "runs"
    if worst <= NEAR:
        return "near" if workers > 1 else f"near: {what}"
    return f"differs: {what}"


def one_line(text: str) -> str:
    return re.sub(r"[|\s]+", " ", text)[:160]


def outcome(program: Program, checkouts: list[Path], results: Path, kind: str) -> str:
    """The cells of one worker and of two; a program whose results are there is not run."""
    if program.missing:
        return f"not run: {program.missing} | "
    path = next((each / program.path for each in checkouts if (each / program.path).exists()), None)
    if path is None:
        return "not run: not in this checkout | "
    into = results / f"{path.stem}.json"
    if not into.exists():
        command = [sys.executable, __file__, "--run", str(path), json.dumps(dict(program.sizes)), kind, str(into)]
        with (
            tempfile.TemporaryDirectory() as folder,
            into.with_suffix(".log").open("w") as log,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            subprocess.run(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT, check=False)
    ways = json.loads(into.read_text()) if into.exists() else {}
    keras_way = ways.get("0", {"error": "failed: no result"})
    if keras_way["error"]:
        return f"not run: Keras's own run {one_line(keras_way['error'])} | "
    return " | ".join(compared(ways.get(str(workers)), keras_way, workers) for workers in (1, 2))


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:6])
        return
    parser = table_parser(__doc__ or "")
    parser.add_argument("--keras_rs", type=lambda text: [Path(each).absolute() for each in text.split(",")], default=[])
    parser.add_argument("--keras_io", type=lambda text: [Path(each).absolute() for each in text.split(",")], default=[])
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    parser.add_argument("--results", type=Path, help="a folder for results and logs; what is there is not run again")
    parser.add_argument("--kind", default="local", help="of the clusters: local or inprocess")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    only = [name for name in arguments.only.split(",") if name]
    results = (arguments.results or Path(tempfile.mkdtemp())).absolute()
    results.mkdir(parents=True, exist_ok=True)
    alike: dict[str, list[str]] = {}  # programs by their cells
    for checkouts, programs in ((arguments.keras_rs, KERAS_RS), (arguments.keras_io, KERAS_IO)):
        for program in programs if checkouts else ():
            if not only or Path(program.path).stem in only:
                cells = outcome(program, checkouts, results, arguments.kind)
                alike.setdefault(cells, []).append(f"`{program.path}`")
                print(f"{program.path}: {cells}", flush=True)
    lines = ["| one worker | two workers | programs |", "|---|---|---|"]
    lines += [f"| {cells} | {', '.join(names)} |" for cells, names in alike.items()]
    publish("public programs", "\n".join(lines), arguments.into)


if __name__ == "__main__":
    main()

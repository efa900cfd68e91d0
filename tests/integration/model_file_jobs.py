"""What jobs with model files need: records, the files as modules, the weights that come out."""

import importlib.util

import numpy as np

RECORDS = 96


def load_module(path):
    """The model file as a module of the test, for what plain Keras makes of it."""
    spec = importlib.util.spec_from_file_location(f"of_test_{abs(hash(str(path)))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_arrays(path, seed=0, **arrays):
    """An .npz of `x` [RECORDS, 6], `y` (0 or 1) and `number`, which is the record's own."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(RECORDS, 6)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + generator.normal(size=(RECORDS, 1)) > 0).astype("float32")
    np.savez(path, x=x, y=y, number=np.arange(RECORDS), **arrays)
    return str(path)


def weights_saver(folder):
    """Source of a callback that writes the final weights where `final_weights` reads them."""
    return f"""
    class SaveWeights(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            np.savez("{folder}/final.npz", *self.model.get_weights())
    """


def final_weights(folder):
    with np.load(folder / "final.npz") as saved:
        return [saved[name] for name in saved.files]

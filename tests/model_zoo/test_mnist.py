import gzip
import struct

import numpy as np
import pytest
from zoo_jobs import fed, import_zoo, train

from elasticcb.data import checked_sources

MODELS = ("mnist_functional.custom_model", "mnist_subclass.MnistModel")


@pytest.mark.deep
@pytest.mark.parametrize("model", MODELS)
def test_mnist_learns_and_exports(model, shared_data, tmp_path, capsys):
    images = shared_data / "mnist" / "t10k-images-idx3-ubyte.gz"
    trained = train(
        "mnist",
        tmp_path,
        capsys,
        model_def=f"mnist.{model}",
        training_data=f"{images}[:2048]",
        validation_data=f"{images}[9500:]",
        minibatch_size=32,
        num_epochs=3,
    )
    assert trained.metrics["accuracy"] > 0.8

    zoo_module = import_zoo("mnist/mnist_functional")
    reader = zoo_module.custom_data_reader(f"{images}[9500:]")
    (features, labels), *_ = fed(zoo_module, reader, "evaluation", batch=500)
    (name,) = trained.feature_names
    logits = trained.predict(**{name: features["image"]})
    assert np.mean(logits.argmax(-1) == labels) == pytest.approx(trained.metrics["accuracy"], abs=0.005)


@pytest.fixture
def idx():
    return import_zoo("mnist/idx")


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def folder(tmp_path):
    """Ten images of 2 x 3 whose values are their label, in both spellings."""
    for prefix, ending in (("train", ".gz"), ("t10k", "")):
        labels = np.arange(10)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{ending}", labels)
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{ending}", np.tile(labels[:, None, None], (1, 2, 3)))
    return tmp_path


@pytest.mark.parametrize(
    ("part", "labels"), [("", range(10)), ("[:4]", range(4)), ("[4:]", range(4, 10)), ("[2:5]", range(2, 5))]
)
def test_idx_range_takes_a_part_of_a_file(idx, folder, part, labels):
    reader = idx.custom_data_reader(f"{folder}/train-images-idx3-ubyte.gz{part}")
    (source,) = checked_sources(reader)
    records = list(reader.read(source.name, 0, source.count))
    assert [record["label"] for record in records] == list(labels)
    assert all((record["image"] == record["label"]).all() for record in records)
    assert records[0]["image"].shape == reader.element_spec["image"].shape == (2, 3)


def test_idx_file_that_is_cut_off_is_refused(idx, folder):
    images = folder / "t10k-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"promises the shape \(10, 2, 3\), but holds 59 values"):
        idx.custom_data_reader(str(images)).sources()


def test_images_and_labels_of_different_number_are_refused(idx, folder):
    write_idx(folder / "t10k-labels-idx1-ubyte", np.arange(9))
    with pytest.raises(ValueError, match="holds 10 images, but its labels file 9 labels"):
        idx.custom_data_reader(f"{folder}/t10k-images-idx3-ubyte").sources()

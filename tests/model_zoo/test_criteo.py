import numpy as np
import pytest
from zoo_jobs import fed, import_zoo, train

from elasticcb.data import open_reader


@pytest.fixture
def sample(shared_data):
    return shared_data / "criteo" / "criteo_sample.txt"


@pytest.fixture
def tsv(sample, tmp_path):
    """The sample as the data set itself is written: tabs, no header."""
    path = tmp_path / "train.txt"
    path.write_text(sample.read_text().partition("\n")[2].replace(",", "\t"))
    return path


@pytest.mark.deep
@pytest.mark.parametrize("model", ["deepfm", "dcn"])
def test_criteo_model_learns_and_exports(model, tsv, tmp_path, capsys):
    trained = train(
        "criteo",
        tmp_path,
        capsys,
        model_def=f"criteo.{model}.custom_model",
        model_params="bins=500",
        training_data=tsv,
        validation_data=tsv,
        minibatch_size=16,
        num_epochs=12,
        evaluation_steps=1000,  # only at the end
    )
    # 200 records say nothing of other records; that the model learns these shows that gradients arrive.
    assert trained.metrics["auc"] > 0.9

    zoo_module = import_zoo(f"criteo/{model}")
    (features, labels), *_ = fed(zoo_module, open_reader(str(tsv), {"format": "tsv"}), "training", batch=200)
    probabilities = trained.predict(**features)
    assert probabilities[labels == 1].mean() > probabilities[labels == 0].mean() + 0.2
    assert len(trained.feature_names) == 39


def test_criteo_csv_with_header_and_tsv_without_give_the_same_features(sample, tsv):
    features = import_zoo("criteo/features")
    csv_reader = open_reader(str(sample), {"format": "csv", "header": True})
    (from_csv,) = fed(features, csv_reader, "training", batch=200)
    (from_tsv,) = fed(features, open_reader(str(tsv), {"format": "tsv"}), "training", batch=200)
    for name in features.COLUMNS:
        np.testing.assert_array_equal(from_csv[0][name], from_tsv[0][name])
    np.testing.assert_array_equal(from_csv[1], from_tsv[1])
    assert np.isnan(from_csv[0]["I1"]).any()
    assert (from_csv[0]["C22"] == b"").any()


def test_criteo_lines_to_predict_for_have_no_label(tsv, tmp_path):
    unlabelled = tmp_path / "test.txt"
    unlabelled.write_text("".join(line.partition("\t")[2] for line in tsv.open()))
    features = import_zoo("criteo/features")
    (labelled,) = fed(features, open_reader(str(tsv), {"format": "tsv"}), "training", batch=200)
    (bare,) = fed(features, open_reader(str(unlabelled), {"format": "tsv"}), "prediction", batch=200)
    assert bare.keys() == labelled[0].keys()
    np.testing.assert_array_equal(bare["C1"], labelled[0]["C1"])


def test_criteo_numbers_become_logarithms_and_empty_ones_are_told_apart():
    import keras

    features = import_zoo("criteo/features")
    inputs = {name: np.full(4, np.nan, np.float32) for name in features.NUMERIC}
    inputs["I2"] = np.array([0, np.e - 1, -1, np.nan], np.float32)
    numbers = keras.ops.convert_to_numpy(features.numeric_features(inputs))
    np.testing.assert_allclose(numbers[:, 1], [0, 1, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(numbers[:, 13 + 1], [1, 1, 1, 0])
    assert np.isfinite(numbers).all()


def test_criteo_columns_do_not_share_rows_of_the_table():
    import keras
    import tensorflow as tf

    features = import_zoo("criteo/features")
    inputs = {name: tf.constant(["68fd1e64", ""]) for name in features.CATEGORICAL}
    indices = keras.ops.convert_to_numpy(features.categorical_indices(inputs, bins=100))
    np.testing.assert_array_equal(indices // 100, np.tile(np.arange(26), (2, 1)))

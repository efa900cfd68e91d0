import numpy as np
import pytest
from zoo_jobs import fed, first_lines, import_zoo, train

from elasticcb.data import open_reader


@pytest.fixture
def adult_data(shared_data, tmp_path):
    return first_lines(shared_data / "census" / "adult.data", tmp_path / "adult.data", lines=6000)


def test_census_learns_and_exports(adult_data, tmp_path, capsys):
    trained = train("census", tmp_path, capsys, training_data=adult_data, validation_data=adult_data, num_epochs=2)
    assert trained.metrics["auc"] > 0.82
    assert trained.metrics["accuracy"] > 0.78  # 0.76 earn less

    zoo_module = import_zoo("census/census")
    assert trained.feature_names == set(zoo_module.COLUMNS) - {"fnlwgt"}

    reader = open_reader(str(adult_data))
    batches = list(fed(zoo_module, reader, "evaluation", batch=512))
    hits = np.concatenate([(trained.predict(**x) > 0.5) == (y > 0.5) for x, y in batches])
    assert np.mean(hits) == pytest.approx(trained.metrics["accuracy"], abs=1e-4)

    # A value that no training data holds, and missing ones, are values like any other.
    features = {name: value[:2] for name, value in batches[0][0].items()}
    features |= {"workclass": [b"?", b"Astronaut"], "native_country": [b"?", b"Atlantis"]}
    assert np.all((trained.predict(**features) > 0) & (trained.predict(**features) < 1))


def test_census_lines_are_either_trained_or_held_out(adult_data):
    zoo_module = import_zoo("census/census")
    reader = open_reader(str(adult_data))
    counts = {
        mode: sum(len(labels) for _, labels in fed(zoo_module, reader, mode, batch=1000))
        for mode in ("training", "evaluation")
    }
    assert sum(counts.values()) == 6000
    assert counts["evaluation"] == pytest.approx(1200, rel=0.1)
    (features, *_) = fed(zoo_module, reader, "prediction", batch=6000)
    assert len(features["age"]) == 6000


def test_census_vocabularies_hold_every_value_of_the_data(shared_data):
    zoo_module = import_zoo("census/census")
    lines = (shared_data / "census" / "adult.data").read_text().splitlines()
    rows = [line.split(", ") for line in lines if line]
    for name, vocabulary in zoo_module.VOCABULARIES.items():
        column = zoo_module.COLUMNS.index(name)
        assert {row[column] for row in rows} - {"?"} == set(vocabulary)

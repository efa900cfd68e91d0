import numpy as np
import pytest
from zoo_jobs import fed, first_lines, import_zoo, train

from elasticcb.data import open_reader


def test_movielens_learns_and_exports(shared_data, tmp_path, capsys):
    ratings = first_lines(shared_data / "ml-100k" / "u.data", tmp_path / "u.data", lines=20_000)
    trained = train("movielens", tmp_path, capsys, training_data=ratings, validation_data=ratings, num_epochs=2)
    zoo_module = import_zoo("movielens/movielens")
    (features, labels), *_ = fed(zoo_module, open_reader(str(ratings)), "evaluation", batch=20_000)
    predictions = trained.predict(**features)
    error = np.sqrt(np.mean((predictions - labels) ** 2))
    assert error == pytest.approx(trained.metrics["rmse"], rel=1e-3)
    assert error < 0.92 * np.std(labels)  # which the mean rating would give
    assert trained.feature_names == {"user", "item"}
    assert predictions.min() >= 1
    assert predictions.max() <= 5

import numpy as np
from zoo_jobs import ZOO, fed, import_zoo, train

from elasticcb.data import open_reader


def test_compiled_iris_model_learns_and_exports(tmp_path, capsys):
    trained = train("iris", tmp_path, capsys)
    assert trained.metrics["accuracy"] > 0.8

    zoo_module = import_zoo("iris/iris")
    reader = open_reader(str(ZOO / "iris" / "test.csv"), {"header": True})
    (features, labels), *_ = fed(zoo_module, reader, "evaluation", batch=30)
    probabilities = trained.predict(measurements=features)
    assert np.mean(probabilities.argmax(-1) == labels) >= 0.9
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)

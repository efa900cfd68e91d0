"""Jobs with model files of ElasticDL."""

import numpy as np
import tensorflow as tf
from model_file_jobs import RECORDS

from elasticcb.settings import Command
from jobs import job_settings, run_job, write_model_file

# ElasticDL's model_zoo/mnist/mnist_functional_api.py, smaller. Renamed: `elasticdl.python.common.constants` and
# `elasticdl.python.worker.prediction_outputs_processor` to `elasticcb` and `elasticcb.callbacks`,
# `elasticdl.python.elasticdl.callbacks` to `elasticcb.callbacks`. Nothing else is changed.
MODEL_FILE = """
    import tensorflow as tf
    from elasticcb import Mode
    from elasticcb.callbacks import LearningRateScheduler, BasePredictionOutputsProcessor

    def custom_model():
        inputs = tf.keras.Input(shape=(8, 8), name="image")
        x = tf.keras.layers.Reshape((8, 8, 1))(inputs)
        x = tf.keras.layers.Conv2D(4, kernel_size=(3, 3), activation="relu")(x)
        x = tf.keras.layers.BatchNormalization()(x)
        x = tf.keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
        x = tf.keras.layers.Dropout(0.25)(x)
        x = tf.keras.layers.Flatten()(x)
        outputs = tf.keras.layers.Dense(10)(x)
        return tf.keras.Model(inputs=inputs, outputs=outputs, name="mnist_model")

    def loss(labels, predictions):
        labels = tf.reshape(labels, [-1])
        return tf.reduce_mean(
            input_tensor=tf.nn.sparse_softmax_cross_entropy_with_logits(logits=predictions, labels=labels)
        )

    def optimizer(lr=0.1):
        return tf.optimizers.SGD(lr)

    def callbacks():
        def _schedule(model_version):
            return 0.0003 if model_version < 5 else 0.0002

        return [LearningRateScheduler(_schedule)]

    def feed(dataset, mode, _):
        def _parse_data(record):
            if mode == Mode.PREDICTION:
                feature_description = {"image": tf.io.FixedLenFeature([8, 8], tf.float32)}
            else:
                feature_description = {
                    "image": tf.io.FixedLenFeature([8, 8], tf.float32),
                    "label": tf.io.FixedLenFeature([1], tf.int64),
                }
            r = tf.io.parse_single_example(record, feature_description)
            features = {"image": tf.math.divide(tf.cast(r["image"], tf.float32), 255.0)}
            if mode == Mode.PREDICTION:
                return features
            else:
                return features, tf.cast(r["label"], tf.int32)

        dataset = dataset.map(_parse_data)

        if mode == Mode.TRAINING:
            dataset = dataset.shuffle(buffer_size=1024)
        return dataset

    def eval_metrics_fn():
        return {
            "accuracy": lambda labels, predictions: tf.equal(
                tf.argmax(predictions, 1, output_type=tf.int32),
                tf.cast(tf.reshape(labels, [-1]), tf.int32),
            )
        }

    class PredictionOutputsProcessor(BasePredictionOutputsProcessor):
        def __init__(self):
            self.path = "FOLDER/predicted"

        def process(self, predictions, worker_id):
            with open(f"{self.path}-{worker_id}", "a") as file:
                for row in predictions:
                    file.write(" ".join(map(str, row)) + "\\n")
"""


def write_records(path):
    generator = np.random.default_rng(2)
    images = generator.uniform(0, 255, (RECORDS, 8, 8)).astype("float32")
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number, image in enumerate(images):
            feature = {
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=image.reshape(-1))),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 10])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())
    return str(path)


def test_file_of_the_model_zoo_of_elasticdl_trains_evaluates_and_predicts(tmp_path, recwarn):
    records = write_records(tmp_path / "digits.tfrecord")
    path = write_model_file(tmp_path, MODEL_FILE.replace("FOLDER", str(tmp_path)), "mnist_of_elasticdl")
    common = {"num_workers": 2, "minibatch_size": 16, "num_minibatches_per_task": 2}
    settings = job_settings(
        path,
        tmp_path / "train",
        training=records,
        validation=records,
        directory=str(tmp_path / "checkpoints"),
        num_epochs=2,
        **common,
    )
    summary, _ = run_job(settings)
    assert summary.version == 2 * RECORDS // 16
    assert summary.records_per_epoch == (RECORDS, RECORDS)
    assert 0 <= summary.metrics["accuracy"] <= 1
    assert not [w for w in recwarn if "structure of `inputs`" in str(w.message)]

    settings = job_settings(
        path,
        tmp_path / "predict",
        Command.PREDICT,
        prediction=records,
        directory_for_init=str(tmp_path / "checkpoints"),
        num_ps=2,
        **common,
    )
    summary, _ = run_job(settings)
    assert summary.records_predicted == RECORDS
    rows = [line.split() for file in tmp_path.glob("predicted-*") for line in file.read_text().splitlines()]
    predicted = np.array(rows, "float32")
    assert predicted.shape == (RECORDS, 10)
    assert len(np.unique(predicted, axis=0)) == RECORDS  # no record twice, none left out

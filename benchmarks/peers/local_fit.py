"""A contestant in one process: `fit` of Keras 3, or of `tf_keras`.

python local_fit.py WORKLOAD BATCH_SIZE keras|tf_keras
"""

import sys

from gate import Course, end_with_parent
from workloads import compiled_model, dataset


def main() -> None:
    end_with_parent()
    workload, batch_size, which = sys.argv[1:]
    legacy = which == "tf_keras"
    if legacy:
        import tf_keras as keras
    else:
        import keras
    course = Course()

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            course.stepped()

    model = compiled_model(workload, legacy)
    model.fit(dataset(int(batch_size)), steps_per_epoch=1_000_000_000, callbacks=[Steps()], verbose=0)


if __name__ == "__main__":
    main()

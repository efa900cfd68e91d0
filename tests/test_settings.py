import pytest

from elasticcb.errors import UsageError
from elasticcb.settings import (
    CheckpointSettings,
    ClusterKind,
    ClusterSettings,
    Command,
    DataSettings,
    JobSettings,
    ModelSettings,
    NonFinite,
    TrainingSettings,
)

SETTINGS = JobSettings(
    command=Command.TRAIN,
    name="job",
    directory="/jobs/job",
    model=ModelSettings(zoo="/zoo", definition="a.b.custom_model", params={"width": 3}),
    data=DataSettings(training="train.csv", reader_params={"delimiter": "\t"}),
    training=TrainingSettings(minibatch_size=7, non_finite=NonFinite.SKIP),
    checkpoint=CheckpointSettings(directory="/checkpoints", steps=10),
    cluster=ClusterSettings(kind=ClusterKind.EXTERNAL, num_ps=3),
    output="/model",
)


def test_settings_arrive_as_they_were_sent():
    assert JobSettings.from_json(SETTINGS.to_json()) == SETTINGS


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        "{}",
        SETTINGS.to_json().replace('"minibatch_size"', '"batch"'),
        SETTINGS.to_json().replace('"train"', '"tran"'),
        SETTINGS.to_json().replace('"external"', '"lunar"'),
    ],
)
def test_settings_of_another_release_are_refused_in_words(text):
    with pytest.raises(UsageError, match="same release"):
        JobSettings.from_json(text)


def test_a_task_holds_whole_batches():
    assert TrainingSettings(minibatch_size=32, num_minibatches_per_task=8).records_per_task == 256


def test_max_step_counts_updates_and_so_takes_several_batches_each_in_synchronous_mode():
    assert TrainingSettings(max_step=10).max_batches == 10
    assert TrainingSettings(max_step=10, use_async=False, grads_to_wait=4).max_batches == 40
    assert TrainingSettings().max_batches == 0

import numpy as np
import pytest

from elasticcb.errors import UsageError
from elasticcb.settings import (
    CheckpointSettings,
    ClusterSettings,
    Command,
    DataSettings,
    EmbeddingOptions,
    ExchangeOptions,
    Given,
    JobSettings,
    KubernetesSettings,
    LostUpdates,
    ModelSettings,
    NonFinite,
    RecoveryOptions,
    TrainingSettings,
    written,
)
from elasticcb.settings.checks import completed, problems_of
from elasticcb.settings.choices import EXPECTED
from elasticcb.settings.names import GROUPS
from elasticcb.settings.names import SETTINGS as ALL_SETTINGS

SETTINGS = JobSettings(
    command=Command.TRAIN,
    name="job",
    directory="/jobs/job",
    model=ModelSettings(zoo="/zoo", definition="a.b.custom_model", params={"width": 3}),
    data=DataSettings(training="train.csv", reader_params={"delimiter": "\t"}),
    training=TrainingSettings(minibatch_size=7, non_finite=NonFinite.SKIP),
    embedding=EmbeddingOptions(tables={"users": {"min_count": 3}}),
    checkpoint=CheckpointSettings(directory="/checkpoints", steps=10),
    cluster=ClusterSettings(kind="external", num_ps=3),
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
        SETTINGS.to_json().replace('"stop"', '"halt"'),
    ],
)
def test_settings_of_another_release_are_refused_in_words(text):
    with pytest.raises(UsageError, match="same release"):
        JobSettings.from_json(text)


def test_single_values_are_checked_by_the_limits_of_their_fields():
    given = {
        "num_workers": 1.5,
        "checkpoint_dir": 3,
        "exchange": ExchangeOptions(max_staleness=-1),
        "recovery": RecoveryOptions(lease_seconds=float("inf"), max_ps_restarts=-1),
    }
    assert sorted(Given.by_arguments(given).problems) == [
        "ExchangeOptions(max_staleness=-1) is invalid. Expected at least 0.",
        "RecoveryOptions(lease_seconds=inf) is invalid. Expected a finite number.",
        "RecoveryOptions(max_ps_restarts=-1) is invalid. Expected at least 0.",
        "checkpoint_dir=3 is invalid. Expected text.",
        "num_workers=1.5 is invalid. Expected a whole number.",
    ]


def test_settings_of_tables_are_checked_by_the_limits_of_their_fields():
    tables = {"users": {"max_rows": np.int64(7), "max_age": -1, "rate": 3}, "items": None, 3: {}}
    given = Given.by_arguments({"embedding": EmbeddingOptions(tables=tables)})
    age, rate, *others = problems_of(given.settings(), given)
    assert age == f"EmbeddingOptions.tables, 'users': max_age=-1 is invalid. {EXPECTED}"
    assert rate.endswith("'rate'. Expected one of learning_rate_multiplier, min_count, max_age, max_rows, rows_dtype.")
    expected = "Expected the name of a table with its settings, such as {'users': {'min_count': 3}}."
    assert others == [f"EmbeddingOptions.tables, {name}: {expected}" for name in ("'items'", "3")]
    assert Given.by_arguments({"embedding": EmbeddingOptions(tables=[])}).problems == [
        "EmbeddingOptions(tables=[]) is invalid. Expected a mapping, such as {users: {min_count: 3}}."
    ]


@pytest.mark.parametrize(
    ("text", "flags", "arguments"),
    [
        ("{max_ps_restarts:1}.", "--max_ps_restarts=1.", "RecoveryOptions(max_ps_restarts=1)."),
        (
            "({embedding_memory_bytes}, {num_ps})",
            "(--embedding_memory_bytes, --num_ps)",
            "(EmbeddingOptions.memory_bytes, num_ps)",
        ),
        ("{dashboard:false} can't", "--dashboard=false can't", "dashboard=False can't"),
        ("{checkpoint_dir:/points}", "--checkpoint_dir=/points", "checkpoint_dir='/points'"),
    ],
)
def test_messages_name_settings_as_their_reader_does(text, flags, arguments):
    assert (written(text, False), written(text, True)) == (flags, arguments)


def test_silence_follows_a_shorter_lease_unless_it_is_given():
    for options, seconds in (({}, 20), ({"silence_seconds": 5}, 5)):
        given = Given.by_arguments({"recovery": RecoveryOptions(lease_seconds=20, **options)})
        assert completed(given.settings(), given).cluster.silence_seconds == seconds


def test_every_setting_says_what_it_does():
    for each in ALL_SETTINGS.values():
        assert each.help.endswith((".", "…"))
        assert "--" not in each.help + each.default_text
        assert f"{each.field}: {written(each.help, each.owner in GROUPS.values())}" in each.owner.__doc__
    assert "max_staleness: Embedding tables: how many batches" in ExchangeOptions.__doc__


@pytest.mark.parametrize(
    ("given", "batches", "expected"),
    [
        ({"num_minibatches_per_task": 8}, 1000, 8),
        ({}, 1000, 64),
        ({}, 100, 12),  # four for each of two workers
        ({}, 3, 1),
        ({}, None, 16),
        ({"local_steps": 10}, 1000, 70),  # whole windows
        ({"local_steps": 100}, 1000, 100),
        ({"local_steps": 16}, 100, 12),
        ({"updates": "async", "local_steps": 10}, 1000, 70),
    ],
)
def test_tasks_are_as_long_as_lets_workers_end_together(given, batches, expected):
    assert TrainingSettings(**given).batches_per_task(batches, 2) == expected


@pytest.mark.parametrize(
    ("given", "updates", "window"),
    [
        ({}, "local", None),
        ({"local_steps": 8}, "local", 8),
        ({"updates": "sync"}, "sync", 1),
        ({"updates": "async"}, "async", 1),
        ({"updates": "async", "local_steps": 8}, "async", 8),
        ({"use_async": True}, "async", 1),
        ({"use_async": False}, "sync", 1),
        ({"grads_to_wait": 2}, "sync", 1),
        ({"get_model_steps": 8}, "async", 8),
        ({"use_async": True, "get_model_steps": 8}, "async", 8),
    ],
)
def test_modes_and_the_flags_of_elasticdl_are_windows(given, updates, window):
    settings = TrainingSettings(**given)
    assert (settings.updates.value, settings.window) == (updates, window)
    assert JobSettings.from_json(JobSettings(command=Command.TRAIN, training=settings).to_json()).training == settings


def test_settings_that_are_shown_hold_no_secrets():
    pods = KubernetesSettings(
        envs="TZ=UTC,LOGIN=hush-1", cluster_spec={"all": {"spec": {"env": [{"name": "A", "value": "hush-2"}]}}}
    )
    settings = JobSettings(
        command=Command.TRAIN,
        data=DataSettings(
            reader_params={"columns": ["a"], "api_key": "hush-3", "storage_options": {"secret": "hush-4"}}
        ),
        callback_params={"authorization": "hush-5", "nested": [{"password": "hush-6", "rate": 0.5}]},
        cluster=ClusterSettings(kubernetes=pods),
    )
    shown = settings.to_show()
    assert "hush" not in shown
    for kept in ('"columns": ["a"]', "TZ=***", '"rate": 0.5', '"api_key": "***"'):
        assert kept in shown
    assert "hush-6" in settings.to_json()


def test_lost_updates_are_repeated_only_where_something_is_trained_and_saved():
    for changes, repeats in (
        ({}, True),
        ({"command": Command.EVALUATE}, False),
        ({"checkpoint": CheckpointSettings(interval_seconds=0)}, False),
        ({"cluster": ClusterSettings(lost_updates=LostUpdates.ACCEPT)}, False),
    ):
        assert JobSettings(**{"command": Command.TRAIN, **changes}).repeats_lost is repeats

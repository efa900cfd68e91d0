from __future__ import annotations

import re

from elasticcb.settings import (
    CheckpointSettings,
    ClusterSettings,
    Command,
    JobSettings,
    NonFinite,
    TrainingSettings,
    Updates,
    WorkerRange,
)
from elasticcb.settings.names import SETTINGS


def test_only_the_needed_flags_give_the_defaults_of_the_settings(workplace):
    settings = workplace.settings(*workplace.train)
    assert settings.command is Command.TRAIN
    assert settings.training == TrainingSettings()
    assert settings.checkpoint == CheckpointSettings(directory=f"{settings.directory}/model")
    assert settings.cluster == ClusterSettings()
    assert settings.model.zoo == str(workplace.root / "zoo")
    assert settings.model.definition == "linear.linear.custom_model"
    assert settings.data.training == str(workplace.root / "data/train.csv")
    assert settings.name == "linear"


def test_autoscaled_job_begins_with_the_least_workers_unless_it_is_told_otherwise(workplace):
    settings = workplace.settings(*workplace.train, "--autoscale= 2..8 ")
    assert settings.cluster == ClusterSettings(num_workers=2, autoscale=WorkerRange(2, 8))
    assert JobSettings.from_json(settings.to_json()) == settings
    assert workplace.settings(*workplace.train, "--autoscale=2..8", "--num_workers=3").cluster.num_workers == 3


def test_no_two_settings_have_one_flag():
    spellings = [name for option in SETTINGS.values() for name in (option.name, *option.aliases)]
    assert len(set(spellings)) == len(spellings)


def test_dashes_and_underscores_are_the_same(workplace):
    settings = workplace.settings(
        "--model-zoo=zoo",
        "--model_def=linear.linear.custom_model",
        "--training-data=data/train.csv",
        "--num-workers",
        "3",
        "--num-ps-pods=4",
        "--grads-to_wait=2",
        "--use-async=false",
    )
    assert (settings.cluster.num_workers, settings.cluster.num_ps) == (3, 4)
    assert settings.training.updates is Updates.SYNC


def test_all_kinds_of_values_reach_the_settings(workplace):
    settings = workplace.settings(
        *workplace.train,
        "--feed=my_feed",
        "--minibatch_size=32",
        "--lease_seconds=2.5",
        "--non_finite=SKIP",
        "--cluster=inprocess",
        "--checkpoint_dir=new/checkpoints",
        "--keep_checkpoint_max=0",
        "--output=export",
        "--export_dir=s3://models/clicks",
        "--export_every=10s",
        "--export_keep=3d",
        "--job_name=mine",
        "--log_level=warning",
        "--max_step=100",
    )
    assert settings.model.feed == "my_feed"
    assert settings.training.minibatch_size == 32
    assert settings.cluster.lease_seconds == settings.cluster.silence_seconds == 2.5
    assert settings.training.non_finite is NonFinite.SKIP
    assert settings.training.max_step == 100
    assert settings.cluster.kind == "inprocess"
    assert settings.checkpoint.directory == str(workplace.root / "new/checkpoints")
    assert settings.checkpoint.keep_max == 0
    assert settings.output == str(workplace.root / "export")
    export = settings.exports
    assert (export.directory, export.every, export.full_every) == ("s3://models/clicks", "10s", "6h")
    assert export.keep == "3d"
    assert settings.name == "mine"
    assert settings.log_level == "WARNING"


def test_params_are_read_as_yaml(workplace):
    text = "units=64; rate=1e-3;flag=true;off=no;none=null;name='007';sep=';';when=12:30;day=2024-01-02;e="
    settings = workplace.settings(*workplace.train, "--model_params", f"{text};l=[a, 1];m={{a: 0.5}}")
    assert settings.model.params == {
        "units": 64,
        "rate": 0.001,
        "flag": True,
        "off": "no",
        "none": None,
        "name": "007",
        "sep": ";",
        "when": "12:30",
        "day": "2024-01-02",
        "e": "",
        "l": ["a", 1],
        "m": {"a": 0.5},
    }


def test_a_list_of_origins_and_a_glob_become_absolute(workplace):
    settings = workplace.settings(*workplace.flags("--training_data=data/train.csv, data/*.csv,s3://bucket/x"))
    root = workplace.root
    assert settings.data.training == f"{root}/data/train.csv,{root}/data/*.csv,s3://bucket/x"


def test_a_name_for_a_reader_of_the_users_own_stays_as_it_is(workplace):
    flags = workplace.flags("--training_data=data", "--validation_data=sales", model="table.custom_model")
    settings = workplace.settings(*flags)
    assert (settings.data.training, settings.data.validation) == ("data", "sales")
    # What is clearly a path is one all the same.
    flags = workplace.flags("--training_data=./data,data/train.csv", model="table.custom_model")
    root = workplace.root
    assert workplace.settings(*flags).data.training == f"{root}/data,{root}/data/train.csv"


def test_each_job_gets_a_folder_of_its_own(workplace):
    folders = [workplace.settings(*workplace.train).directory for _ in range(3)]
    assert len(set(folders)) == 3
    for folder in folders:
        pattern = rf"{re.escape(str(workplace.root))}/jobs/train-linear-\d{{8}}-\d{{6}}(-\d)?"
        assert re.fullmatch(pattern, folder)


def test_evaluate_and_predict_start_from_a_checkpoint(workplace):
    for command, flags in ((Command.EVALUATE, workplace.evaluate), (Command.PREDICT, workplace.predict)):
        settings = workplace.settings(*flags, command=command)
        assert settings.command is command
        assert settings.checkpoint.directory_for_init == str(workplace.root / "checkpoints")
    version = str(workplace.root / "checkpoints/version-10")
    flags = [*workplace.predict, f"--checkpoint_dir_for_init={version}"]
    assert workplace.settings(*flags, command=Command.PREDICT).checkpoint.directory_for_init == version


def test_a_slash_at_the_end_of_a_url_is_no_part_of_the_places_below_it(workplace):
    settings = workplace.settings(*workplace.train, "--job_dir=s3://bucket/jobs/first/")
    assert settings.store == "s3://bucket/jobs/first"
    assert settings.checkpoint.directory == "s3://bucket/jobs/first/model"

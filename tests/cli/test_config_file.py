from __future__ import annotations

import pytest

from elasticcb.settings import Updates

CONFIG = """\
# a job
model-zoo: ../zoo
model_def: linear.linear.custom_model
training_data: [../data/train.csv, ../data/test.csv]
model_params: {units: 64, rate: 1e-3, sizes: [1, 2]}
num_ps_pods: 2
num_workers: 3
use_async: false
prediction_data: ../data/test.csv
"""


@pytest.fixture
def job(workplace):
    return workplace.write("jobs_to_run/job.yaml", CONFIG)


def test_a_config_file_holds_the_same_names_and_the_command_line_wins_over_it(workplace, job):
    settings = workplace.settings("--config", str(job))
    assert settings.training.updates is Updates.SYNC
    assert settings.model.params == {"units": 64, "rate": 0.001, "sizes": [1, 2]}
    settings = workplace.settings("--num-workers=5", "--config", str(job), "--model_params=units=1")
    assert settings.cluster.num_workers == 5
    assert settings.cluster.num_ps == 2
    assert settings.model.params == {"units": 1}


def test_relative_paths_in_the_file_are_relative_to_the_file(workplace, job, monkeypatch, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    job.write_text(CONFIG + "output: export\ncheckpoint_dir: ../checkpoints\n")
    settings = workplace.settings("--config", str(job), "--job_dir=mine")
    root = workplace.root
    assert settings.model.zoo == f"{root}/zoo"
    assert settings.data.training == f"{root}/data/train.csv,{root}/data/test.csv"
    assert settings.output == f"{root}/jobs_to_run/export"
    assert settings.checkpoint.directory == f"{root}/checkpoints"
    assert settings.directory == f"{elsewhere}/mine"  # the command line's own


def test_tables_are_set_by_their_names(workplace, job):
    job.write_text(
        CONFIG + "embedding_tables:\n  users: {min_count: 3}\n  top/items: {learning_rate_multiplier: 1e-1}\n"
    )
    expected = {"users": {"min_count": 3}, "top/items": {"learning_rate_multiplier": 0.1}}
    assert workplace.settings("--config", str(job)).embedding.tables == expected
    text = "--embedding_tables={users: {max_age: 3}}"
    assert workplace.settings("--config", str(job), text).embedding.tables == {"users": {"max_age": 3}}


def test_an_empty_value_on_the_command_line_removes_that_of_the_file(workplace, job):
    job.write_text(
        CONFIG + "output: export\njob_name: census\nmetrics_port: 1\n"
        "embedding_tables: {users: {min_count: 3}}\nimage_pull_policy: Never\n"
    )
    empty = ("output", "job_name", "metrics_port", "embedding_tables", "image_pull_policy",
             "use_async", "model_params", "init_from")  # fmt: skip
    settings = workplace.settings("--config", str(job), *(f"--{name}=" for name in empty))
    assert settings.output == settings.checkpoint.init_from == ""
    assert settings.name == "linear"
    assert settings.cluster.metrics_port is None
    assert settings.embedding.tables == settings.model.params == {}
    assert settings.training.updates is Updates.LOCAL
    assert workplace.settings("--config", str(job), "--init_from=", "--output= ").output == ""
    given = workplace.settings("--config", str(job), "--output=", "--output=there", "--init_from=")
    assert given.output == f"{workplace.root}/there"


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--training_data=", "--training_data is missing: the records to train on."),
        ("--loss=", "--loss is empty (\"\"). Expected a name; or 'loss', its default."),
        ("--num_epochs=", '--num_epochs is empty (""). Expected a whole number; or 1, its default.'),
        ("--updates=", "--updates is empty (\"\"). Expected one of 'local', 'sync', 'async'; or 'local', its default."),
    ],
)
def test_a_flag_that_a_job_needs_or_that_has_a_default_can_not_be_empty(workplace, job, complaint, flag, expected):
    assert expected in complaint("train", "--config", str(job), flag)


def test_a_flag_of_another_command_is_passed_over(workplace, job, complaint):
    message = complaint("predict", "--config", str(job))
    assert "--checkpoint_dir_for_init is missing" in message
    assert "num_epochs" not in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("config: other.yaml", "unknown flag 'config'"),
        ("num_epochs: [1, 2]", "job.yaml:10: num_epochs is a list. Expected one value."),
        ("validation_data: {a: b}", "is a mapping. Expected a path, or a list of paths"),
        ("num_epochs: 2.5", "job.yaml) is invalid. Expected a whole number."),
        ("num_epochs: 0", "job.yaml) is invalid. Expected at least 1."),
        ('validation_data: ""', "job.yaml) is empty"),
        ("data_reader_params: {1: 2}", "1 is not a valid argument name"),
        ("data_reader_params: {a: !!binary aGk=}", "'a' contains b'hi'. Expected text, numbers"),
        ("embedding_tables: [users]", "embedding_tables is a list. Expected a mapping."),
        ("embedding_tables: users", "--embedding_tables=users (in "),
        ("embedding_tables: '{a: ]'", "is invalid. It is not valid YAML: "),
        ("x: [1", "invalid YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_with_its_place(workplace, job, complaint, line, expected):
    job.write_text(CONFIG + line + "\n")
    assert expected in complaint("train", "--config", str(job))


def test_all_that_is_wrong_in_the_file_is_told_at_once(workplace, job, complaint):
    job.write_text(CONFIG + "num_wokers: 2\nnum_ps: 1\noutput:\n")
    message = complaint("train", "--config", str(job))
    for words in ("job.yaml:10: unknown flag 'num_wokers'. Did you mean num_workers?",
                  "job.yaml:11: 'num_ps' is given twice", "job.yaml:12: output has no value"):  # fmt: skip
        assert words in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"- a\n", "contains no flags"),
        (b"\xff\xfe\x00", "can't be read"),
        (None, "can't be read: No such file or directory"),
        (b"", "--model_zoo is missing"),
    ],
)
def test_a_file_that_is_no_config_is_told(workplace, complaint, content, expected):
    path = workplace.root / "other.yaml"
    if content is not None:
        path.write_bytes(content)
    assert expected in complaint("train", f"--config={path}")

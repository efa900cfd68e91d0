from __future__ import annotations

import importlib.util
import os

import pytest


def test_a_missing_flag_is_told_with_what_it_is_for(workplace, complaint):
    assert "--training_data is missing: the records to train on." in complaint("train", *workplace.flags())
    message = complaint("predict", *workplace.flags())
    assert "--prediction_data is missing" in message
    assert "--checkpoint_dir_for_init is missing" in message


def test_a_mistake_in_one_file_hides_none_in_another(workplace, complaint):
    message = complaint(
        "train", "--model_zoo=zoo", "--model_def=linear.linar.custom_model", "--num_epochs=two", "--minibatch_size=0",
        "--training_data=data/trian.csv,data/none.csv", "--validation_data=data/tset.csv", "--use_async=maybe",
    )  # fmt: skip
    assert "for 7 reasons" in message
    for words in ("--num_epochs=two is invalid. Expected a whole", "--use_async=maybe is invalid", "linar",
                  "--minibatch_size=0", "Did you mean linear.linear", "trian.csv", "none.csv", "tset.csv"):  # fmt: skip
        assert words in message
    message = complaint("train", "--model_zoo=zo", "--training_data=data/trian.csv", "--evaluation_steps=1")
    assert "for 4 reasons" in message
    message = complaint("train", *workplace.flags("--loss=los", "--feed=fed", model="linear.linear.modle"), "--port=-1")
    assert "for 5 reasons" in message
    # A reader that was asked for may know what these are.
    reader = ["--custom_data_reader=sales", "--training_data=orders"]
    assert "orders" not in complaint("train", "--model_zoo=zoo", "--model_def=linear.linar.custom_model", *reader)


@pytest.mark.parametrize(
    "given",
    [
        ["--get_model_steps=4", "--updates=sync"],
        ["--grads_to_wait=2", "--updates=async"],
        ["--use_async=maybe", "--updates=sync"],
        ["--use_async=true", "--updates=often"],
    ],
)
def test_a_mode_that_is_given_twice_or_unreadably_is_one_mistake(workplace, complaint, given):
    assert "reasons" not in complaint("train", *workplace.flags("--training_data=data/train.csv", *given))


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("def custom_model(): return keras.Sequential()\n", ["optimizer", "loss"]),
        ("def custom_model(): return keras.Sequential()\ndef loss(y, p): return y - p\n", ["optimizer"]),
        ("def custom_model(): return keras.Sequential()\noptimizer = 'sgd'\n", ["loss"]),
        ("import os, numpy as np\nclass custom_model(keras.Model): pass\noptimizer = 'sgd'\n", ["loss"]),
    ],
)
def test_a_model_that_nothing_can_train_is_told_before(workplace, complaint, text, lacking):
    workplace.write("zoo/lacking.py", "import keras\n" + text)
    message = complaint("train", *workplace.flags("--training_data=data/train.csv", model="lacking.custom_model"))
    for name in ("optimizer", "loss"):
        assert (f"has no {name} to train with. Define `{name}(" in message) == (name in lacking)


@pytest.mark.parametrize(
    "text",
    [
        "def custom_model():\n    model = keras.Sequential()\n    model.compile('sgd', 'mse')\n    return model\n",
        "def custom_model(): return keras.models.load_model('m.keras')\n",
        "from my_models import custom_model\n",
        "from . import custom_model\n",
        "import my_models\ncustom_model = my_models.make\n",
        "class custom_model(keras.Model):\n    def train_step(self, data): pass\noptimizer = 'sgd'\n",
        "class custom_model(keras.Model):\n    def compute_loss(self, **k): return 1\noptimizer = 'sgd'\n",
        "class custom_model(keras.Model):\n    def call(self, x):\n        self.add_loss(x)\noptimizer = 'sgd'\n",
        "def custom_model(): return keras.layers.Dense(1, kernel_regularizer='l2')\noptimizer = 'sgd'\n",
        "for name in ('loss', 'optimizer', 'custom_model'): globals()[name] = 1\ncustom_model = 1\n",
    ],
)
def test_a_model_that_may_bring_its_loss_and_optimizer_is_let_through(workplace, text):
    workplace.write("zoo/own.py", "import keras\n" + text)
    workplace.settings(*workplace.flags("--training_data=data/train.csv", model="own.custom_model"))


def test_nothing_is_made_on_disk_when_the_flags_are_wrong(workplace, complaint):
    complaint("train", *workplace.train, "--num_ps=0", "--checkpoint_dir=new", "--output=export")
    assert sorted(os.listdir(workplace.root)) == ["checkpoints", "data", "zoo"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--num_ps=0"], "--num_ps=0 is invalid. Expected at least 1."),
        (["--num_ps_pods=0"], "--num_ps=0 is invalid."),
        (["--max_step=-5"], "Expected at least 0."),
        (["--lease_seconds=nan"], "Expected more than 0."),
        (["--lease_seconds=inf"], "Expected a finite number."),
        (["--lease_seconds=20", "--silence_seconds=30"], "--lease_seconds=20 is shorter than --silence_seconds=30"),
        (["--port=70000"], "Expected at most 65535."),
        (["--job_name=a/b"], "--job_name=a/b is invalid. Expected letters, digits, dots, dashes and underscores"),
        (["--host=10.0.0.1 x"], "--host=10.0.0.1 x is invalid. Expected an address like 0.0.0.0, without a port."),
        (["--cluster=locl"], "--cluster=locl is invalid. Expected one of 'local', 'inprocess'"),
        (["--model_params=units"], "'units' is not of the form NAME=VALUE"),
        (["--model_params=a=1;a=2"], "'a' is given twice"),
        (["--num_wokers=2"], "--num_workers"),
        (["stray"], "unexpected extra argument"),
        (["--prediction_data=data/test.csv"], "No such option"),
        (["--training_data="], '--training_data is empty ("")'),
        (["--training_data=data/train.csv,,"], "has an empty part"),
        (["--output="], "--output is empty"),
        (["--evaluation_steps=5"], "there is no evaluation data. Add --validation_data"),
        (["--sync_version_tolerance=1"], "--sync_version_tolerance=1 has no equivalent"),
        (["--use_async=true", "--grads_to_wait=1"], "--grads_to_wait=1 can't be combined with --use_async=true, where"),
        (["--updates=local", "--use_async=true"], "--use_async=true and --updates=local set the same thing"),
        (["--updates=sync", "--local_steps=4"], "--local_steps=4 can't be combined with --updates=sync, which merges"),
        (["--use_async=false", "--get_model_steps=3"], "--get_model_steps=3 can't be combined with --use_async=false"),
        (["--autoscale=4"], "--autoscale=4 is invalid. '4' is not a range of workers. Expected MIN..MAX"),
        (["--autoscale=8..1"], "Expected MIN..MAX"),
        (["--autoscale=1..300"], "from 1 to 256"),
        (["--autoscale=2..8", "--num_workers=1"], "is outside --autoscale"),
        (["--autoscale=2..8", "--cluster=inprocess"], "is not supported with --cluster=inprocess"),
        (["--ray_address=10.0.0.1:6379"], "--ray_address=10.0.0.1:6379 applies only to --cluster=ray"),
        (["--cluster=ray", "--ray_address=ray://10.0.0.1:10001"], "Run the command on a node of the cluster"),
        (["--cluster=ray", "--ray_address=10.0.0.1"], "Expected HOST:PORT, such as 10.0.0.1:6379"),
        (["--output=s3://bucket/model"], "is a URL. Expected a local folder. To send the export"),
        (["--output=data/train.csv"], "which is not a folder"),
        (["--output=data/train.csv/model"], "train.csv is not a folder. Choose another folder."),
        (["--output=/proc/nowhere/model"], "can't be written to because /proc can't"),
        (["--job_dir=/proc/nowhere"], "--job_dir names /proc/nowhere, which can't be written to because /proc"),
        (["--checkpoint_dir=" + "x" * 300], "can't be created: File name too long"),
        (["--output=data"], "contains files but no SavedModel"),
        (["--checkpoint_dir=data/train.csv"], "which is not a folder"),
        (["--export_dir=data/train.csv"], "--export_dir names"),
        (["--export_dir=s3://"], "--export_dir names a URL that names no bucket"),
        (["--bad_records=s3://KEY:secret@bucket/bad"], "--bad_records names a URL that contains a password"),
        (["--export_dir=exports", "--export_every=soon"], "Expected a time in whole seconds, minutes,"),
        (["--export_full_every=1h"], "--export_full_every=1h configures exports, but the job writes none"),
        (["--export_keep=2y", "--export_dir=exports"], "Expected a time in whole seconds, minutes,"),
        (["--output=export", "--checkpoint_dir=export/c", "--job_dir=data/train.csv"], "--job_dir names"),
        (["--checkpoint_dir_for_init=nowhere"], "nowhere, which does not exist"),
        (["--checkpoint_dir_for_init=data"], "contains no complete checkpoint"),
        (["--init_from=nowhere"], "--init_from names"),
        (["--init_map=a=b"], "--init_map=a=b maps names of a checkpoint, but no checkpoint is given. Add --init_from"),
        (["--init_from=checkpoints", "--init_map=a=b,c"], "'c' is not of the form NEW=OLD"),
        (["--embedding_tables={users: {max_row: 3}}"], "'users': An embedding table has no setting 'max_row'"),
        (["--embedding_tables={users: {min_count: 0}}"], "'users': min_count=0 is invalid. Expected at least 1."),
        (["--init_from=checkpoints", "--checkpoint_dir_for_init=checkpoints"], "Remove one of the two"),
    ],
)
def test_wrong_flags_are_caught_before_anything_starts(workplace, complaint, flags, expected):
    assert expected in complaint("train", *workplace.train, *flags)


def test_a_job_on_ray_is_told_what_to_install(workplace, complaint, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'elasticcb[ray]'" in complaint("train", *workplace.train, "--cluster=ray")


def test_an_export_replaces_an_earlier_savedmodel_but_not_the_checkpoints_in_it(workplace, complaint):
    workplace.write("export/saved_model.pb", "")
    assert workplace.settings(*workplace.train, "--output=export").output.endswith("/export")
    message = complaint("train", *workplace.train, "--output=export", "--checkpoint_dir=export/checkpoints")
    assert "Choose two separate folders" in message


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--use_async=true", "--use_async=true is --updates=async now."),
        ("--grads_to_wait=4", "--grads_to_wait=4 is --updates=sync now: a round waits for one batch of each worker."),
        ("--get_model_steps=3", "--get_model_steps=3 is --updates=async --local_steps=3 now."),
    ],
)
def test_flags_of_elasticdl_are_answered_with_what_they_became(workplace, capsys, flag, line):
    workplace.settings(*workplace.train, flag)
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cant_be_written_to_is_found_out_before(workplace, complaint):
    (workplace.root / "locked").mkdir(mode=0o500)
    assert "can't be written to" in complaint("train", *workplace.train, "--checkpoint_dir=locked/checkpoints")


@pytest.mark.parametrize(
    ("zoo", "model", "expected"),
    [
        ("zo", "linear.linear.custom_model", "which does not exist. Expected the folder"),
        ("data/train.csv", "linear.linear.custom_model", "which is a file"),
        ("zoo", "custom_model", "is not of the form FOLDER.FILE.NAME"),
        ("zoo", "linear/linear.custom_model", "is not of the form FOLDER.FILE.NAME"),
        ("zoo", "linear.linar.custom_model", "Did you mean linear.linear"),
        ("zoo", "linear.custom_model", "Did you mean linear.linear"),
        ("zoo", "linear.linear.custm_model", "Did you mean custom_model"),
    ],
)
def test_a_model_that_is_not_there_is_told_with_what_is(workplace, complaint, zoo, model, expected):
    flags = [f"--model_zoo={zoo}", f"--model_def={model}", "--training_data=data/train.csv"]
    assert expected in complaint("train", *flags)


def test_a_model_file_is_suggested_and_not_a_helper_beside_it(workplace, complaint):
    workplace.write("zoo/linear/linears.py", "def features():\n    return []\n")
    workplace.write("zoo/other/net.py", "class Net:\n    pass\n")
    workplace.write("zoo/broken.py", "def custom_model(:\n")
    workplace.write("zoo/sub.py", "from keras import Model\n\nclass RatingModel(Model):\n    pass\n")
    flags = ["--model_zoo=zoo", "--training_data=data/train.csv"]
    message = complaint("train", *flags, "--model_def=linear.lineas.custom_model")
    assert "Did you mean linear.linear.custom_model? Found: linear.linear.custom_model, sub.RatingModel, " in message
    message = complaint("train", *flags, "--model_def=net.Net")
    assert "Did you mean other.net.Net? Found: linear.linear.custom_model, other.net.Net, sub" in message


def test_a_name_that_a_flag_asks_for_must_be_in_the_model_file(workplace, complaint):
    message = complaint("train", *workplace.train, "--loss=los")
    assert "does not define 'los', which --loss names. Did you mean loss?" in message


def test_names_that_only_running_the_file_shows_are_let_through(workplace):
    workplace.write("zoo/star.py", "from linear.linear import *\n")
    flags = workplace.flags("--training_data=anything", "--loss=other", model="star.custom_model")
    assert workplace.settings(*flags).model.loss == "other"


def test_a_syntax_error_in_the_model_file_is_told_with_its_line(workplace, complaint):
    path = workplace.write("zoo/broken.py", "import keras\n\ndef custom_model(:\n    pass\n")
    message = complaint("train", *workplace.flags("--training_data=x", model="broken.custom_model"))
    assert f"{path}:3: the model file contains a syntax error" in message
    assert "def custom_model(:" in message


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("data/trian.csv", "does not exist. Did you mean"),
        ("nowhere/train.csv", "The path exists up to"),
        ("data/*.tfrecord", "matches no file"),
        ("data/train.csv,data/missing.csv", "missing.csv, which does not exist"),
        ("empty", "which is empty"),
        ("s3://KEY:sec/ret@bucket/x.csv", "--training_data names a URL that contains a password"),
        ("data/" + "x" * 300, "which can't be read: [Errno 36] File name too long"),  # no file system has such names
    ],
)
def test_data_that_is_not_there_is_told_before(workplace, complaint, origin, expected):
    (workplace.root / "empty").mkdir()
    assert expected in complaint("train", *workplace.flags(f"--training_data={origin}"))


def test_the_master_command_checks_the_flags_for_its_job(workplace, complaint):
    message = complaint("master", "--command=evaluate", *workplace.evaluate, "--num_epochs=3")
    assert "--num_epochs applies only to train, not to `evaluate`" in message


def test_flags_of_training_in_a_config_file_mean_nothing_to_a_master_that_evaluates(workplace, complaint):
    workplace.write("job.yaml", "use_async: false\ngrads_to_wait: 2\ncheckpoint_steps: 5\nautoscale: 1..2\n")
    message = complaint("master", "--config=job.yaml", "--command=evaluate", *workplace.evaluate, "--port=-1")
    assert "--port=-1" in message
    assert not any(name in message for name in ("grads_to_wait", "checkpoint_steps", "autoscale"))


@pytest.mark.parametrize("role", ["worker", "ps"])
def test_a_role_needs_the_address_of_a_master_in_its_form(complaint, role):
    assert "--master" in complaint(role)
    for address in ("localhost", ":50001", "host:", "host:0", "host:99999", "http://h:1"):
        assert "HOST:PORT" in complaint(role, "--master", address)
    assert "brackets" in complaint(role, "--master=::1:5")


def test_an_unknown_command_is_wrong_usage(complaint):
    assert "trian" in complaint("trian")


def test_a_list_of_files_may_be_longer_than_a_path(workplace):
    files = ["data/train.csv", *(workplace.write(f"data/{i:0100}.csv", "1,2\n") for i in range(50))]
    origin = workplace.settings(*workplace.flags("--training_data=" + ",".join(map(str, files)))).data.training
    assert len(origin.split(",")) == 51

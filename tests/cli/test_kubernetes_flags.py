"""The flags of jobs on Kubernetes: what they become, and what is told of those that is invalid."""

from __future__ import annotations

import base64

import kubernetes_validate
import pytest
import yaml

from elasticcb.cli.main import main

FLAGS = {
    "cluster": "kubernetes",
    "image": "zoo:1",
    "model_zoo": "/zoo",
    "model_def": "census.census.custom_model",
    "training_data": "/data/train.csv",
}


def flags(**more):
    return ["train", *(f"--{name}={value}" for name, value in (FLAGS | more).items() if value is not None)]


@pytest.fixture
def written(workplace, capsys):
    """The manifests that flags become, by kind; the last one of it."""

    def write(**more):
        assert main(flags(yaml="out.yaml", **more)) == 0, capsys.readouterr().err
        assert (workplace.root / "out.yaml").stat().st_mode & 0o777 == 0o600  # it holds the token
        found = list(yaml.safe_load_all((workplace.root / "out.yaml").read_text()))
        for manifest in found:
            kubernetes_validate.validate(manifest, "1.31", strict=True)
        return {each["kind"]: each for each in found}

    return write


def in_secret(found, name):
    return yaml.safe_load(base64.b64decode(found["Secret"]["data"][name]))


def test_a_job_is_written_as_manifests_that_hold_its_flags_and_its_secrets(written, workplace):
    workplace.write("spec.yaml", "worker: {spec: {hostNetwork: true}}\n")
    found = written(
        job_name="census", num_workers=3, model_params="a=1;b=x", cluster_spec="spec.yaml", namespace="training",
        volume="claim_name=data,mount_path=/data", output="/data/model", job_dir="/data/job",
    )  # fmt: skip
    assert list(found) == ["Secret", "Service", "Lease", "Job"]
    assert [each["metadata"]["name"] for each in found.values()] == ["census", "census-ps", "census", "census"]
    assert {each["metadata"]["namespace"] for each in found.values()} == {"training"}
    config = in_secret(found, "job.yaml")
    assert config["model_params"] == {"a": 1, "b": "x"}
    assert config["num_workers"] == 3
    assert config["cluster_spec"] == "/etc/elasticcb/cluster_spec.yaml"
    assert "yaml" not in config
    assert in_secret(found, "cluster_spec.yaml") == {"worker": {"spec": {"hostNetwork": True}}}
    files = ["ca.pem", "cluster_spec.yaml", "job.yaml", "token"]
    assert sorted(found["Secret"]["data"]) == files
    token = base64.b64decode(found["Secret"]["data"]["token"]).decode()
    assert len(token) == 32
    assert token not in str([found["Job"], found["Service"]])
    arguments = found["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:3] == ["train", "--config=/etc/elasticcb/job.yaml", "--job_dir=/data/job"]
    assert "--tls_ca=/etc/elasticcb/ca.pem" in arguments


def test_what_may_be_secret_stands_in_the_secret_alone(written):
    given = {
        "envs": "LOGIN=hush-1,TZ=UTC",
        "data_reader_params": "storage_options=hush-2",
        "model_params": "name=hush-3",
        "training_data": "sftp://user:hush-4@host/train.csv",
    }
    found = written(**given)
    assert "hush" not in str([found["Job"], found["Service"]])
    secret = {name: base64.b64decode(content).decode() for name, content in found["Secret"]["data"].items()}
    assert all(f"hush-{number}" in secret["job.yaml"] for number in (1, 2, 3, 4))
    assert secret["env.LOGIN"] == "hush-1"
    environment = found["Job"]["spec"]["template"]["spec"]["containers"][0]["env"]
    login = next(each for each in environment if each["name"] == "LOGIN")
    name = found["Secret"]["metadata"]["name"]
    assert login["valueFrom"] == {"secretKeyRef": {"name": name, "key": "env.LOGIN"}}


def test_tls_is_on_unless_it_is_switched_off(written):
    found = written(insecure="true")
    assert sorted(found["Secret"]["data"]) == ["job.yaml", "token"]
    assert "--insecure" in found["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]


def test_a_job_without_a_name_gets_one_that_no_other_has(written):
    first, second = (written()["Job"]["metadata"]["name"] for _ in range(2))
    assert first.startswith("census-")
    assert first != second


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"image": None}, "--image is missing: the container image"),
        ({"namespace": "My_Team"}, "--namespace: 'My_Team' is not a valid name of a Kubernetes object"),
        ({"job_name": "Census"}, "--job_name: 'Census' is not a valid name of a job on Kubernetes"),
        ({"worker_resource_request": "cpu=lots"}, "--worker_resource_request: 'lots' is not an amount of cpu"),
        ({"worker_resource_request": "memory=2Gi", "worker_resource_limit": "memory=1Gi"}, "more than the limit 1Gi"),
        ({"volume": "claim_name=data"}, "--volume: 'claim_name=data' lacks mount_path"),
        ({"worker_pod_priority": "high=3"}, "--worker_pod_priority: 'high=3' is not a priority"),
        ({"model_zoo": "zoo"}, "--model_zoo=zoo is a relative path. On Kubernetes, paths are paths in the pods"),
        ({"training_data": "data/train.csv"}, "--training_data=data/train.csv is a relative path"),
        ({"cluster_spec": "none.yaml"}, "none.yaml can't be read: No such file or directory"),
        ({"cluster_spec": "data/train.csv"}, "contains no pod patches"),
        ({"output": "/model"}, "--output=/model is not on a writable volume"),
        ({"autoscale": "1..4"}, "--autoscale=1..4 is not supported with --cluster=kubernetes"),
        ({"master_pod": "false"}, "--master_pod=false needs --host: an address of this machine"),
        ({"cluster": "local"}, "--image=zoo:1 applies only to --cluster=kubernetes"),
    ],
)
def test_what_can_not_be_is_told_in_one_sentence(workplace, complaint, more, words):
    assert words in complaint(*flags(yaml="out.yaml", **more))
    assert not (workplace.root / "out.yaml").exists()


@pytest.mark.parametrize(("command", "data"), [("evaluate", "validation_data"), ("predict", "prediction_data")])
def test_evaluation_and_prediction_are_jobs_as_well(workplace, command, data, capsys):
    given = {name: value for name, value in FLAGS.items() if name != "training_data"}
    given |= {data: "/data/test.csv", "checkpoint_dir_for_init": "/data/checkpoints", "yaml": "out.yaml"}
    assert main([command, *(f"--{name}={value}" for name, value in given.items())]) == 0, capsys.readouterr().err
    *_, job = yaml.safe_load_all((workplace.root / "out.yaml").read_text())
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][0] == command


def test_a_folder_of_checkpoints_is_followed_on_this_machine(workplace, complaint):
    message = complaint("evaluate", *workplace.evaluate, "--cluster=kubernetes", "--image=zoo:1", "--follow")
    assert "--follow evaluates on this machine" in message


def test_the_master_is_probed_and_scraped_at_the_ports_that_it_is_told(written):
    found = written(metrics_port=9000)
    config = in_secret(found, "job.yaml")
    assert (config["metrics_port"], config["health_port"]) == (9000, 9465)
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["metrics"] == 9000


def test_without_a_cluster_it_is_told_where_one_is_looked_for(workplace, complaint, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "none.conf")
    message = complaint(*flags())
    assert "No Kubernetes cluster is configured" in message
    assert "~/.kube/config, or the file in KUBECONFIG" in message

"""Jobs on a real Kubernetes, whose pods run this machine's Python: ELASTICCB_TEST_KUBECONFIG names the cluster."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import yaml
from stores import S3Server
from waiting import wait_until

from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.cli.main import main
from elasticcb.cluster.kubernetes.api import KubernetesAPI, KubernetesError
from elasticcb.cluster.kubernetes.pods import JOB_LABEL, METRICS_PORT, ROLE_LABEL
from jobs import LINEAR_MODEL, linear_data, number, write_model_file

ROOT = Path(__file__).resolve().parents[2]
KUBECONFIG = os.environ.get("ELASTICCB_TEST_KUBECONFIG", "")
IMAGE = "docker.io/local/busybox:1"
PYTHON = ["/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(ROOT)]  # what pods run, from the node

pytestmark = [
    pytest.mark.skipif(not KUBECONFIG, reason="ELASTICCB_TEST_KUBECONFIG names no cluster"),
    pytest.mark.timeout(600),
]

CALLBACKS = """
    import os

    class Asked(keras.callbacks.Callback):
        "Does something once, when a test has asked for it by a file in the job's folder."

        def is_asked(self, name):
            try:
                os.remove(os.path.join(self.params["job_directory"], name))
            except FileNotFoundError:
                return False
            return True

    class OnTheMaster(Asked):
        def on_epoch_end(self, epoch, logs=None):
            if self.is_asked("crash"):
                os._exit(137)
            if self.is_asked("fail"):
                raise RuntimeError("no more of this")

    class OnAWorker(Asked):
        def on_train_batch_begin(self, batch, logs=None):
            if self.is_asked("hog"):
                print(len(b"x" * 2**32))

    def callbacks():
        return [OnTheMaster(), OnAWorker()]
"""


@pytest.fixture
def api(monkeypatch):
    """A namespace of its own, with what `deploy/kubernetes` puts into one; all of it is removed."""
    from kubernetes import client, config, utils

    monkeypatch.setenv("KUBECONFIG", KUBECONFIG)
    config.load_kube_config(KUBECONFIG)
    name, everything = f"elasticcb-test-{secrets.token_hex(3)}", client.ApiClient()
    core = client.CoreV1Api(everything)
    core.create_namespace({"metadata": {"name": name}})
    for file in ("role.yaml", "network_policy.yaml"):
        for manifest in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / file).read_text()):
            for subject in manifest.get("subjects", ()):
                subject["namespace"] = name
            utils.create_from_dict(everything, manifest, namespace=name)
    yield KubernetesAPI(name)
    core.delete_namespace(name, grace_period_seconds=0)


@pytest.fixture
def classes(api):
    """Two PriorityClasses, the lower one first."""
    from kubernetes import client

    scheduling = client.SchedulingV1Api(api._client)
    names = [f"{api.namespace}-{each}" for each in ("low", "high")]
    for name, value in zip(names, (-1000, 1000), strict=True):  # other pods have 0
        scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    yield names
    for name in names:
        scheduling.delete_priority_class(name)


@pytest.fixture
def folder(tmp_path):
    """One that pods write to, as a volume."""
    tmp_path.chmod(0o777)
    (tmp_path / "spec.yaml").write_text(
        yaml.safe_dump({"all": {"spec": {"containers": [{"name": "elasticcb", "command": COMMAND}]}}})
    )
    return tmp_path


COMMAND = [sys.executable, "-m", "elasticcb"]


def flags(api, folder, **more):
    mounts = [f"host_path={path},mount_path={path},read_only=true" for path in PYTHON]
    given = {
        "cluster": "kubernetes",
        "namespace": api.namespace,
        "image": IMAGE,
        "image_pull_policy": "Never",
        "service_account": "elasticcb",
        "volume": ";".join([*mounts, f"host_path={folder},mount_path={folder}"]),
        "envs": f"PYTHONPATH={ROOT},PYTHONDONTWRITEBYTECODE=1",
        "cluster_spec": folder / "spec.yaml",
        "job_name": "job",
        "job_dir": folder / "job",
        **{f"{role}_resource_request": "cpu=50m,memory=300Mi" for role in ("master", "worker", "ps")},
        **more,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def linear_flags(api, folder, epochs, **more):
    write_model_file(folder, LINEAR_MODEL + CALLBACKS, "linear")
    linear_data(folder, train=2_000)
    return flags(
        api,
        folder,
        model_zoo=folder,
        model_def="linear.custom_model",
        training_data=folder / "train.npz",
        minibatch_size=8,
        num_minibatches_per_task=25,
        num_epochs=epochs,
        **more,
    )


def delete_pod(api, role, grace_seconds=None):
    pods = api.list("Pod", f"{JOB_LABEL}=job,{ROLE_LABEL}={role}", "status.phase=Running")["items"]
    name = min(pod["metadata"]["name"] for pod in pods)
    assert api.delete("Pod", name, grace_seconds)
    return name


def test_a_census_job_ends_with_a_saved_model_though_a_worker_and_the_server_are_deleted(
    api, folder, start_job, shared_data
):
    data, zoo = folder / "adult.data", folder / "zoo"
    shutil.copy(shared_data / "census" / "adult.data", data)
    shutil.copytree(ROOT / "model_zoo" / "census", zoo / "census")
    job = start_job(
        "train",
        *flags(
            api,
            folder,
            model_zoo=zoo,
            model_def="census.census.custom_model",
            training_data=data,
            validation_data=data,
            num_epochs=4,
            num_workers=2,
            output=folder / "model",
            checkpoint_interval=2,
        ),
    )
    job.wait_for_line(r"epoch 1/4.*workers 2/2")
    delete_pod(api, "worker")
    job.wait_for_line(r"worker 0 .*(was lost: its pod was deleted|leaves: it was asked to end)")
    job.wait_for_line(r"epoch \d/4.*workers 2/2")
    delete_pod(api, "ps", 0)  # the node may still ask it to end before it kills it
    job.wait_for_line(r"parameter server 0 .* (was lost: its pod was deleted|leaves: it was asked to end)")
    job.wait_for_line(r"Parameter server 0 recovered in .* from its recovery files")

    def told():
        events = api.list("Event", fields="involvedObject.kind=Job,involvedObject.name=job")["items"]
        return {(event["reason"], event["type"]): event["message"] for event in events}

    wait_until(lambda: ("ServerRecovered", "Normal") in told())
    assert " from its recovery files; " in told()["ServerRecovered", "Normal"]
    assert ("ProcessLost", "Warning") in told()
    assert job.finish() == 0, job.output
    assert (folder / "model" / "saved_model.pb").exists()
    assert number(job.output, "workers lost") == 1
    assert "restart 1" not in job.output  # pods that were deleted use no restart up
    assert float(re.search(r"auc +([\d.]+)", job.output)[1]) > 0.8


def test_a_lost_master_is_followed_by_another_and_a_job_that_was_stopped_or_failed_goes_on(
    api, folder, start_job, capsys
):
    job = start_job("train", *linear_flags(api, folder, epochs=1000, output=folder / "model"))
    job.wait_for_line(r"epoch \d+/.*workers 1/1")
    address = api.list("Pod", f"{JOB_LABEL}=job,{ROLE_LABEL}=master")["items"][0]["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/readyz", timeout=10) as answer:
        assert answer.status == 200
    (server,) = api._core.read_namespaced_endpoints("job-ps", api.namespace).subsets[0].addresses
    assert server.hostname == "job-ps-0"  # of the name job-ps-0.job-ps, where there is DNS
    delete_pod(api, "ps", 0)
    job.wait_for_line(r"Parameter server 0 recovered in .* from its recovery files")  # with the same host name
    (folder / "job" / "crash").touch()
    job.wait_for_line(r"The master's pod .*: killed by SIGKILL. A new pod continues the job")
    job.wait_for_line(r"The master recovered in .*1 worker and 1 parameter server kept running")
    here = f"--namespace={api.namespace}"
    assert main(["scale", "job", here, "--workers=2"]) == 0
    assert main(["jobs", here]) == main(["status", "job", here]) == main(["table", "job", here]) == 0
    shown = capsys.readouterr().out
    assert "There are no embedding tables" in shown
    assert "job now has 2 workers (was 1)." in shown
    assert re.search(r"job +running +\d +1 ", shown)
    assert re.search(r"job-worker-0\S* +localhost +it runs", shown)
    job.wait_for_line(r"workers 2/2")
    assert main(["scale", "job", here, "--workers=1"]) == 0
    job.wait_for_line(r"workers 1/1")
    deleted = delete_pod(api, "master")
    job.wait_for_line(rf"The master's pod {deleted}: .*A new pod continues the job")
    job.wait_for_line(r"Parameter server 0 resumes from its recovery files; 0 updates")
    job.wait_for_line(r"epoch \d+/.*workers 1/1")
    assert main(["stop", "job", here]) == 0
    job.wait_for_line(r"The master's pod .*: .*")
    assert job.process.poll() is None
    job.interrupt()
    assert job.finish() == 0
    assert "Detached; the job continues" in job.output

    stopped = start_job("resume", "job", here)
    stopped.wait_for_line(r"Parameter server 0 resumes from its recovery files; 0 updates")
    stopped.wait_for_line(r"epoch \d+/.*workers 1/1")
    (folder / "job" / "fail").touch()
    assert stopped.finish() == 1
    assert "RuntimeError: no more of this" in stopped.output
    wait_until(lambda: KubernetesJob(api, "job").state == "failed")

    failed = start_job("resume", "job", here)
    failed.wait_for_line(r"epoch \d+/.*workers 1/1")
    assert main(["stop", "job", here, "--delete"]) == 0
    assert failed.finish() == 1
    assert "The job job was deleted" in failed.output


def test_a_job_without_a_volume_goes_on_from_a_url_after_its_server_and_its_master_are_gone(api, folder, start_job):
    with S3Server("jobs", urllib.parse.urlsplit(api.server).hostname) as server:
        envs = {"PYTHONPATH": ROOT, "PYTHONDONTWRITEBYTECODE": 1, **server.environment}
        given = linear_flags(
            api, folder, epochs=120, num_ps=2, checkpoint_interval=1, envs=",".join(f"{k}={v}" for k, v in envs.items())
        )
        given = [flag.replace(f"{folder},mount_path={folder}", f"{folder},mount_path={folder},read_only=true")
                 for flag in given if not flag.startswith("--job_dir=")]  # fmt: skip
        job = start_job("train", *given, "--job_dir=s3://jobs/one", "--checkpoint_dir=s3://jobs/kept")
        job.wait_for_line(r"epoch ([3-9]|\d\d+)/.*workers 1/1")
        delete_pod(api, "ps", 0)
        job.wait_for_line(r"Parameter server \d recovered in .* from its recovery files")
        deleted = delete_pod(api, "master", 0)
        job.wait_for_line(rf"The master's pod {deleted}: .*A new pod continues the job")
        job.wait_for_line(r"Parameter server 0 resumes from its recovery files")
        assert job.finish() == 0, job.output
        assert "(120 epochs of 2,000)" in job.output
        assert "is lost with its pods" not in job.output
        kept = fsspec.filesystem("s3", **server.options).find("jobs/kept")
        newest = max(kept).rpartition("/")[0]
        names = [path.rpartition("/")[2] for path in kept if path.startswith(newest)]
        assert names[0] == "manifest.json"
        assert len(names) == 3, names  # and one of each server


def test_a_master_that_lost_its_lease_ends_at_once_and_none_acts_while_another_pod_may(api, folder, start_job):
    def lease():
        return api.read("Lease", "job")["spec"]

    def masters():
        return api.list("Pod", f"{JOB_LABEL}=job,{ROLE_LABEL}=master")["items"]

    job = start_job("train", *linear_flags(api, folder, epochs=1000))
    job.wait_for_line(r"epoch \d+/.*workers 1/1")
    (first,) = (pod["metadata"]["name"] for pod in masters())
    assert lease()["holderIdentity"] == first
    before = lease()["renewTime"]
    wait_until(lambda: lease()["renewTime"] != before)

    # As a master does that was started while this one was cut off; its node does not tell of its end.
    def take_lease():
        version = api.read("Lease", "job")["metadata"]["resourceVersion"]
        spec = {"holderIdentity": "job-elsewhere", "leaseDurationSeconds": 25}
        with suppress(KubernetesError):  # it was renewed meanwhile
            return api.patch("Lease", "job", {"metadata": {"resourceVersion": version}, "spec": spec})

    wait_until(take_lease)
    taken = time.monotonic()
    job.wait_for_line(r"This master has lost its Lease, so another master may act")
    job.wait_for_line(r"The master in the pod job-elsewhere may still act; waiting for its end")
    assert lease()["holderIdentity"] == "job-elsewhere"
    wait_until(lambda: lease()["holderIdentity"] != "job-elsewhere")
    assert time.monotonic() - taken >= 25
    job.wait_for_line(r"epoch \d+/.*workers 1/1")
    second = lease()["holderIdentity"]
    assert second not in ("job-elsewhere", first)
    assert second in [pod["metadata"]["name"] for pod in masters()]
    assert main(["stop", "job", f"--namespace={api.namespace}"]) == 0
    wait_until(lambda: not lease()["holderIdentity"])
    api.delete("Job", "job")
    assert job.finish() == 1


def test_workers_that_are_out_of_memory_evicted_over_quota_or_preempted_come_back(api, folder, start_job, classes):
    low, high = classes
    cores = os.cpu_count() or 1
    job = start_job(
        "train",
        *linear_flags(
            api,
            folder,
            epochs=1000,
            num_workers=2,
            worker_resource_request=f"cpu={200 * cores}m,memory=300Mi",
            worker_resource_limit="memory=1200Mi",
            worker_pod_priority=low,
            restart_policy="OnFailure",
        ),
    )
    job.wait_for_line(r"epoch \d+/.*workers 2/2")
    (folder / "job" / "hog").touch()
    lost = job.wait_for_line(r"worker \d .*was lost: it ran out of memory")
    assert "limit 1200Mi (OOMKilled); the next one gets 1800Mi" in lost
    job.wait_for_line(r"epoch \d+/.*workers 2/2")

    api._core.create_namespaced_resource_quota(
        api.namespace, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}}
    )
    evicted = newest_pod(api, "worker")
    eviction = {"metadata": {"name": evicted}, "deleteOptions": {}}
    api._core.create_namespaced_pod_eviction(evicted, api.namespace, eviction)
    # It is lost where it has registered, but does not work yet.
    job.wait_for_line(r"worker \d .*(leaves: it was asked to end|was lost: its pod was deleted)")
    job.wait_for_line(r"Not started yet: worker \d \(The quota of the namespace .* is used up: .*exceeded quota: few")
    api._core.delete_namespaced_resource_quota("few", api.namespace)
    job.wait_for_line(r"epoch \d+/.*workers 2/2")

    api.create(pod_that_sleeps("important", high, f"{600 * cores}m"))
    job.wait_for_line(r"worker \d .*(leaves: it was asked to end|was lost: it was preempted)")
    job.wait_for_line(r"Not started yet: worker \d \(it waits for resources: .*Insufficient cpu")
    api.delete("Pod", "important", 0)
    job.wait_for_line(r"epoch \d+/.*workers 2/2")
    assert re.search(r"(which had deregistered|was lost): it was preempted", job.output)

    (folder / "job" / "crash").touch()
    job.wait_for_line(r"The master's pod .*: killed by SIGKILL. A new pod continues the job")
    job.wait_for_line(r"The master recovered in .*2 workers and 1 parameter server kept running")
    assert len(api.list("Pod", f"{JOB_LABEL}=job,{ROLE_LABEL}=master")["items"]) == 1  # its container was restarted
    api.delete("Job", "job")
    assert job.finish() == 1


def newest_pod(api, role):
    pods = api.list("Pod", f"{JOB_LABEL}=job,{ROLE_LABEL}={role}", "status.phase=Running")["items"]
    return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])["metadata"]["name"]


def pod_that_sleeps(name, priority, cpu):
    container = {"name": "sleep", "image": IMAGE, "command": ["sleep", "600"], "imagePullPolicy": "Never"}
    container["resources"] = {"requests": {"cpu": cpu}}
    spec = {"priorityClassName": priority, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_a_master_of_this_machine_has_pods_and_pods_evaluate_its_checkpoint(api, folder, start_job):
    own = {"runAsUser": os.getuid(), "runAsGroup": os.getgid(), "runAsNonRoot": False}  # they share folders with it
    spec = {"containers": [{"name": "elasticcb", "command": COMMAND}], "securityContext": own}
    (folder / "spec.yaml").write_text(yaml.safe_dump({"all": {"spec": spec}}))
    checkpoints = {"checkpoint_dir": folder / "checkpoints", "checkpoint_steps": 100}
    given = {"master_pod": "false", "host": urllib.parse.urlparse(api.server).hostname, **checkpoints}
    job = start_job("train", *linear_flags(api, folder, 1, service_account=None, **given))
    assert job.finish() == 0, job.output
    wait_until(lambda: not api.list("Pod", f"{ROLE_LABEL} in (worker,ps)")["items"])
    given = {
        "job_name": "evaluation",
        "job_dir": None,
        "model_zoo": folder,
        "model_def": "linear.custom_model",
        "validation_data": folder / "train.npz",
        "checkpoint_dir_for_init": folder / "checkpoints",
    }
    job = start_job("evaluate", *flags(api, folder, **given))
    assert job.finish() == 0, job.output
    assert re.search(r"loss +[\d.]", job.output)


def test_a_dry_run_has_all_checked_and_makes_nothing(api, folder, capsys):
    assert main(["train", *linear_flags(api, folder, 1), "--dry_run"]) == 0
    said = "Kubernetes accepts the job job: Secret, Service, Lease, Job. Nothing was started."
    assert said in capsys.readouterr().err
    assert not api.list("Job")["items"]


def test_an_image_that_is_not_there_is_told_and_the_job_removed(api, folder, start_job):
    job = start_job("train", *linear_flags(api, folder, 1, image="docker.io/local/nothing:1"))
    assert job.finish() == 1
    assert "The master's pod can't start: the image docker.io/local/nothing:1 is not on its node" in job.output
    assert not api.list("Job")["items"]


def test_a_namespace_that_is_not_there_is_told(api, folder, start_job):
    api.namespace = "nowhere"
    job = start_job("train", *linear_flags(api, folder, 1))
    assert job.finish() == 1
    assert "There is no namespace nowhere in the cluster https://" in job.output


def test_a_service_account_that_is_not_there_is_told(api, folder, start_job, capsys):
    job = start_job("train", *linear_flags(api, folder, 1, service_account="nobody"))
    job.wait_for_line(r"The master's pod can't be created; retrying: .*serviceaccount \"nobody\" not found")
    here = f"--namespace={api.namespace}"
    assert main(["status", "job", here]) == 0
    assert 'serviceaccount "nobody" not found' in capsys.readouterr().out
    assert main(["stop", "job", here, "--delete"]) == 0
    assert job.finish() == 1
    assert "The job job was deleted" in job.output


def test_a_master_that_may_not_have_pods_made_is_told_what_it_lacks(api, folder, start_job):
    job = start_job("train", *linear_flags(api, folder, 1, service_account=None))
    assert job.finish() == 2
    assert "The service account of this pod lacks permissions of a master" in job.output
    assert "create pods" in job.output

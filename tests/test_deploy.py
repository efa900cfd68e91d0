"""What `kubectl apply -k` puts into a cluster: the files of deploy/, as kustomize reads them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from elasticcb.cluster.kubernetes.flags import parse_priority
from elasticcb.cluster.kubernetes.pods import JOB_LABEL, ROLE_LABEL, PodPlan
from elasticcb.settings import KubernetesSettings

DEPLOY = Path(__file__).parents[1] / "deploy"
FOLDERS = ("kubernetes", "training", "monitoring")
OPERATOR = "monitoring.coreos.com/v1"  # its objects are no part of Kubernetes' schemas
VERSIONS = ("1.26", "1.31", "1.37")


def read(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def manifests(folder: Path) -> Iterator[dict[str, Any]]:
    """Of a kustomization and those that it names."""
    for resource in read(folder / "kustomization.yaml")[0]["resources"]:
        path = (folder / resource).resolve()
        yield from manifests(path) if path.is_dir() else read(path)


def find(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in manifests(DEPLOY / name) if each["kind"] == kind)
    return found


@pytest.fixture(scope="module")
def master() -> dict[str, Any]:
    """The pod of a master."""
    return PodPlan("census", KubernetesSettings(image="zoo:1")).master_job([])["spec"]["template"]


def selects(selector: dict[str, Any], pod: dict[str, Any]) -> bool:
    return selector["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_what_kubernetes_takes(version):
    checked = [each for name in FOLDERS for each in manifests(DEPLOY / name) if each["apiVersion"] != OPERATOR]
    assert {each["kind"] for each in checked} == {
        "Namespace", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "PriorityClass", "PersistentVolumeClaim",
    }  # fmt: skip
    for manifest in checked:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", FOLDERS)
def test_kustomize_makes_of_a_folder_what_its_files_say(name):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", DEPLOY / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    named = {(each["kind"], each["metadata"]["name"]) for each in manifests(DEPLOY / name)}
    assert made.keys() - named <= {("ConfigMap", "elasticcb-dashboard")}
    assert made.keys() >= named
    namespace = read(DEPLOY / name / "kustomization.yaml")[0].get("namespace")
    if namespace:
        assert ("Namespace", namespace) in made
        assert made["RoleBinding", "elasticcb-master"]["subjects"][0]["namespace"] == namespace
        assert "namespace" not in made["PriorityClass", "low"]["metadata"]


def test_namespace_lets_no_pod_in_that_is_not_restricted_and_has_the_classes_that_workers_ask_for():
    labels = find("training", "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    classes = {each["metadata"]["name"]: each["value"] for each in read(DEPLOY / "training" / "priority_classes.yaml")}
    priority = parse_priority("high=0.5")
    assert {priority.of(index) for index in range(4)} == classes.keys()
    assert classes["low"] < 0 < classes["high"]


def test_prometheus_finds_the_master_of_a_job_and_may_reach_it(master):
    monitor, policy = find("monitoring", "PodMonitor")["spec"], find("monitoring", "NetworkPolicy")["spec"]
    assert selects(monitor["selector"], master)
    assert selects(policy["podSelector"], master)
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {each["name"]: each["containerPort"] for each in master["spec"]["containers"][0]["ports"]}
    assert policy["ingress"][0]["ports"][0]["port"] == ports[endpoint["port"]]
    assert master["metadata"]["annotations"]["prometheus.io/port"] == str(ports[endpoint["port"]])
    labels = {each["targetLabel"]: each for each in endpoint["relabelings"]}
    assert labels["job"]["replacement"] == "elasticcb"  # which the rules ask for
    assert labels["instance"]["sourceLabels"][-1].endswith(JOB_LABEL.replace("/", "_"))
    assert ROLE_LABEL in monitor["selector"]["matchLabels"]


def test_rules_of_the_operator_are_those_of_the_alerts():
    alerts = read(DEPLOY / "monitoring" / "alerts.yaml")[0]
    assert find("monitoring", "PrometheusRule")["spec"] == alerts, "make prometheus_rule.yaml anew, as it says"


def test_policies_let_pods_of_jobs_reach_one_another():
    policy = find("kubernetes", "NetworkPolicy")["spec"]
    worker = PodPlan("census", KubernetesSettings(image="zoo:1")).pod("worker", 0, 0, [])
    assert selects(policy["podSelector"], worker)
    assert selects(policy["ingress"][0]["from"][0]["podSelector"], worker)

"""The manifests of a job on Kubernetes."""

from __future__ import annotations

from dataclasses import replace

import kubernetes_validate
import pytest

from elasticcb.cluster.kubernetes.flags import (
    parse_envs,
    parse_name,
    parse_priority,
    parse_resources,
    parse_secrets,
    parse_tolerations,
    parse_volumes,
    safe_name,
)
from elasticcb.cluster.kubernetes.pods import PodPlan, after_oom, patched, resources
from elasticcb.errors import UsageError
from elasticcb.settings import KubernetesSettings

VERSIONS = ("1.26", "1.31", "1.37")
SETTINGS = KubernetesSettings(
    namespace="training",
    image="registry.example/zoo:1",
    image_pull_policy="IfNotPresent",
    service_account="trainer",
    worker_resource_request="cpu=500m,memory=1Gi,gpu=1",
    worker_resource_limit="memory=2Gi",
    worker_pod_priority="high=0.5",
    ps_pod_priority="important",
    volume="claim_name=data,mount_path=/data;host_path=/mnt/in,mount_path=/in,read_only=true,sub_path=a",
    envs="TZ=UTC,EMPTY=",
    env_from_secret="s3-login, other.one",
    node_selector="disktype=ssd",
    tolerations="spot=true:NoSchedule,gpu",
    cluster_spec={"all": {"spec": {"hostNetwork": False}}, "ps": {"metadata": {"annotations": {"a": "b"}}}},
)
NOW = "2026-11-22T12:00:00Z"
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "census-1", "uid": "5a1b"}
PLAN = PodPlan("census-1", SETTINGS, {"PYTHONUNBUFFERED": "1"}, "TOKEN", OWNER)


def manifests():
    return [
        PLAN.pod("worker", 0, 0, ["worker"]),
        PLAN.pod("ps", 1, 3, ["ps"], ooms=1),
        replace(PLAN, grpc_probes=True).pod("ps", 0, 0, ["ps"]),
        PLAN.secret("word", {"ca.pem": b"x"}),
        PLAN.service(),
        PLAN.server_names(),
        PLAN.lease(),
        PLAN.master_job(["train"]),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_what_kubernetes_takes(version):
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_every_pod_keeps_to_the_restricted_pod_security_standard_and_does_not_show_the_token():
    master = PLAN.master_job(["train"])["spec"]["template"]
    for pod in (PLAN.pod("worker", 0, 0, []), PLAN.pod("ps", 0, 0, []), master):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert not own["allowPrivilegeEscalation"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        token = next(each for each in container["env"] if each["name"] == "TOKEN")
        assert token == {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "census-1", "key": "token"}}}


def test_all_keys_of_a_secret_are_variables_of_all_pods():
    master = PLAN.master_job(["train"])["spec"]["template"]
    for pod in (PLAN.pod("worker", 0, 0, []), PLAN.pod("ps", 0, 0, []), master):
        (container,) = pod["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": name}} for name in ("s3-login", "other.one")]
    without = replace(PLAN, settings=replace(SETTINGS, env_from_secret="")).pod("ps", 0, 0, [])
    assert "envFrom" not in without["spec"]["containers"][0]


def test_variables_of_the_user_are_read_from_the_secret_and_each_is_there_once():
    replaced = replace(PLAN, settings=replace(SETTINGS, envs="TZ=UTC,PYTHONUNBUFFERED=hush"))
    for pod in (replaced.pod("worker", 0, 0, []), replaced.pod("ps", 0, 0, []), replaced.master_job([])):
        assert "hush" not in str(pod)
    environment = replaced.pod("worker", 0, 0, [])["spec"]["containers"][0]["env"]
    names = [each["name"] for each in environment]
    assert len(names) == len(set(names))
    assert {"TZ", "PYTHONUNBUFFERED", "HOME"} <= set(names)
    keys = {each["valueFrom"]["secretKeyRef"]["key"] for each in environment if "secretKeyRef" in str(each)}
    assert keys == {"token", "env.TZ", "env.PYTHONUNBUFFERED"}
    assert keys <= replaced.secret("word", {})["data"].keys()


def test_pod_has_a_name_of_its_own_an_owner_and_labels_by_which_it_is_found():
    first, next_one = PLAN.pod("worker", 2, 0, []), PLAN.pod("worker", 2, 1, [])
    assert [each["metadata"]["name"] for each in (first, next_one)] == ["census-1-worker-2", "census-1-worker-2-1"]
    assert next_one["metadata"]["ownerReferences"] == [OWNER]
    labels = next_one["metadata"]["labels"]
    assert {name: labels[f"elasticcb/{name}"] for name in ("job", "role", "index", "number")} == {
        "job": "census-1", "role": "worker", "index": "2", "number": "1",
    }  # fmt: skip
    assert not first["spec"]["automountServiceAccountToken"]  # only the master asks the API server for anything


def test_a_server_has_the_name_of_its_place_unless_a_patch_gives_another():
    first, next_one = PLAN.pod("ps", 1, 0, []), PLAN.pod("ps", 1, 4, [])
    service = PLAN.server_names()
    for pod in (first, next_one):
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("census-1-ps-1", service["metadata"]["name"])
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    renamed = replace(SETTINGS, cluster_spec={"ps": {"spec": {"hostname": "mine"}}})
    assert replace(PLAN, settings=renamed).pod("ps", 0, 0, [])["spec"]["hostname"] == "mine"
    assert "hostname" not in PLAN.pod("worker", 0, 0, [])["spec"]


def test_lines_about_a_job_are_events_of_what_owns_its_pods():
    lost = PLAN.event("[census] worker 1 (id 4) was lost: out of memory; restart 1 of 10", "a", NOW)
    told = PLAN.event("Training goes on. " * 100, "b", NOW)
    for event in (lost, told):
        kubernetes_validate.validate(event, "1.31", strict=True)
        assert event["involvedObject"] == {**OWNER, "namespace": "training"}
    assert [(event["reason"], event["type"]) for event in (lost, told)] == [
        ("ProcessLost", "Warning"), ("Told", "Normal"),
    ]  # fmt: skip
    assert len(told["message"]) == 1024
    assert (lost["metadata"]["name"], lost["lastTimestamp"]) == ("census-1.a", NOW)


def test_half_of_the_workers_have_the_high_priority_and_all_servers_theirs():
    classes = [PLAN.pod("worker", index, 0, [])["spec"]["priorityClassName"] for index in range(4)]
    assert classes == ["high", "low", "high", "low"]
    assert PLAN.pod("ps", 3, 0, [])["spec"]["priorityClassName"] == "important"
    assert "priorityClassName" not in PLAN.master_job([])["spec"]["template"]["spec"]


def test_gpus_are_limited_to_those_asked_for():
    asked = resources(SETTINGS, "worker")
    assert asked["requests"] == {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": "1"}
    assert asked["limits"] == {"memory": "2Gi", "nvidia.com/gpu": "1"}
    assert resources(SETTINGS, "ps") == {}


def test_memory_grows_with_each_time_that_it_ran_out_up_to_four_times():
    limits = [resources(SETTINGS, "worker", ooms)["limits"]["memory"] for ooms in range(1, 6)]
    assert limits == ["3072Mi", "4608Mi", "6912Mi", "8192Mi", "8192Mi"]
    told = [after_oom(SETTINGS, "worker", ooms) for ooms in range(5)]
    assert [ooms for ooms, _ in told] == [1, 2, 3, 4, 5]
    assert [text for _, text in told[:4]] == [f"; the next one gets {limit}" for limit in limits[:4]]
    assert told[4][1] == "; the next one gets 8192Mi again, the maximum. Raise --worker_resource_limit"
    unlimited = "; it has no limit, but its node had no memory left. Request more with --ps_resource_request"
    assert after_oom(SETTINGS, "ps", 0) == (0, unlimited)


def test_patch_merges_mappings_and_lists_of_named_things_removes_by_null_and_replaces_the_rest():
    pod = {"spec": {"containers": [{"name": "a", "image": "x", "args": ["1"]}, {"name": "b"}], "hostname": "h"}}
    patch = {"spec": {"containers": [{"name": "a", "args": ["2"]}, {"name": "c"}], "hostname": None, "dns": {"x": 1}}}
    assert patched(pod, patch) == {
        "spec": {"containers": [{"name": "a", "image": "x", "args": ["2"]}, {"name": "b"}, {"name": "c"}],
                 "dns": {"x": 1}},
    }  # fmt: skip
    assert pod["spec"]["hostname"] == "h"
    servers = PLAN.pod("ps", 0, 0, [])
    assert (servers["spec"]["hostNetwork"], servers["metadata"]["annotations"]) == (False, {"a": "b"})
    assert "annotations" not in PLAN.pod("worker", 0, 0, [])["metadata"]


def test_kubernetes_does_not_start_a_master_again_that_failed_by_itself():
    rules = PLAN.master_job([])["spec"]["podFailurePolicy"]["rules"]
    by_action = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert by_action == {"Ignore": [75], "FailJob": [1, 2]}


def test_a_job_that_has_ended_is_removed_after_a_week_and_one_may_be_limited():
    spec = PLAN.master_job([])["spec"]
    assert spec["ttlSecondsAfterFinished"] == 7 * 24 * 3600
    assert "activeDeadlineSeconds" not in spec
    limited = replace(PLAN.settings, active_deadline_seconds=60, ttl_seconds_after_finished=0)
    spec = replace(PLAN, settings=limited).master_job([])["spec"]
    assert spec["activeDeadlineSeconds"] == 60
    assert "ttlSecondsAfterFinished" not in spec


def test_the_master_is_probed_by_http_and_scraped_and_a_server_by_grpc_where_there_is_such_a_probe():
    template = PLAN.master_job([], metrics_port=9000, health_port=9001)["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "9000"
    (master,) = template["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in master["ports"]} == {
        "grpc": 50051, "metrics": 9000, "health": 9001,
    }  # fmt: skip
    assert master["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert master["livenessProbe"]["failureThreshold"] * master["livenessProbe"]["periodSeconds"] == 180
    assert master["readinessProbe"]["httpGet"]["path"] == "/readyz"
    old, new = (replace(PLAN, grpc_probes=each).pod("ps", 0, 0, [])["spec"]["containers"][0] for each in (False, True))
    assert "readinessProbe" not in old
    assert new["readinessProbe"]["grpc"] == {"port": 9465, "service": "elasticcb.ParameterServer"}
    assert "livenessProbe" not in new  # the master replaces servers that hang
    assert "ports" not in PLAN.pod("worker", 0, 0, [])["spec"]["containers"][0]


def test_servers_in_the_network_of_their_node_hold_no_port_that_others_may_have():
    shared = replace(PLAN, settings=replace(SETTINGS, cluster_spec={"ps": {"spec": {"hostNetwork": True}}}))
    assert shared.shares_network
    assert not PLAN.shares_network
    assert "ports" not in shared.pod("ps", 0, 0, [])["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_resources, "cpu", "not of the form NAME=VALUE"),
        (parse_resources, "cpu=two", "'two' is not an amount of cpu"),
        (parse_resources, "memory=0Gi", "not an amount"),
        (parse_resources, "cpus=2", "unknown resource 'cpus'"),
        (parse_resources, "cpu=1,cpu=2", "given twice"),
        (parse_volumes, "mount_path=/a", "none of host_path and claim_name"),
        (parse_volumes, "host_path=/a,claim_name=b,mount_path=/a", "both of host_path and claim_name"),
        (parse_volumes, "claim_name=b", "lacks mount_path"),
        (parse_volumes, "claim_name=b,mount_path=data", "is not an absolute path"),
        (parse_volumes, "claim_name=b,mount_path=/a,readonly=true", "'readonly' is not a key"),
        (parse_volumes, "claim_name=b,mount_path=/a;host_path=/x,mount_path=/a/", "given twice"),
        (parse_tolerations, "a=b:Never", "'a=b:Never' is not a toleration"),
        (parse_priority, "high=2", "'high=2' is not a priority"),
        (parse_priority, "low=0.5", "is not a priority"),
        (parse_envs, "1A=2", "is not a valid name of an environment variable"),
        (parse_secrets, "login,My Secret", "'My Secret' is not a valid name of a Secret"),
        (parse_name, "My_Team", "is not a valid name of a Kubernetes object"),
    ],
)
def test_text_that_a_flag_can_not_be_is_told_in_words(parse, text, words):
    with pytest.raises(UsageError, match=words):
        parse(text)


def test_tolerations_are_read_as_taints_are_written():
    assert parse_tolerations("a=b:NoSchedule, c:NoExecute,d") == [
        {"key": "a", "operator": "Equal", "value": "b", "effect": "NoSchedule"},
        {"key": "c", "operator": "Exists", "effect": "NoExecute"},
        {"key": "d", "operator": "Exists"},
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [("mnist-mnist_functional", "mnist-mnist-functional"), ("2nd.Try", "job-2nd-try"), ("a" * 60, "a" * 40)],
)
def test_any_text_becomes_a_name(text, name):
    assert safe_name(text) == name

"""What the chart renders: exact facts, for all of ci/, and what its schema refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from rljob.labels import labels
from rljob_operator import preflight
from rljob_operator.observed import ClusterConfig
from rljob_sandbox_pool import cluster_config
from tests.harness.chart import (
    CHART,
    CLUSTER_SCOPED,
    NAMESPACE,
    Object,
    Rendered,
    helm,
    restricted_faults,
    rights,
    selects,
)

CI = sorted((CHART / "ci").glob("*.yaml"))
DEPLOYMENTS = {"rljob-operator": "operator", "rljob-sandbox-pool": "sandbox-pool"}


@cache
def rendered(name: str = "default") -> Rendered:
    """The chart with the values of ci/NAME-values.yaml."""
    return Rendered("-f", str(CHART / "ci" / f"{name}-values.yaml"))


@cache
def with_set(*settings: str) -> Rendered:
    return Rendered(*(part for one in settings for part in ("--set-json", one)))


ALL = pytest.mark.parametrize("name", [path.stem.removesuffix("-values") for path in CI])


def pod_labels(objects: Rendered) -> list[dict[str, str]]:
    return [pod["metadata"]["labels"] for _, pod in objects.pods()]


# ── for all values of ci/ ──


@pytest.mark.parametrize("values", CI, ids=lambda path: path.stem)
def test_helm_lint_has_nothing_to_say(values: Path) -> None:
    run = helm("lint", "--strict", str(CHART), "-f", str(values))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WARNING" not in run.stdout


def test_ci_has_the_three_sets() -> None:
    assert [path.name for path in CI] == [
        "default-values.yaml",
        "monitoring-values.yaml",
        "namespaced-values.yaml",
    ]


@ALL
def test_every_object_is_named_once_and_carries_our_labels(name: str) -> None:
    objects = rendered(name).objects
    keys = Counter(
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects
    )
    assert [key for key, count in keys.items() if count > 1] == []
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "rljob", one["metadata"]
        assert labels["app.kubernetes.io/managed-by"] == "Helm"


@ALL
def test_every_object_says_its_namespace(name: str) -> None:
    for one in rendered(name).objects:
        assert (one["kind"] in CLUSTER_SCOPED) == ("namespace" not in one["metadata"]), one["kind"]


@ALL
def test_every_pod_meets_the_restricted_standard(name: str) -> None:
    faults = {pod: restricted_faults(body["spec"]) for pod, body in rendered(name).pods()}
    assert faults == {"rljob-operator": [], "rljob-sandbox-pool": [], "rljob-test": []}


def test_the_check_of_the_standard_finds_faults() -> None:
    pod = {"hostNetwork": True, "volumes": [{"name": "root", "hostPath": {"path": "/"}}]}
    container = {"name": "c", "securityContext": {"privileged": True}}
    assert restricted_faults({**pod, "containers": [container]}) == [
        "hostNetwork",
        "may run as root",
        "no seccomp profile",
        "volume root",
        "c: privilege escalation",
        "c: capabilities",
        "c: writable root",
        "c: no requests",
    ]


@ALL
def test_selectors_of_deployments_select_their_own_pods_alone(name: str) -> None:
    objects = rendered(name)
    for one in objects.all("Deployment"):
        hits = [labels for labels in pod_labels(objects) if selects(_match_labels(one), labels)]
        assert hits == [one["spec"]["template"]["metadata"]["labels"]]


def _match_labels(one: Object) -> dict[str, str]:
    selector = one["spec"].get("selector", one["spec"].get("podSelector", {}))
    return selector.get("matchLabels", selector)


def _port_names(pod: Object) -> set[str]:
    return {port["name"] for one in pod["spec"]["containers"] for port in one.get("ports", [])}


@ALL
@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy", "PodMonitor"])
def test_what_looks_after_pods_selects_the_pods_of_its_name(name: str, kind: str) -> None:
    objects = rendered(name)
    pods = dict(objects.pods())
    for one in objects.all(kind):
        chosen = [
            pod
            for pod, body in pods.items()
            if selects(_match_labels(one), body["metadata"]["labels"])
        ]
        assert chosen == [one["metadata"]["name"]]
        rules = [port for rule in one["spec"].get("ingress", []) for port in rule.get("ports", [])]
        for port in rules + one["spec"].get("podMetricsEndpoints", []):
            assert port["port"] in _port_names(pods[chosen[0]])


@ALL
@pytest.mark.parametrize(
    ("service", "ports"), [("rljob-operator", {8081}), ("rljob-sandbox-pool", {8080})]
)
def test_services_reach_their_pods(name: str, service: str, ports: set[int]) -> None:
    objects = rendered(name)
    spec = objects.one("Service", service)["spec"]
    pod = dict(objects.pods())[service]
    assert {port["port"] for port in spec["ports"]} == ports
    numbers = {
        port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]
    }
    assert all(numbers[port["targetPort"]] == port["port"] for port in spec["ports"])
    # the active pool manager gives its own pod one label more
    later = {cluster_config.ACTIVE: "true"} if service == "rljob-sandbox-pool" else {}
    assert selects(spec["selector"], pod["metadata"]["labels"] | later)
    assert selects(later, spec["selector"])


@ALL
def test_pods_run_under_accounts_that_exist_and_are_bound(name: str) -> None:
    objects = rendered(name)
    for deployment in DEPLOYMENTS:
        pod = objects.one("Deployment", deployment)["spec"]["template"]["spec"]
        account = objects.one("ServiceAccount", pod["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False
        assert pod["automountServiceAccountToken"] is True
    for binding in objects.all("RoleBinding") + objects.all("ClusterRoleBinding"):
        subject = binding["subjects"][0]
        assert objects.one("ServiceAccount", subject["name"], subject["namespace"])
        role = binding["roleRef"]
        assert objects.one(role["kind"], role["name"], binding["metadata"].get("namespace"))


@ALL
def test_the_test_pod_has_no_token_and_asks_the_services_that_exist(name: str) -> None:
    objects = rendered(name)
    pod = objects.one("Pod", "rljob-test")["spec"]
    assert pod["automountServiceAccountToken"] is False
    _, *urls = pod["containers"][0]["args"]
    hosts = [url.split("/")[2] for url in urls]
    services = {
        f"{one['metadata']['name']}.{NAMESPACE}.svc:{one['spec']['ports'][0]['port']}"
        for one in objects.all("Service")
    }
    assert set(hosts) == services
    compile(pod["containers"][0]["args"][0], "ready.py", "exec")


# ── configuration ──


def operator_config(objects: Rendered) -> ClusterConfig:
    data = objects.one("ConfigMap", "rljob-operator")["data"]["operator.yaml"]
    return msgspec.convert(yaml.safe_load(data), ClusterConfig)


def test_the_operators_configuration_is_what_its_code_reads() -> None:
    config = operator_config(rendered())
    images = config.images
    assert (images.trainer, images.engine) == ("rljob-trainer:0.1.0", "vllm/vllm-openai:v0.31.0")
    assert config == ClusterConfig(images=images), "the chart's defaults are the code's"


def test_namespaced_values_reach_the_operator() -> None:
    config = operator_config(rendered("namespaced"))
    assert config.namespaces == ["team-a", "team-b"]
    assert config.images.rollout_worker == "registry.example:5000/rl/rljob-rollout-worker:2.0"
    assert config.images.engine == "registry.example:5000/rl/rljob-engine:2.0"
    assert config.images.sandbox == "python:3.11-slim"
    assert (config.image_pull_policy, config.image_pull_secrets) == ("Always", ["registry-login"])
    assert (config.storage_class, config.artifacts_size) == ("fast", "100Gi")
    assert config.artifacts_access_mode == "ReadWriteOnce"


@ALL
def test_the_pool_managers_configuration_is_what_its_code_reads(name: str) -> None:
    data = rendered(name).one("ConfigMap", "rljob-sandbox-pool")["data"]["sandbox-pool.yaml"]
    config = msgspec.yaml.decode(data, type=cluster_config.PoolManagerConfig)
    operator = operator_config(rendered(name))
    assert (config.guest_image, config.sandbox_image) == (
        operator.images.sandbox_pool,
        operator.images.sandbox,
    )
    assert (config.namespaces, config.image_pull_policy, config.image_pull_secrets) == (
        operator.namespaces,
        operator.image_pull_policy,
        operator.image_pull_secrets,
    )
    assert (config.broker_url, config.dns_namespace, config.reaper) == (
        operator.broker_url,
        operator.dns_namespace,
        "delete",
    )
    ports = dict(rendered(name).pods())["rljob-sandbox-pool"]["spec"]["containers"][0]["ports"]
    assert {port["name"]: port["containerPort"] for port in ports} == {
        "broker": config.port,
        "metrics": config.metrics_port,
    }


def test_who_may_claim_besides_jobs_is_a_value() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"a": "b"}}}
    objects = with_set(
        f"networkPolicy.claimsFrom={json.dumps([peer])}", 'sandboxes.reaper="dry-run"'
    )
    rules = objects.one("NetworkPolicy", "rljob-sandbox-pool", NAMESPACE)["spec"]["ingress"]
    assert {"ports": [{"port": "broker"}], "from": [peer]} in rules
    given = rendered().one("NetworkPolicy", "rljob-sandbox-pool", NAMESPACE)["spec"]["ingress"]
    assert len(rules) == len(given) + 1
    data = objects.one("ConfigMap", "rljob-sandbox-pool")["data"]["sandbox-pool.yaml"]
    config = msgspec.yaml.decode(data, type=cluster_config.PoolManagerConfig)
    assert config.reaper == "dry-run"


def test_a_digest_wins_over_a_tag() -> None:
    pod = rendered("namespaced").one("Deployment", "rljob-operator")["spec"]["template"]["spec"]
    image = pod["containers"][0]["image"]
    assert image.startswith("registry.example:5000/rl/rljob-operator@sha256:0123")


def test_the_broker_is_where_the_operator_says() -> None:
    service = rendered().one("Service", "rljob-sandbox-pool")
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    port = service["spec"]["ports"][0]["port"]
    assert operator_config(rendered()).broker_url == f"http://{name}.{namespace}.svc:{port}"


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_the_files_that_a_command_names_are_mounted(deployment: str) -> None:
    objects = rendered()
    pod = objects.one("Deployment", deployment)["spec"]["template"]["spec"]
    container, component = pod["containers"][0], DEPLOYMENTS[deployment]
    assert container["command"][-2:] == ["--config", f"/etc/rljob/{component}.yaml"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    file = mounts[f"/etc/rljob/{component}.yaml"]["subPath"]
    assert file in objects.one("ConfigMap", deployment)["data"]
    keys = next(one for one in pod["volumes"] if one["name"] == "keys")["secret"]
    wanted = {"operator": ["broker_key"], "sandbox-pool": ["broker_key", "pool_key"]}[component]
    assert [item["path"] for item in keys["items"]] == wanted
    assert set(wanted) <= set(objects.one("Secret", keys["secretName"])["data"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_a_changed_configuration_starts_new_pods(deployment: str) -> None:
    def annotation(objects: Rendered) -> str:
        template = objects.one("Deployment", deployment)["spec"]["template"]
        return template["metadata"]["annotations"]["rljob.dev/config-hash"]

    changed = with_set('image.pullPolicy="Always"')
    assert annotation(rendered()) != annotation(changed)
    assert annotation(rendered()) == annotation(rendered("monitoring"))


def test_keys_are_random_and_kept() -> None:
    first, second = rendered().one("Secret", "rljob-keys"), with_set().one("Secret", "rljob-keys")
    assert first["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    texts = [one["data"][key] for one in (first, second) for key in ("broker_key", "pool_key")]
    assert len(set(texts)) == 4
    assert all(len(text) == 64 for text in texts)


def test_a_given_secret_is_used_and_none_is_made() -> None:
    objects = rendered("namespaced")
    assert objects.all("Secret") == []
    for deployment in DEPLOYMENTS:
        pod = objects.one("Deployment", deployment)["spec"]["template"]["spec"]
        assert {"secretName": "my-keys"}.items() <= pod["volumes"][1]["secret"].items()


# ── CRDs and rights ──


def test_names_that_look_like_numbers_stay_text() -> None:
    run = helm("template", "7", str(CHART), "-n", "1234", "--set-json", 'namespaces=["5678"]')
    objects = [one for one in yaml.safe_load_all(run.stdout) if one]
    spaces = {one["metadata"].get("namespace", "") for one in objects}
    assert spaces == {"", "1234", "5678"}
    for one in objects:
        assert all(isinstance(value, str) for value in one["metadata"]["labels"].values())
        assert all(subject["namespace"] == "1234" for subject in one.get("subjects", ()))
        for text in one.get("data", {}).values() if one["kind"] == "ConfigMap" else ():
            assert yaml.safe_load(text).get("operator_namespace", "1234") == "1234"


def test_crds_are_those_of_the_models_and_are_kept() -> None:
    crds = rendered().all("CustomResourceDefinition")
    assert {one["metadata"]["name"] for one in crds} == {
        "rljobs.rljob.dev",
        "sandboxpools.rljob.dev",
    }
    for one in crds:
        assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        plural = one["spec"]["names"]["plural"]
        source = yaml.safe_load((CHART / "files" / "crds" / f"{plural}.yaml").read_text())
        assert one["spec"] == source["spec"]
        assert one["metadata"]["name"] == source["metadata"]["name"]


def _asked(where: str) -> set[tuple[str, str, str]]:
    """What the operator's code says it needs: in the served namespaces (`jobs`), in its own (`operator`)."""
    return {
        (
            rule.resource.group,
            "/".join(filter(None, (rule.resource.plural, rule.subresource))),
            verb,
        )
        for rule in preflight.RULES
        if rule.where == where
        for verb in rule.verbs
    }


RIGHTS = {
    "rljob-operator": (_asked("jobs"), _asked("operator")),
    "rljob-sandbox-pool": (
        rights([{"rules": cluster_config.RULES}]),
        rights([{"rules": cluster_config.OWN_RULES}]),
    ),
}


@pytest.mark.parametrize("component", RIGHTS)
def test_rights_are_those_that_the_code_names_and_no_more(component: str) -> None:
    served, own = RIGHTS[component]
    assert served
    assert own
    assert rights([rendered().one("ClusterRole", component)]) == served
    assert rights([rendered().one("Role", f"{component}-own", NAMESPACE)]) == own
    for namespace in ("team-a", "team-b"):
        assert rights([rendered("namespaced").one("Role", component, namespace)]) == served


def test_the_served_namespaces_alone_give_rights() -> None:
    objects = rendered("namespaced")
    assert {one["kind"] for one in objects.objects} & CLUSTER_SCOPED == set()
    where = {(one["metadata"]["name"], one["metadata"]["namespace"]) for one in objects.all("Role")}
    assert where == {
        (f"{name}{suffix}", namespace)
        for name in DEPLOYMENTS
        for suffix, namespace in [("", "team-a"), ("", "team-b"), ("-own", NAMESPACE)]
    }


def test_views_and_editors_get_our_resources() -> None:
    view, edit = (rendered().one("ClusterRole", f"rljob-{role}") for role in ("view", "edit"))
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert {key for key in view["metadata"]["labels"] if key.startswith(prefix)} == {
        f"{prefix}view"
    }
    assert {key for key in edit["metadata"]["labels"] if key.startswith(prefix)} == {
        f"{prefix}edit",
        f"{prefix}admin",
    }
    assert all(not {"create", "patch", "delete"} & set(rule["verbs"]) for rule in view["rules"])
    assert "create" in edit["rules"][0]["verbs"]
    assert edit["rules"][0]["resources"] == ["rljobs", "sandboxpools"]


# ── switches ──


@pytest.mark.parametrize(
    ("setting", "kind", "before"),
    [
        ("crds.enabled=false", "CustomResourceDefinition", 2),
        ("networkPolicy.enabled=false", "NetworkPolicy", 2),
        ("podDisruptionBudget.enabled=false", "PodDisruptionBudget", 2),
        ("operator.replicas=1", "PodDisruptionBudget", 2),
        ("aggregateRoles.enabled=false", "ClusterRole", 4),
    ],
)
def test_a_switch_leaves_its_objects_out(setting: str, kind: str, before: int) -> None:
    assert len(rendered().all(kind)) == before
    left = {"operator.replicas=1": 1, "aggregateRoles.enabled=false": 2}.get(setting, 0)
    assert len(with_set(setting).all(kind)) == left


def test_monitoring_is_off_by_default_and_whole_when_on() -> None:
    kinds = {"PodMonitor", "PrometheusRule"}
    assert {one["kind"] for one in rendered().objects} & kinds == set()
    objects = rendered("monitoring")
    assert len(objects.all("PodMonitor")) == 2
    rules = objects.one("PrometheusRule", "rljob")
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    source = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    for shipped, own in zip(rules["spec"]["groups"], source["groups"], strict=True):
        for alert, original in zip(shipped["rules"], own["rules"], strict=True):
            assert alert == original | {"labels": {**original["labels"], "team": "rl"}}


def test_every_alert_is_explained_in_the_docs() -> None:
    source = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    alerts = [rule["alert"] for group in source["groups"] for rule in group["rules"]]
    page = (CHART.parents[1] / "docs" / "monitoring.md").read_text()
    assert re.findall(r"^\| (RLJob\w+) \|", page, re.MULTILINE) == alerts


@pytest.mark.parametrize("name", ["rollout-completion", "sandboxes"])
def test_a_dashboard_is_shipped_as_it_lies_there(name: str) -> None:
    shipped = rendered("monitoring").one("ConfigMap", f"rljob-dashboard-{name}")
    assert shipped["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert shipped["metadata"]["annotations"] == {"grafana_folder": "rljob"}
    source = (CHART / "dashboards" / f"{name}.json").read_text()
    assert json.loads(shipped["data"][f"{name}.json"]) == json.loads(source)


def test_pods_take_what_a_person_adds() -> None:
    template = rendered("namespaced").one("Deployment", "rljob-operator")["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "rl"
    assert template["metadata"]["annotations"]["example.com/owner"] == "rl"
    pod = template["spec"]
    assert pod["priorityClassName"] == "system-cluster-critical"
    assert (pod["nodeSelector"], pod["tolerations"][0]["key"]) == ({"pool": "system"}, "system")
    assert pod["imagePullSecrets"] == [{"name": "registry-login"}]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"} in pod["containers"][0][
        "env"
    ]


def test_metrics_may_be_closed_to_all_but_one_namespace() -> None:
    policy = rendered("namespaced").one("NetworkPolicy", "rljob-operator")["spec"]["ingress"][0]
    monitoring, tests = policy["from"]
    assert monitoring["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    labels = rendered("namespaced").one("Pod", "rljob-test")["metadata"]["labels"]
    assert selects(tests["podSelector"]["matchLabels"], labels)


@pytest.mark.parametrize("component", ["rollout", "trainer", "store", "sandbox"])
def test_only_rollout_pods_and_the_test_reach_the_pool_manager(component: str) -> None:
    jobs, test, metrics = rendered().one("NetworkPolicy", "rljob-sandbox-pool")["spec"]["ingress"]
    (peer,) = jobs["from"]
    assert peer["namespaceSelector"] == {}, "jobs run in any namespace"
    wanted = peer["podSelector"]["matchLabels"]
    assert selects(wanted, labels("j", "u", component)) == (component == "rollout")
    assert test["ports"] == [{"port": "broker"}]
    assert list(test["from"][0]) == ["podSelector"], "of the chart's own namespace"
    assert metrics == {"ports": [{"port": "metrics"}]}


# ── bad values ──

BAD: list[tuple[str, str]] = [
    ("replicas=2", "additional properties 'replicas' not allowed"),
    ("operator.replica=2", "'/operator': additional properties 'replica' not allowed"),
    ("operator.replicas=0", "'/operator/replicas': minimum: got 0, want 1"),
    ("operator.replicas=50", "'/operator/replicas': maximum: got 50, want 5"),
    ('operator.replicas="2"', "'/operator/replicas': got string, want integer"),
    ('namespaces="team-a"', "'/namespaces': got string, want array"),
    ('namespaces=["Team_A"]', "'/namespaces/0': 'Team_A' does not match pattern"),
    ('namespaces=["a","a"]', "'/namespaces': items at 0 and 1 are equal"),
    ('image.pullPolicy="Sometimes"', "'/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ('image.tag="a b"', "'/image/tag': 'a b' does not match pattern"),
    ('images.trainer.repository=""', "'/images/trainer/repository': '' does not match pattern"),
    ('images.trainer="x:1"', "'/images/trainer': got string, want object"),
    ('images.operator.digest="sha1:00"', "'/images/operator/digest': 'sha1:00' does not match pattern"),
    ('images.gateway={"repository":"x"}', "'/images': additional properties 'gateway' not allowed"),
    ('jobs.artifacts.size="lots"', "'/jobs/artifacts/size': 'lots' does not match pattern"),
    ('jobs.artifacts.accessMode="RWX"', "'/jobs/artifacts/accessMode': value must be one of"),
    ('jobs.store.size=4', "'/jobs/store/size': got number, want string"),
    ('crds.enabled="yes"', "'/crds/enabled': got string, want boolean"),
    ('keys.broker="abc"', "'/keys': additional properties 'broker' not allowed"),
    ('keys.existingSecret="My Secret"', "'/keys/existingSecret': 'My Secret' does not match pattern"),
    ('operator.podLabels={"app.kubernetes.io/name":"x"}', "invalid propertyName 'app.kubernetes.io/name'"),
    ('sandboxPool.podAnnotations={"a":1}', "'/sandboxPool/podAnnotations/a': got number, want string"),
    ('operator.resources={"requests":{"cpu":"fast"}}', "'/operator/resources/requests/cpu': 'fast' does not match"),
    ('operator.resources={"request":{}}', "'/operator/resources': additional properties 'request' not allowed"),
    ('operator.tolerations=[{"operator":"Equals"}]', "'/operator/tolerations/0/operator': value must be one of"),
    ('operator.extraEnv=[{"value":"x"}]', "'/operator/extraEnv/0': missing property 'name'"),
    ('operator.affinity={"node":{}}', "'/operator/affinity': additional properties 'node' not allowed"),
    ('podMonitor.interval="soon"', "'/podMonitor/interval': 'soon' does not match pattern"),
    ('networkPolicy.metricsFrom=[{"pods":{}}]', "'/networkPolicy/metricsFrom/0': additional properties 'pods' not"),
    ('networkPolicy.claimsFrom=[{"pods":{}}]', "'/networkPolicy/claimsFrom/0': additional properties 'pods' not"),
    ('sandboxes.reaper="on"', "'/sandboxes/reaper': value must be one of"),
    ('dashboards.labels=["x"]', "'/dashboards/labels': got array, want object"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "message"), BAD, ids=[setting for setting, _ in BAD])
def test_bad_values_are_refused_with_their_path(setting: str, message: str) -> None:
    run = helm("template", "rljob", str(CHART), "-n", NAMESPACE, "--set-json", setting)
    assert run.returncode != 0
    assert message in run.stderr


def test_the_schema_leaves_nothing_open() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    open_ended = [path for path, node in _nodes(schema, "") if _is_open(node)]
    # of Kubernetes' own types, which the API server judges, and what helm sets
    assert open_ended == [
        "/definitions/deployment/properties/affinity/properties/nodeAffinity",
        "/definitions/deployment/properties/affinity/properties/podAffinity",
        "/definitions/deployment/properties/affinity/properties/podAntiAffinity",
        "/definitions/deployment/properties/extraEnv/items/properties/valueFrom",
        "/definitions/peer/properties/ipBlock",
        "/definitions/peer/properties/namespaceSelector",
        "/definitions/peer/properties/podSelector",
        "/properties/global",
    ]


def _nodes(node: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(node, list):
        return []
    found = [(path, node)] if "type" in node and isinstance(node["type"], str) else []
    for key in sorted(node):
        if isinstance(node[key], dict):
            found += _nodes(node[key], f"{path}/{key}")
    return found


def _is_open(node: dict[str, Any]) -> bool:
    return node["type"] == "object" and "additionalProperties" not in node


def test_every_value_is_explained_by_the_schema_and_has_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for image in values["images"].values():
        assert set(image) == set(schema["definitions"]["image"]["properties"])
    for deployment in ("operator", "sandboxPool"):
        assert set(values[deployment]) == set(schema["definitions"]["deployment"]["properties"])


def test_the_commands_are_modules_that_exist() -> None:
    for deployment in DEPLOYMENTS:
        pod = rendered().one("Deployment", deployment)["spec"]["template"]["spec"]
        python, flag, module = pod["containers"][0]["command"][:3]
        assert (python, flag) == ("python", "-m")
        assert find_spec(module), module


def test_the_notes_say_what_to_do_next() -> None:
    run = helm("install", "rljob", str(CHART), "-n", NAMESPACE, "--dry-run=client")
    notes = run.stdout.partition("NOTES:")[2]
    assert "helm test rljob -n rljob-system" in notes
    assert "keeps the CRDs" in notes

"""The chart renders every set of values to manifests that Kubernetes accepts, and refuses values that cannot work."""

import base64
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tentalis.gateway.http.keys import Keys, Scope
from tests.support import ROOT
from tests.unit.helm import chart
from tests.unit.helm.chart import CHART, KUBERNETES, VALUES, Manifest, container, pods, rendered, set_of, template
from trainer.config.conversation import ANCHOR

MINIMAL = ("-f", str(CHART / "ci" / "minimal-values.yaml"))


def values_id(path: Path) -> str:
    return path.stem.removesuffix("-values")


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_helm_lint_passes(values: Path) -> None:
    done = chart.helm("lint", "--strict", str(CHART), "-f", str(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", VALUES, ids=values_id)
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_every_manifest(values: Path, version: str) -> None:
    assert [problem for each in rendered(values) for problem in chart.problems(each, version)] == []


def test_there_are_at_least_twelve_sets_of_values() -> None:
    assert len(VALUES) >= 12


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_validation_finds_a_typo(version: str) -> None:
    deployment = copy.deepcopy(chart.named(set_of("minimal"), "Deployment", "demo-tentalis-policies"))
    deployment["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    assert any("readinesProbe" in problem for problem in chart.problems(deployment, version))


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_names_are_unique_and_references_resolve(values: Path) -> None:
    manifests = rendered(values)
    names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)
    made = {kind: {name for _, of, name in names if of == kind} for kind in ("ConfigMap", "PersistentVolumeClaim")}
    for manifest, pod in pods(manifests):
        spec = pod["spec"]
        claims = manifest["spec"].get("volumeClaimTemplates", ())
        volumes = {each["name"] for each in (*spec["volumes"], *(claim["metadata"] for claim in claims))}
        assert len(volumes) == len(spec["volumes"]) + len(claims)
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
            assert len({variable["name"] for variable in each["env"]}) == len(each["env"])
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in made["ConfigMap"]
            if "persistentVolumeClaim" in volume and values_id(values) not in ("gpu", "vllm"):
                assert volume["persistentVolumeClaim"]["claimName"] in made["PersistentVolumeClaim"]


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_every_pod_meets_the_restricted_standard(values: Path) -> None:
    for _, pod in pods(rendered(values)):
        spec = pod["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] in (10001, 1000)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        assert {next(iter(volume.keys() - {"name"})) for volume in spec["volumes"]} <= {
            "configMap",
            "emptyDir",
            "persistentVolumeClaim",
            "secret",
        }
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= each["resources"].keys()


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_selectors_find_their_pods_and_services_their_ports(values: Path) -> None:
    manifests = rendered(values)
    found = [
        (each["spec"]["template"]["metadata"]["labels"], each)
        for each in manifests
        if "template" in each.get("spec", {})
    ]
    for labels, each in found:
        if each["kind"] != "Job":
            assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for service in chart.of_kind(manifests, "Service"):
        selected = [each for labels, each in found if service["spec"]["selector"].items() <= labels.items()]
        assert len(selected) == 1
        ports = {port["name"] for port in container(selected[0]).get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for each in chart.of_kind(manifests, "StatefulSet"):
        chart.named(manifests, "Service", each["spec"]["serviceName"])
    for budget in chart.of_kind(manifests, "PodDisruptionBudget"):
        assert len([each for labels, each in found if matches(budget["spec"]["selector"], labels)]) == 1
    for scaler in chart.of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        scaled = chart.named(manifests, target["kind"], target["name"])
        assert scaled["apiVersion"] == target["apiVersion"] and "replicas" not in scaled["spec"]
    for ingress in chart.of_kind(manifests, "Ingress"):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            service = chart.named(manifests, "Service", path["backend"]["service"]["name"])
            assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("kafka.bootstap=kafka:9092", "bootstap"),
        ("kafka.bootstrap=kafka", "bootstrap"),
        ("kafka.securityProtocol=SASL", "securityProtocol"),
        ("kafka.namespacePrefix=Staging", "namespacePrefix"),
        ("kafka.namespacePrefix=old.tentalis", "namespacePrefix"),
        ("roles.joins.replicas=2", "joins"),
        ("roles.join.replica=2", "replica"),
        ("roles.join.replicas=two", "replicas"),
        ("roles.trainer.replicas=2", "replicas"),
        ("roles.trainer.keda.enabled=true", "keda"),
        ("roles.join.persistence.sise=5Gi", "sise"),
        ("defaults.resources.limit.memory=1Gi", "limit"),
        ("gateway.ingress.hosts=example.org", "hosts"),
        ("gateway.service.type=Loadbalancer", "type"),
        ("image.digests.gateway=sha256:00", "gateway"),
        ("topics.provision=always", "provision"),
        ("topics.onRisk=ignore", "onRisk"),
        ("strimzi.users.extra={root}", "extra"),
        ("trainer.policy=my policy", "policy"),
        ("worker.environments={}", "environments"),
        ("storage.accessMode=ReadWriteAll", "accessMode"),
        ("storage.url=bucket", "url"),
        ("registry.url=https://user:pass@registry", "url"),
        ("telemetry.OTLP_ENDPOINT=x", "OTLP_ENDPOINT"),
        ("state.store=disk", "store"),
        ("monitoring.rules.enable=true", "enable"),
        ("tests.timeoutSeconds=0", "timeoutSeconds"),
        ("podMonitor.enabled=true", "podMonitor"),
    ],
)
def test_the_values_schema_refuses_invalid_values(change: str, message: str) -> None:
    done = template(*MINIMAL, "--set", change)
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("kafka.bootstrap=", "no Kafka is given"),
        ("storage.url=s3://bucket,storage.existingClaim=mine", "storage.url and storage.existingClaim are both set"),
        (
            "environmentFile.content.environments.sums.base=math,environmentFile.configMap=mine",
            "environmentFile.content and environmentFile.configMap are both set",
        ),
        (
            "storage.credentialsSecret=object-store",
            "storage.credentialsSecret needs storage.url or storage.attachments",
        ),
        ("kafka.embedded.enabled=true", "kafka.bootstrap and kafka.embedded.enabled are both set"),
        ("kafka.securityProtocol=SASL_SSL", "needs kafka.sasl.existingSecret"),
        ("registry.username=me", "registry.username needs"),
        ("topics.provision=strimzi", "strimzi.cluster is missing"),
        ("topics.provision=strimzi,strimzi.cluster=main,topics.onRisk=skip", "the operator leaves no change out"),
        ("strimzi.users.enabled=true,strimzi.cluster=main", "set kafka.perRoleUsers=true"),
        ("roles.join.replicas=9", "roles.join.replicas is 9, but its topics have 8 partitions"),
        ("roles.worker.replicas=9", "roles.worker.replicas is 9, but its topics have 8 partitions"),
        ("roles.worker.keda.enabled=true,roles.worker.keda.maxReplicas=50", "roles.worker.keda.maxReplicas is 50"),
        (
            "roles.worker.autoscaling.enabled=true,roles.worker.autoscaling.maxReplicas=50",
            "roles.worker.autoscaling.maxReplicas is 50",
        ),
        ("roles.join.autoscaling.enabled=true", "only gateway and worker"),
        ("roles.gateway.keda.enabled=true", "only the worker scales by lag"),
        ("roles.worker.keda.enabled=true,roles.worker.autoscaling.enabled=true", "choose one"),
        ("server.url=http://vllm:8000", "set roles.model.enabled=false"),
        ("roles.model.enabled=false", "name the model server in server.url"),
        ("gateway.keysSecret=", "the gateway has no API keys"),
        ("gateway.noKeys=true", "choose one"),
        ("gateway.ingress.enabled=true", "gateway.ingress.host is missing"),
        ("roles.experience.enabled=true", "roles.experience needs hinters"),
        ("roles.manager.enabled=true", "roles.manager needs trainer.config.steps"),
        ("trainer.config.run_id=run", "set trainer.runId"),
    ],
)
def test_values_that_cannot_work_together_are_refused(changes: str, message: str) -> None:
    done = template(*MINIMAL, "--set", changes)
    assert done.returncode != 0
    assert message in done.stderr


def probe_seconds(each: Manifest) -> int:
    probe = container(each)["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def test_probes_leave_time_for_recovery_and_loading() -> None:
    found = chart.workloads(set_of("minimal"))
    assert probe_seconds(found["join"]) == 600 and probe_seconds(found["trainer"]) == 1800
    for each in found.values():
        for probe, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
            assert container(each)[f"{probe}Probe"]["httpGet"]["path"] == path


def test_a_process_that_a_restart_does_not_repair_is_held() -> None:
    for component, each in chart.workloads(set_of("trial")).items():
        given = {entry["name"]: entry.get("value") for entry in container(each)["env"]}
        serves = component in ("gateway", "model")  # their probes ask the port of their API
        wanted = None if serves else "0,5,7" if component == "trainer" else "5,7"
        assert given.get("TENTALIS_HOLD") == wanted, component


@pytest.mark.parametrize(("keep", "fate"), [("true", "Retain"), ("false", "Delete")])
def test_the_log_and_the_checkpoints_stay_or_go_together(keep: str, fate: str) -> None:
    changes = f"storage.keep={keep},roles.gateway.persistence.enabled=true"
    done = chart.template("-f", str(chart.CHART / "ci" / "trial-values.yaml"), "--set", changes)
    manifests = tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)
    claiming = [
        each["spec"] for each in chart.of_kind(manifests, "StatefulSet") if "volumeClaimTemplates" in each["spec"]
    ]
    assert len(claiming) == 2
    assert {each["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] for each in claiming} == {fate}
    (claim,) = chart.of_kind(manifests, "PersistentVolumeClaim")
    assert ("annotations" in claim["metadata"]) is (keep == "true")


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_waiting_for_topics_asks_for_no_more_than_the_process(values: Path) -> None:
    for component, each in chart.workloads(rendered(values)).items():
        for first in each["spec"]["template"]["spec"].get("initContainers", []):
            limited = dict(container(each)["resources"]["limits"])
            for name in [name for name in limited if "/" in name]:
                del limited[name]  # a GPU is for the process alone
            wanted = container(each)["resources"] | {"limits": limited}
            assert first["resources"] == wanted, component


def test_trainer_policies_and_model_share_a_volume_and_with_one_writer_a_node() -> None:
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {
            "matchLabels": {
                "app.kubernetes.io/name": "tentalis",
                "app.kubernetes.io/instance": "demo",
                "tentalis.io/storage": "shared",
            }
        },
    }
    for name, kept in (("minimal", True), ("gpu", False)):
        found = chart.workloads(set_of(name))
        for role in ("trainer", "policies", "model"):
            spec = found[role]["spec"]["template"]["spec"]
            claim = next(volume for volume in spec["volumes"] if volume["name"] == "state")
            assert claim["persistentVolumeClaim"] == {"claimName": "demo-tentalis-storage"}
            mounts = {each["mountPath"]: each for each in container(found[role])["volumeMounts"]}
            mount = mounts["/var/lib/tentalis"]
            assert mount.get("readOnly", False) is (role != "trainer")
            affinity = spec.get("affinity", {}).get("podAffinity", {})
            assert (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") == [term]) is kept


def manifests_of(name: str, *changes: str) -> tuple[Manifest, ...]:
    done = template(
        "-f", str(CHART / "ci" / f"{name}-values.yaml"), *(part for each in changes for part in ("--set", each))
    )
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)


def test_with_an_object_store_nothing_is_shared_but_its_url() -> None:
    manifests = set_of("s3")
    assert chart.of_kind(manifests, "PersistentVolumeClaim") == []
    for role, workload in chart.workloads(manifests).items():
        uses, pod, found = role in chart.STORING, workload["spec"]["template"], container(workload)
        assert "affinity" not in pod["spec"] and "tentalis.io/storage" not in pod["metadata"]["labels"]
        assert not [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
        env = {each["name"]: each.get("value") for each in found["env"]}
        assert env["TENTALIS_STORE"] == "s3://my-bucket/tentalis"
        attaches = env.get("TENTALIS_ATTACHMENTS") == "s3://my-bucket/attachments"
        assert attaches is (chart.role_of(workload) == "worker")
        assert found.get("envFrom", []) == ([{"secretRef": {"name": "object-store"}}] if uses or attaches else [])
        mounts = {each["mountPath"]: each for each in found["volumeMounts"]}
        assert "readOnly" not in mounts["/var/lib/tentalis"]
        assert (env.get("TENTALIS_CACHE") in mounts) is uses
    assert {"name": "TENTALIS_STORE", "value": "s3://my-bucket/tentalis"} not in container(
        chart.workloads(set_of("minimal"))["trainer"]
    )["env"]


def test_with_an_object_store_the_trainer_may_keep_its_disk() -> None:
    trainer = chart.workloads(manifests_of("s3", "roles.trainer.persistence.enabled=true"))["trainer"]
    (claim,) = trainer["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "state"
    assert "state" not in {volume["name"] for volume in trainer["spec"]["template"]["spec"]["volumes"]}


def test_policies_fetch_adapters_to_where_vllm_reads_them() -> None:
    vllm = ("server.url=http://vllm:8000", "roles.model.enabled=false", "cache.existingClaim=models")
    found = chart.workloads(manifests_of("s3", *vllm))
    for role in ("policies", "trainer"):
        pod = found[role]["spec"]["template"]["spec"]
        assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
        assert {"name": "cache", "mountPath": "/var/cache/tentalis"} in container(found[role])["volumeMounts"]
        assert {"name": "TENTALIS_CACHE", "value": "/var/cache/tentalis"} in container(found[role])["env"]


def test_the_policies_of_a_vllm_in_half_precision_are_told_of_it() -> None:
    arguments = container(chart.workloads(set_of("vllm"))["policies"])["args"]
    assert arguments[-2:] == ["--dtype", "bfloat16"], "vLLM declares no precision"


def test_a_trainer_on_several_nodes_has_a_pod_for_each_that_find_and_reach_one_another() -> None:
    manifests = set_of("nodes")
    trainer, name = chart.workloads(manifests)["trainer"], "demo-tentalis-trainer"
    assert (trainer["spec"]["replicas"], trainer["spec"]["podManagementPolicy"]) == (3, "Parallel")
    arguments = container(trainer)["args"]
    assert arguments[arguments.index("--ranks") + 1] == "2"
    assert arguments[-4:] == ["--nodes", "3", "--rendezvous", f"{name}-0.{name}:29400"]
    (node,) = [each for each in container(trainer)["env"] if each["name"] == "TENTALIS_TRAINER_NODE"]
    assert node["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    service = chart.named(manifests, "Service", trainer["spec"]["serviceName"])["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    policy = chart.named(manifests, "NetworkPolicy", name)["spec"]
    peers = {"podSelector": policy["podSelector"]}
    assert {"from": [peers]} in policy["ingress"] and {"to": [peers]} in policy["egress"]
    spread = trainer["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
    assert [each["topologyKey"] for each in spread][:1] == ["kubernetes.io/hostname"], "its pods are on several nodes"
    assert spread[0]["labelSelector"] == policy["podSelector"]

    one = chart.workloads(set_of("s3"))["trainer"]
    assert (one["spec"]["replicas"], one["spec"]["podManagementPolicy"]) == (1, "OrderedReady")
    assert "--nodes" not in container(one)["args"]
    assert "topologySpreadConstraints" not in one["spec"]["template"]["spec"]
    done = template(*MINIMAL, "--set", "trainer.nodes=2")
    assert done.returncode != 0 and "storage.accessMode=ReadWriteMany" in done.stderr


def test_scale_budgets_and_spread() -> None:
    manifests = set_of("large")
    found = chart.workloads(manifests)
    assert found["join"]["spec"]["replicas"] == 4
    assert "replicas" not in found["gateway"]["spec"] and "replicas" not in found["worker-math"]["spec"]
    budgets = {each["metadata"]["name"] for each in chart.of_kind(manifests, "PodDisruptionBudget")}
    scaled = ("join", "sessions", "scoring", "hinting", "gateway", "worker-chat", "worker-math")
    assert budgets == {f"demo-tentalis-{role}" for role in scaled}
    keys = [each["topologyKey"] for each in found["join"]["spec"]["template"]["spec"]["topologySpreadConstraints"]]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    trigger = chart.named(manifests, "ScaledObject", "demo-tentalis-worker-math")["spec"]["triggers"][0]["metadata"]
    assert trigger["consumerGroup"] == "tentalis-worker-math" and trigger["topic"] == "tentalis.tasks.v1"
    assert trigger["lagThreshold"] == "10"  # 20 s at 0.5 tasks per second


def test_scaling_replaces_no_pod_that_runs() -> None:
    def join(replicas: int) -> Manifest:
        done = chart.template(
            "-f", str(chart.CHART / "ci" / "minimal-values.yaml"), "--set", f"roles.join.replicas={replicas}"
        )
        found = tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)
        return dict(chart.workloads(found)["join"]["spec"])

    one, three = join(1), join(3)
    assert (one.pop("replicas"), three.pop("replicas")) == (1, 3)
    assert one == three


def job_of(component: str, *arguments: str) -> list[Manifest]:
    """Returns the Jobs of a component, hooks first."""
    done = template(*arguments)
    assert done.returncode == 0, done.stderr
    found = tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)
    jobs = [
        each
        for each in chart.of_kind(found, "Job")
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    return sorted(jobs, key=lambda each: "helm.sh/hook" not in each["metadata"].get("annotations", {}))


@pytest.mark.parametrize("name", ["trial", "strimzi"])
def test_an_upgrade_classifies_the_changes_of_topics_before_it_replaces_anything(name: str) -> None:
    values = ("-f", str(CHART / "ci" / f"{name}-values.yaml"))
    assert len(job_of("topics", *values)) == 1
    check, apply = job_of("topics", *values, "--is-upgrade", "--set", "topics.onRisk=apply")
    assert check["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    assert container(check)["args"] == ["topics", "apply", "--dry-run", "--on-risk", "apply"]
    assert container(apply)["args"] == ["topics", "apply", "--yes", "--on-risk", "apply"]
    assert "helm.sh/hook" not in apply["metadata"]["annotations"]
    for key in ("env", "resources", "image", "volumeMounts"):
        assert container(check)[key] == container(apply)[key], key
    assert check["spec"]["template"]["spec"]["volumes"] == apply["spec"]["template"]["spec"]["volumes"]
    for version in KUBERNETES:
        assert chart.problems(check, version) == []


def test_a_lost_topic_is_accepted_by_the_job_and_by_each_application_that_is_told_to() -> None:
    accepts = ("--set", "topics.acceptLoss=true", "--set", "roles.join.args={--accept-loss}")
    (apply,) = job_of("topics", *MINIMAL, *accepts)
    assert container(apply)["args"] == ["topics", "apply", "--yes", "--on-risk", "stop", "--accept-loss"]
    trial = ("-f", str(CHART / "ci" / "trial-values.yaml"), "--is-upgrade")
    for job in job_of("topics", *trial, *accepts):
        assert container(job)["args"][-1] == "--accept-loss", "the check would fail, and with it the upgrade"
    for component, accepted in (("join", True), ("sessions", False)):
        (process,) = pod_template(component, *accepts)["spec"]["containers"]
        assert ("--accept-loss" in process["args"]) is accepted
    done = template(*MINIMAL, "--set-string", "topics.acceptLoss=yes")
    assert done.returncode != 0 and "acceptLoss" in done.stderr


def test_jobs_that_no_hook_replaces_can_be_made_anew_where_revisions_do_not_count() -> None:
    trial = ("-f", str(CHART / "ci" / "trial-values.yaml"))
    for job in (*job_of("topics", *trial), *job_of("manager", *trial)):
        assert job["metadata"]["annotations"] == {"argocd.argoproj.io/sync-options": "Force=true,Replace=true"}
    (hook,) = job_of("topics", *MINIMAL)
    assert "argocd.argoproj.io/sync-options" not in hook["metadata"]["annotations"]


def test_workers_have_the_files_of_their_environments() -> None:
    def arguments(*changes: str) -> list[str]:
        manifests = tuple(yaml.load_all(template(*changes).stdout, chart.LOADER))
        workers = [each for each in chart.workloads(manifests).values() if chart.role_of(each) == "worker"]
        return [" ".join(container(each)["args"]) for each in workers]

    assert not [each for each in arguments(*MINIMAL) if "--tools" in each or "--tasks" in each]
    given = "worker.environments={toolcall,swe},worker.tools=/data/tools.yaml,worker.tasks=/data/tasks"
    found = arguments(*MINIMAL, "--set", given)
    assert len(found) == 2 and all("--tools /data/tools.yaml --tasks /data/tasks" in each for each in found)


@pytest.mark.parametrize("own", [False, True], ids=["content", "config map"])
def test_processes_that_check_environments_have_their_file(own: bool) -> None:
    content = {"environments": {"sums": {"base": "math", "scorer": "math_verify", "data": {}}}}
    given = {"configMap": "mine"} if own else {"content": content}
    done = template(*MINIMAL, "--set-json", f"environmentFile={json.dumps(given)}")
    assert done.returncode == 0, done.stderr
    manifests = tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)
    name, readers = "mine" if own else "demo-tentalis-environments", set()
    for workload in chart.workloads(manifests).values():
        found, volumes = container(workload), workload["spec"]["template"]["spec"]["volumes"]
        (path,) = [each["value"] for each in found["env"] if each["name"] == "TENTALIS_ENVIRONMENT_FILE"] or [None]
        mounts = [each["mountPath"] for each in found["volumeMounts"] if each["name"] == "environments"]
        if path is not None:
            readers.add(chart.role_of(workload))
            assert {"name": "environments", "configMap": {"name": name}} in volumes
        assert mounts == ([] if path is None else [path.removesuffix("/environments.yaml")])
    assert readers == {"worker", "scoring", "hinting", "aggregation", "gateway"}
    maps = {each["metadata"]["name"]: each["data"] for each in chart.of_kind(manifests, "ConfigMap")}
    assert (name in maps) is not own
    if not own:
        assert yaml.safe_load(maps[name]["environments.yaml"]) == content


def test_the_manager_has_its_samples_and_curriculum() -> None:
    trial = ("-f", str(CHART / "ci" / "trial-values.yaml"))
    (plain,) = job_of("manager", *trial)
    assert "--curriculum" not in container(plain)["args"]
    (chosen,) = job_of("manager", *trial, "--set", "manager.samples=4,manager.curriculum=solve-rate")
    assert "--samples 4 --curriculum solve-rate" in " ".join(container(chosen)["args"])


def pod_template(component: str, *arguments: str) -> Manifest:
    """Returns the pod template of a workload of the minimal values with changes."""
    done = template(*MINIMAL, *arguments)
    assert done.returncode == 0, done.stderr
    found = tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)
    return dict(chart.workloads(found)[component]["spec"]["template"])


@pytest.mark.parametrize(
    ("component", "change"),
    [
        ("gateway", "scorers.environments.chat.taste.kind=taste"),
        ("gateway", "gateway.config.policies[0].name=assistant"),
        ("scoring", "scorers.environments.chat.taste.kind=taste"),
        ("hinting", "hinters.hinters.chat.kind=rule"),
        ("aggregation", "environmentFile.content.environments.sums.base=math"),
        ("trainer", "trainer.config.batch_rollouts=64"),
    ],
)
def test_a_process_is_replaced_when_a_file_that_it_reads_changes(component: str, change: str) -> None:
    name, _, value = change.rpartition("=")
    first, second = (pod_template(component, "--set", f"{name}={each}") for each in (value, f"{value}1"))
    assert first["metadata"]["annotations"] != second["metadata"]["annotations"]
    assert first["spec"] == second["spec"]


def test_topics_are_a_hook_only_where_kafka_and_users_exist_before_the_release() -> None:
    for name, hook in (("minimal", True), ("trial", False), ("strimzi", False)):
        (job,) = [
            each
            for each in chart.of_kind(set_of(name), "Job")
            if each["metadata"]["labels"]["app.kubernetes.io/component"] == "topics"
        ]
        annotations = job["metadata"].get("annotations", {})
        assert (annotations.get("helm.sh/hook") == "pre-install,pre-upgrade") is hook
        assert container(job)["args"] == ["topics", "apply", "--yes", "--on-risk", "stop"]
    assert [each for each in chart.of_kind(set_of("bare"), "Job")] == []


def test_a_gpu_selects_image_limit_ranks_and_runtime() -> None:
    trainer = chart.workloads(set_of("gpu"))["trainer"]
    found = container(trainer)
    assert found["image"] == "ghcr.io/tentalis/trainer-gpu:0.1.0"
    assert found["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert found["args"][found["args"].index("--ranks") + 1] == "2"
    assert trainer["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"


def test_a_digest_replaces_the_tag() -> None:
    found = chart.workloads(set_of("mtls"))
    assert container(found["join"])["image"] == f"registry.example.org/mirror/tentalis/core@sha256:{'a' * 64}"
    assert container(found["trainer"])["image"] == "registry.example.org/mirror/tentalis/trainer-cpu:0.1.0"


def test_secrets_come_from_the_named_secrets_of_each_role() -> None:
    (client,) = [
        volume
        for volume in chart.workloads(set_of("mtls"))["join"]["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "client"
    ]
    assert client["secret"]["secretName"] == "tentalis-join"
    env = {each["name"]: each.get("value") for each in container(chart.workloads(set_of("strimzi"))["gateway"])["env"]}
    assert env["TENTALIS_SASL_USERNAME"] == "tentalis-gateway"
    assert env["TENTALIS_SASL_PASSWORD_FILE"] == "/etc/tentalis/sasl/password"
    env = {each["name"]: each.get("value") for each in container(chart.workloads(set_of("scram"))["gateway"])["env"]}
    assert env["TENTALIS_SASL_USERNAME"] == "tentalis"
    for values in VALUES:
        if values_id(values) != "trial":
            assert chart.of_kind(rendered(values), "Secret") == []


ALONE = ("--set", "kafka.embedded.enabled=true")


def alone(*more: str) -> tuple[Manifest, ...]:
    """Returns the manifests of the embedded Kafka and of nothing else that is set, with changes."""
    done = template(*ALONE, *more)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)


def test_the_embedded_kafka_alone_gives_a_release_that_learns(tmp_path: Path) -> None:
    manifests = alone()
    found = chart.workloads(manifests)
    given = yaml.safe_load(chart.named(manifests, "ConfigMap", "demo-tentalis-trainer")["data"]["config.yaml"])
    assert "manager" in found and given["steps"] == 1000
    assert "--keys" in container(found["gateway"])["args"]
    volumes = found["gateway"]["spec"]["template"]["spec"]["volumes"]
    (keys,) = [each["secret"] for each in volumes if each["name"] == "keys"]
    secret = chart.named(manifests, "Secret", keys["secretName"])
    data = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    (tmp_path / "keys.json").write_text(data[keys["items"][0]["key"]], encoding="utf-8")
    caller = Keys(tmp_path / "keys.json").caller(data["api-key"], Scope.CHAT)
    assert caller.key_id in data["api-key"] and Scope.ADMIN not in caller.scopes
    another = chart.named(alone(), "Secret", keys["secretName"])
    assert another["data"] != secret["data"]


PLAYED = '{"environments": {"writer": {"base": "agent", "program": {"command": ["true"]}}}}'
PLAYS = ("--set-json", f"environmentFile.content={PLAYED}", "--set", "gateway.service.port=80")


def episode_secret(manifests: tuple[Manifest, ...], role: str) -> tuple[str, str] | None:
    """Returns the Secret, and its key, of the file that a role has as TENTALIS_EPISODE_SECRET_FILE."""
    (workload,) = [each for each in chart.workloads(manifests).values() if chart.role_of(each) == role]
    file = {each["name"]: each.get("value") for each in container(workload)["env"]}.get("TENTALIS_EPISODE_SECRET_FILE")
    if file is None:
        return None
    folder, _, name = file.rpartition("/")
    (mount,) = [each for each in container(workload)["volumeMounts"] if each["mountPath"] == folder]
    (volume,) = [each for each in workload["spec"]["template"]["spec"]["volumes"] if each["name"] == mount["name"]]
    (item,) = volume["secret"]["items"]
    assert item["path"] == name and mount["readOnly"]
    return volume["secret"]["secretName"], item["key"]


def test_worker_and_gateway_share_the_secret_of_programs_that_play() -> None:
    manifests = alone(*PLAYS)
    holders = {role for role in chart.workloads(manifests) if role.startswith("worker") or role == "gateway"}
    assert holders == {"worker-chat", "gateway"}
    name, key = episode_secret(manifests, "worker") or ("", "")
    assert (name, key) == ("demo-tentalis-episodes", "secret") == episode_secret(manifests, "gateway")
    for role in chart.workloads(manifests).keys() - holders:
        assert episode_secret(manifests, role) is None
    made = base64.b64decode(chart.named(manifests, "Secret", name)["data"][key])
    assert len(made) >= 32
    environment = {
        each["name"]: each.get("value") for each in container(chart.workloads(manifests)["worker-chat"])["env"]
    }
    service = chart.named(manifests, "Service", "demo-tentalis-gateway")
    (port,) = [each["port"] for each in service["spec"]["ports"] if each["name"] == "http"]
    assert environment["TENTALIS_URL"] == f"http://{service['metadata']['name']}:{port}"
    given = alone(*PLAYS, "--set", "episodes.existingSecret=mine,episodes.secretKey=text")
    assert episode_secret(given, "worker") == ("mine", "text") == episode_secret(given, "gateway")
    assert not [each for each in chart.of_kind(given, "Secret") if each["metadata"]["name"] == name]
    assert episode_secret(alone("--set", "environmentFile.configMap=files"), "gateway") == (name, key)


@pytest.mark.parametrize(
    "changes",
    [
        ("--set", "environmentFile.content.environments.sums.base=math"),
        ("--set", "worker.concurrency=3"),
        (*PLAYS, "--set", "roles.gateway.enabled=false"),
    ],
    ids=["no-program", "no-file", "no-gateway"],
)
def test_no_secret_is_made_where_no_program_plays(changes: tuple[str, ...]) -> None:
    manifests = alone(*changes)
    assert episode_secret(manifests, "worker") is None
    assert not [each for each in chart.of_kind(manifests, "Secret") if each["metadata"]["name"].endswith("-episodes")]


def test_what_the_values_say_comes_before_the_defaults_of_the_embedded_kafka() -> None:
    manifests = alone("--set", "roles.manager.enabled=false,gateway.keysSecret=mine,gateway.keysKey=file")
    assert "manager" not in chart.workloads(manifests) and chart.of_kind(manifests, "Secret") == []
    assert "steps" not in chart.named(manifests, "ConfigMap", "demo-tentalis-trainer")["data"]["config.yaml"]
    volumes = chart.workloads(manifests)["gateway"]["spec"]["template"]["spec"]["volumes"]
    assert [each["secret"]["items"][0]["key"] for each in volumes if "secret" in each] == ["file"]
    given = chart.named(alone("--set", "trainer.config.steps=7"), "ConfigMap", "demo-tentalis-trainer")["data"]
    assert yaml.safe_load(given["config.yaml"])["steps"] == 7
    for change in ("gateway.noKeys=true", "roles.gateway.enabled=false"):
        assert chart.of_kind(alone("--set", change), "Secret") == []


def test_the_trainer_is_anchored_and_fills_a_gpu_unless_the_values_say_otherwise() -> None:
    def configured(*changes: str) -> dict[str, Any]:
        data = chart.named(alone(*changes), "ConfigMap", "demo-tentalis-trainer")["data"]
        found: dict[str, Any] = yaml.safe_load(data["config.yaml"])
        return found

    plain = configured()
    assert plain["loss"] == {"kl": ANCHOR.model_dump(exclude_unset=True)} and "micro_batch_tokens" not in plain
    assert configured("--set", "trainer.config.loss.kl.coef=0")["loss"]["kl"]["coef"] == 0
    on_gpu = ("--set", "roles.trainer.gpu.count=1")
    assert configured(*on_gpu)["micro_batch_tokens"] == 16384
    assert configured(*on_gpu, "--set", "trainer.config.micro_batch_tokens=4096")["micro_batch_tokens"] == 4096


def test_images_are_targets_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE))
    used = set()
    for values in VALUES:
        for _, pod in pods(rendered(values)):
            for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                if "tentalis/" in each["image"]:
                    used.add(re.split("[:@]", each["image"].rpartition("/")[2])[0])
    assert used == {"core", "model", "trainer-cpu", "trainer-gpu"}
    assert used <= targets


def test_the_embedded_kafka_has_the_broker_settings_of_compose() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]["kafka"]["environment"]
    broker = chart.named(set_of("trial"), "StatefulSet", "demo-tentalis-kafka")
    ours = {each["name"]: each["value"] for each in container(broker)["env"]}
    apart = {"CLUSTER_ID", "KAFKA_HEAP_OPTS", "KAFKA_LOG_DIRS", "KAFKA_CONTROLLER_QUORUM_VOTERS"}
    apart |= {name for name in composed if "LISTENER" in name}
    assert {name: ours.get(name) for name in composed if name not in apart} == {
        name: value for name, value in composed.items() if name not in apart
    }


def asked_for(manifests: tuple[Manifest, ...]) -> str:
    """Returns the sum of what the pods of a release ask for, in words."""
    cores = memory = 0.0
    for manifest, pod in pods(manifests):
        if manifest["metadata"]["labels"]["app.kubernetes.io/component"] not in ("test", "topics"):
            requests = container({"spec": {"template": pod}})["resources"]["requests"]
            cpu = str(requests["cpu"])
            cores += float(cpu.removesuffix("m")) / (1000 if cpu.endswith("m") else 1)
            memory += float(requests["memory"][:-2]) / {"Mi": 1024, "Gi": 1}[requests["memory"][-2:]]
    return f"{cores:.2g} cores and {memory:.3g} GiB"


def test_the_page_says_what_the_embedded_kafka_and_a_trial_ask_for() -> None:
    page = (ROOT / "docs" / "operations" / "helm.md").read_text("utf-8")
    assert f"The pods ask for {asked_for(alone())} together" in page
    assert f"trial-values.yaml` asks for {asked_for(set_of('trial'))}" in page.replace("\n", " ")


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """True if a label selector selects these labels."""
    for each in selector.get("matchExpressions", ()):
        value = labels.get(each["key"])
        found = {"Exists": value is not None, "In": value in each.get("values", ())}
        if not found.get(each["operator"], value not in each.get("values", ())):
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_every_process_is_scraped_once_on_a_port_that_it_has(kind: str) -> None:
    manifests = set_of("monitoring")
    scraped: list[str] = []
    for monitor in chart.of_kind(manifests, kind):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
        selector = monitor["spec"]["selector"]
        for component, workload in chart.workloads(manifests).items():
            if kind == "PodMonitor":
                labels = workload["spec"]["template"]["metadata"]["labels"]
                ports = {port["name"] for port in container(workload)["ports"]}
            else:
                service = chart.named(manifests, "Service", workload["metadata"]["name"])
                labels = service["metadata"]["labels"]
                ports = {port["name"] for port in service["spec"]["ports"]}
            if matches(selector, labels):
                assert endpoint["port"] in ports
                scraped.append(component)
    assert sorted(scraped) == sorted(chart.workloads(manifests))


def policy(name: str, component: str) -> Manifest:
    return dict(chart.named(set_of(name), "NetworkPolicy", f"demo-tentalis-{component}")["spec"])


def reaches(spec: Manifest, component: str) -> bool:
    """True if a network policy allows connections to a component of the release."""
    peers = [peer for rule in spec["egress"] for peer in rule.get("to", ())]
    return any(peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component") == component for peer in peers)


def test_network_policies_open_what_a_role_needs_and_no_more() -> None:
    for component in chart.workloads(set_of("scram")):
        spec = policy("scram", component)
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        needs_model = component in ("hinting", "worker-chat", "gateway", "policies")
        assert reaches(spec, "model") is needs_model
        ports = [port["port"] for rule in spec["egress"] for port in rule.get("ports", ())]
        assert (9093 in ports) is (component != "model")
        assert (443 in ports) is (component in ("scoring", "hinting", "gateway", "policies", "trainer", "model"))
        assert 4318 in ports
    for component in ("topics", "test"):  # commands send no traces
        assert 4318 not in [port["port"] for rule in policy("scram", component)["egress"] for port in rule["ports"]]
    (api,) = policy("scram", "model")["ingress"]  # its metrics are on the same port
    assert api["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"
    (api, metrics) = policy("ingress", "model")["ingress"]
    assert metrics["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


def test_programs_that_play_reach_the_gateway_through_the_network_policies() -> None:
    assert reaches(policy("agent", "worker-writer"), "gateway")
    worker = chart.workloads(set_of("agent"))["worker-writer"]["spec"]["template"]["metadata"]["labels"]
    peers = [peer for rule in policy("agent", "gateway")["ingress"] for peer in rule.get("from", ())]
    assert any(matches(peer["podSelector"], worker) for peer in peers if "podSelector" in peer)
    others = {name for name in chart.workloads(set_of("agent")) if not name.startswith("worker-")}
    assert not any(reaches(policy("agent", component), "gateway") for component in others)
    assert not reaches(policy("scram", "worker-chat"), "gateway"), "no program plays there"


@pytest.mark.parametrize("change", ["storage.attachments=s3://bucket/attachments", "environmentFile.configMap=files"])
def test_a_worker_reaches_what_is_outside_for_what_it_stores_or_asks(change: str) -> None:
    """It runs what models write, so it has no way out by default."""
    way_out = "networkPolicy.externalEgress[0].ports[0].port=9000"
    manifests = manifests_of("minimal", "networkPolicy.enabled=true", way_out, change)
    rules = chart.named(manifests, "NetworkPolicy", "demo-tentalis-worker-chat")["spec"]["egress"]
    assert {"ports": [{"port": 9000}]} in rules

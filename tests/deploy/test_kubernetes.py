"""Manifests for a cluster are valid for three versions of Kubernetes, break no safety rule, and are
sent only when asked, here to a local API server."""

import copy
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from harness.kubernetes_policy import action, find, job_of, templates, violations
from harness.runs import BIN, NBS, REPO, multigpu_ft

from multigpu_ft import ConfigError, RunConfig, deploy_kubernetes
from multigpu_ft.deploy.kubernetes_pods import _USER
from multigpu_ft.deploy.kubernetes_resources import Resources

VERSIONS = ("1.35", "1.36", "1.37")
DIGEST = "registry.example/multigpu-ft@sha256:" + "0123456789abcdef" * 4
GPU = {"accelerator_count": 1, "accelerator": "nvidia-h100-80gb", "memory": "64Gi", "cpu": 8}
PLAIN = {
    "image": DIGEST,
    "replicas": 2,
    "resources": {"gpu": GPU},
    "shared_volume": {"size": "200Gi"},
    "config_map": {"NCCL_DEBUG": "INFO"},
}
EVERYTHING = {
    **PLAIN,
    "name": "opt-lora",
    "namespace": "research",
    "image_pull_secret": "registry",
    "secret": "multigpu-ft-tokens",
    "restarts": 20,
    "shared_volume": {"claim": "there-already"},
    "node_selector": {"pool": "spot"},
    "tolerations": [{"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}],
}
ON_THE_HUB = RunConfig(
    model="facebook/opt-1.3b",
    dataset="user/name",
    hf_repo="user/mine",
    tracker="wandb",
    end_idx=5000,
)
CASES = {
    "builtin": (RunConfig(end_idx=5000), PLAIN),
    "everything": (ON_THE_HUB, EVERYTHING),
    "one node of eight": (
        RunConfig(),
        {**PLAIN, "replicas": 1, "resources": {"gpu": {**GPU, "accelerator_count": 8}}},
    ),
    "no GPUs": (
        RunConfig(),
        {**PLAIN, "resources": {"gpu": {"accelerator_count": 0, "memory": "4Gi", "cpu": "500m"}}},
    ),
}


def render(case="builtin", target="job", **more):
    cfg, resources = CASES[case]
    return deploy_kubernetes(cfg, {**resources, **more}, target=target)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target", ["job", "trainjob"])
@pytest.mark.parametrize("case", CASES)
def test_manifests_match_the_schemas_of_kubernetes(case, target, version):
    "Kubernetes has no schema of Kubeflow's kinds, so the Job and the pod inside them are validated."
    import kubernetes_validate

    manifests = render(case, target).manifests
    own = [m for m in manifests if "kubeflow" not in m["apiVersion"]]
    assert len(own) == len(manifests) - (2 if target == "trainjob" else 0)
    own.append(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "carried"},
            "spec": job_of(manifests),
        }
    )
    own += [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "carried", **pod["metadata"]},
            "spec": pod["spec"],
        }
        for _, pod in templates(manifests)
    ]
    for manifest in own:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version


def test_the_schemas_notice_a_misspelt_field():
    import kubernetes_validate

    (job,) = find(render().manifests, "Job")
    job["spec"]["podFailurePolicies"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="podFailurePolicies"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("target", ["job", "trainjob"])
@pytest.mark.parametrize("case", CASES)
def test_manifests_violate_no_rule(case, target):
    assert violations(render(case, target).manifests) == []


def node(manifests):
    return job_of(manifests)["template"]["spec"]


def container(manifests):
    return node(manifests)["containers"][0]


def board(manifests):
    return find(manifests, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]


def policy(manifests, component):
    return next(
        m["spec"]
        for m in find(manifests, "NetworkPolicy")
        if m["metadata"]["name"].endswith(component)
    )


def rules(manifests):
    return job_of(manifests)["podFailurePolicy"]["rules"]


MUTANTS = {
    "privileged": (
        lambda m: container(m)["securityContext"].update(privileged=True),
        "node: is privileged",
    ),
    "may gain privileges": (
        lambda m: container(m)["securityContext"].pop("allowPrivilegeEscalation"),
        "node: may gain privileges",
    ),
    "capability kept": (
        lambda m: container(m)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        "node: keeps capabilities",
    ),
    "root": (lambda m: node(m)["securityContext"].update(runAsUser=0), "node: may run as root"),
    "root by the image's choice": (
        lambda m: node(m)["securityContext"].pop("runAsNonRoot"),
        "node: may run as root",
    ),
    "no seccomp": (
        lambda m: node(m)["securityContext"].pop("seccompProfile"),
        "node: has no seccomp profile",
    ),
    "seccomp off in the container": (
        lambda m: container(m)["securityContext"].update(seccompProfile={"type": "Unconfined"}),
        "node: has no seccomp profile",
    ),
    "writable image": (
        lambda m: board(m)["securityContext"].update(readOnlyRootFilesystem=False),
        "tensorboard: can write to its image",
    ),
    "token mounted": (
        lambda m: node(m).update(automountServiceAccountToken=True),
        "node: has a token of the API",
    ),
    "token projected": (
        lambda m: node(m)["volumes"].append(
            {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
        ),
        "node: has a token of the API",
    ),
    "default account": (
        lambda m: node(m).update(serviceAccountName="default"),
        "node: runs as the default account",
    ),
    "tag": (
        lambda m: container(m).update(image="registry.example/multigpu-ft:latest"),
        "node: image is not named by its digest",
    ),
    "tag of TensorBoard": (
        lambda m: board(m).update(image="tensorflow/tensorflow:2.17"),
        "tensorboard: image is not named by its digest",
    ),
    "no limits": (lambda m: container(m)["resources"].pop("limits"), "node: has no limits"),
    "burstable": (
        lambda m: container(m)["resources"].update(requests={"cpu": "1", "memory": "1Gi"}),
        "node: requests are not its limits",
    ),
    "host path": (
        lambda m: node(m)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
        "node: mounts a folder of its node",
    ),
    "host network": (
        lambda m: node(m).update(hostNetwork=True),
        "node: shares something with its node",
    ),
    "small shared memory": (
        lambda m: container(m)["volumeMounts"].remove({"name": "shm", "mountPath": "/dev/shm"}),
        "node: has the 64 MB of /dev/shm",
    ),
    "30 seconds": (
        lambda m: node(m).pop("terminationGracePeriodSeconds"),
        "node: is killed before its checkpoint is saved",
    ),
    "token in a ConfigMap": (
        lambda m: find(m, "ConfigMap")[1]["data"].update(HF_TOKEN="x"),
        "a token in ConfigMap",
    ),
    "token's value in cfg.json": (
        lambda m: find(m, "ConfigMap")[0]["data"].update({"cfg.json": "hf_" + "a" * 34}),
        "a token in ConfigMap",
    ),
    "token in the environment": (
        lambda m: container(m).update(
            env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "t", "key": "HF_TOKEN"}}}]
        ),
        "node: a token in its environment",
    ),
    "Secret rendered": (
        lambda m: m.append({"kind": "Secret", "metadata": {"name": "s"}, "data": {}}),
        "a Secret with what is in it was rendered",
    ),
    "configuration can change": (
        lambda m: find(m, "ConfigMap")[0].pop("immutable"),
        "can change under the run",
    ),
    "network open": (
        lambda m: policy(m, "node").update(ingress=[{}]),
        "node: heard from outside the namespace",
    ),
    "network open to the namespace": (
        lambda m: policy(m, "node").update(ingress=[{"from": [{"podSelector": {}}]}]),
        "heard by other pods than its peers",
    ),
    "egress open": (lambda m: policy(m, "node")["egress"].append({}), "node: may speak to anybody"),
    "metadata open": (
        lambda m: policy(m, "node")["egress"].append(
            {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443}]}
        ),
        "node: may ask the cloud's metadata",
    ),
    "no policy": (lambda m: m.remove(find(m, "NetworkPolicy")[0]), "node: no policy for Ingress"),
    "no DNS": (lambda m: policy(m, "node")["egress"].pop(1), "node: cannot look up its peers"),
    "every port of TensorBoard": (
        lambda m: policy(m, "tensorboard")["ingress"][0].pop("ports"),
        "tensorboard: more than its port is open",
    ),
    "load balancer": (
        lambda m: find(m, "Service")[-1]["spec"].update(type="LoadBalancer"),
        "is open to the outside",
    ),
    "TensorBoard writes": (
        lambda m: board(m)["volumeMounts"][0].pop("readOnly"),
        "TensorBoard can write to the shared volume",
    ),
    "evictions count": (lambda m: rules(m).pop(2), "an eviction counts as a failure"),
    "interruptions count": (
        lambda m: rules(m).pop(1),
        "a run that was interrupted counts as a failure",
    ),
    "bad settings are tried again": (lambda m: rules(m).pop(0), "bad settings are tried again"),
    "failures are ignored": (
        lambda m: rules(m)[1]["onExitCodes"].update(operator="NotIn", values=[78]),
        "a failure does not count",
    ),
    "restarted in place": (
        lambda m: node(m).update(restartPolicy="OnFailure"),
        "a failed container starts again",
    ),
    "replaced too early": (
        lambda m: job_of(m).pop("podReplacementPolicy"),
        "a pod is replaced before it is gone",
    ),
    "one attempt": (
        lambda m: job_of(m).update(backoffLimit=1),
        "one failure of all nodes is the end of the job",
    ),
    "read by one node": (
        lambda m: find(m, "PersistentVolumeClaim")[0]["spec"].update(accessModes=["ReadWriteOnce"]),
        "which one node can mount",
    ),
    "names after readiness": (
        lambda m: find(m, "Service")[0]["spec"].update(publishNotReadyAddresses=False),
        "nodes that start cannot find each other",
    ),
    "no headless Service": (
        lambda m: find(m, "Service")[0]["spec"].pop("clusterIP"),
        "nodes have no names",
    ),
    "secrets readable": (
        lambda m: find(m, "Role")[0]["rules"].append(
            {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
        ),
        "may read secrets",
    ),
    "pods with rights": (
        lambda m: find(m, "RoleBinding")[0]["subjects"].append({"name": "multigpu-ft"}),
        "the pods' account is bound to a role",
    ),
    "namespace without rules": (
        lambda m: find(m, "Namespace")[0]["metadata"].update(labels={}),
        "does not enforce the restricted standard",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_worsened_manifest_is_caught(mutant):
    manifests = copy.deepcopy(render().manifests)
    change, said = MUTANTS[mutant]
    if "metadata" in mutant:
        manifests = copy.deepcopy(
            deploy_kubernetes(RunConfig(dataset="user/name"), PLAIN).manifests
        )
    change(manifests)
    assert any(said in violation for violation in violations(manifests)), violations(manifests)


@pytest.mark.parametrize("target", ["job", "trainjob"])
def test_what_the_job_does_when_a_pod_ends(target):
    job = job_of(render(target=target).manifests)
    ends = {
        (75, False): "Ignore",
        (75, True): "Ignore",
        (137, True): "Ignore",
        (1, True): "Ignore",
        (78, False): "FailJob",
        (78, True): "FailJob",
        (1, False): "Count",
        (137, False): "Count",
    }
    assert {end: action(job, *end) for end in ends} == ends
    assert job["backoffLimit"] == 12 and job["successPolicy"] == {
        "rules": [{"succeededIndexes": "0"}]
    }


def test_the_command_of_each_node():
    job = " ".join(container(render(name="a").manifests)["command"])
    assert job == (
        "multigpu-ft train --config /config/cfg.json --nnodes 2 --node-rank "
        "$(JOB_COMPLETION_INDEX) --rdzv a-0.a:29400 --as-job"
    )
    trainjob = " ".join(container(render(name="a", target="trainjob").manifests)["command"])
    assert trainjob.endswith(
        "--nnodes $(PET_NNODES) --node-rank $(PET_NODE_RANK) --rdzv $(PET_MASTER_ADDR):$(PET_MASTER_PORT) --as-job"
    )


def test_train_job_and_its_runtime():
    manifests = render("everything", "trainjob").manifests
    (runtime,), (job,) = find(manifests, "TrainingRuntime"), find(manifests, "TrainJob")
    assert job["spec"] == {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": "opt-lora",
        },
        "trainer": {"numNodes": 2},
    }
    assert (
        job["metadata"]["namespace"] == runtime["metadata"]["namespace"] == "research"
        and runtime["metadata"]["name"] == "opt-lora"
    )
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {"numProcPerNode": 1}}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == container(manifests)["name"] == "node", (
        "Kubeflow sets the variables of the container with this name"
    )
    assert replicated["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert "subdomain" not in node(manifests) and len(find(manifests, "Service")) == 1, (
        "the JobSet makes the Service of the nodes"
    )
    plain = render("everything").manifests
    same = copy.deepcopy(node(manifests))
    same["containers"][0]["command"], same["subdomain"] = container(plain)["command"], "opt-lora"
    assert same == node(plain), "the pod of the TrainJob differs"


def test_the_configuration_of_the_run():
    manifests = render("everything").manifests
    (configuration, environment) = (m["data"] for m in find(manifests, "ConfigMap"))
    cfg = RunConfig(**json.loads(configuration["cfg.json"]))
    assert (cfg.run_root, cfg.run_name, cfg.nproc, cfg.trackers) == (
        "/shared/runs",
        "opt-lora",
        1,
        ("wandb", "tensorboard"),
    )
    assert getattr(cfg, "nnodes", 2) == 2 and cfg.model == ON_THE_HUB.model
    assert (
        environment["MULTIGPU_FT_SECRETS_DIR"] == "/var/run/secrets/multigpu-ft"
        and environment["NCCL_DEBUG"] == "INFO"
    )
    (secrets,) = (v["projected"] for v in node(manifests)["volumes"] if "projected" in v)
    names = [source["secret"]["name"] for source in secrets["sources"]]
    assert names == ["multigpu-ft-tokens", "multigpu-ft-run-secret"]
    assert secrets["defaultMode"] == 0o440
    assert find(manifests, "PersistentVolumeClaim") == [] and node(manifests)["volumes"][0][
        "persistentVolumeClaim"
    ] == {"claimName": "there-already"}
    assert node(manifests)["nodeSelector"] == {"pool": "spot"} and [
        t["key"] for t in node(manifests)["tolerations"]
    ] == ["nvidia.com/gpu", "spot"]


def test_only_runs_that_need_the_internet_may_reach_it():
    def ports(manifests):
        return [
            p["port"] for rule in policy(manifests, "node")["egress"] for p in rule.get("ports", [])
        ]

    assert ports(render().manifests) == [53, 53] and ports(render("everything").manifests) == [
        53,
        53,
        443,
    ]
    assert find(render().manifests, "ConfigMap")[1]["data"]["HF_HUB_OFFLINE"] == "1"


def test_each_slice_has_its_own_name_and_directory():
    names = [deploy_kubernetes(RunConfig(start_idx=start), PLAIN).name for start in (0, 5000)]
    assert names == ["opt-tiny-0-5000", "opt-tiny-5000-10000"]
    assert (
        len(deploy_kubernetes(RunConfig(run_name="A_" + "very-" * 20 + "long.name"), PLAIN).name)
        <= 40
    )


def test_a_deepspeed_file_is_included(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage3_max_live_parameters": 3e8}}')
    manifests = deploy_kubernetes(
        RunConfig(strategy="zero3", deepspeed_config=str(tmp_path / "ds.json")), PLAIN
    ).manifests
    assert (
        "stage3_max_live_parameters"
        in json.loads(find(manifests, "ConfigMap")[0]["data"]["cfg.json"])["deepspeed_config"]
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"image": "multigpu-ft:latest"}, "docker push"),
        ({"image": "multigpu-ft@sha256:0123"}, "by its digest"),
        ({"repilcas": 3}, "did you mean 'replicas'?"),
        ({"resources": {"gpu": {**GPU, "acelerator": "x"}}}, "did you mean 'accelerator'?"),
        ({"resources": {"gpu": {**GPU, "memory": 64}}}, "such as 64Gi"),
        ({"resources": {"gpu": {**GPU, "memory": "64m"}}}, "such as 64Gi"),
        ({"resources": {"gpu": {**GPU, "memory": "64Mi"}}}, "less than 1Gi"),
        ({"resources": {"gpu": {**GPU, "cpu": 0}}}, "not a number of processors"),
        ({"resources": {"gpu": {**GPU, "cpu": "eight"}}}, "not a number of processors"),
        ({"resources": {"gpu": {**GPU, "accelerator_count": -1}}}, "accelerator_count=-1"),
        ({"resources": {}}, "resources.gpu is missing"),
        ({"name": "Opt_Lora"}, "lower-case"),
        ({"name": "a" * 41}, "40 characters"),
        ({"namespace": "kube-system"}, "name one of your own"),
        ({"replicas": 0}, "replicas=0"),
        ({"shared_volume": {"size": "2Gi", "claim": "x"}}, "leave size"),
        ({"shared_volume": {"storage_class": "nfs"}}, "size: 200Gi"),
        ({"config_map": {"A-B": "x"}}, "letters, digits"),
        ({"config_map": {"DEBUG": True}}, "in quotes"),
        ({"config_map": {"HF_TOKEN": "x"}}, "--from-file=HF_TOKEN=FILE"),
        ({"config_map": {"MYTOKEN": "x"}}, "kubectl create secret"),
        ({"config_map": {"DB_PASSWORD": "x"}}, "config_map.DB_PASSWORD"),
        (
            {"config_map": {"WANDB_API_KEY": "x"}, "namespace": "mine"},
            "--namespace mine --from-file=WANDB",
        ),
    ],
)
def test_invalid_resources_are_refused(changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Resources(**{**PLAIN, **changes})


def test_a_token_is_not_echoed(monkeypatch, tmp_path):
    token = "hf_" + "a" * 34
    for changes in (
        {"config_map": {"NOTE": token}},
        {"secret": token},
        {"image": token},
        {"tolerations": [{"key": token}]},
    ):
        with pytest.raises(ConfigError, match="looks like a token") as error:
            Resources(**{**PLAIN, **changes})
        assert token not in str(error.value)
    monkeypatch.setenv("WANDB_API_KEY", "of-a-user-with-a-key")
    with pytest.raises(ConfigError, match="config_map.NOTE") as error:
        Resources(**{**PLAIN, "config_map": {"NOTE": "of-a-user-with-a-key"}})
    assert "of-a-user" not in str(error.value)
    (tmp_path / "r.yaml").write_text(f"config_map: {{NOTE: {token}, : [}}\n")
    with pytest.raises(ConfigError, match="YAML, line 1") as error:
        Resources.read(tmp_path / "r.yaml")
    assert token not in str(error.value)


@pytest.mark.parametrize(
    "cfg, said",
    [
        (RunConfig(dataset="x.jsonl"), "/shared/data/x.jsonl"),
        (RunConfig(model="../opt"), "no pod sees"),
        (RunConfig(model="small.gguf"), "/shared/data/small.gguf"),
        (RunConfig(resume_file="/home/me/a.pt"), "resume_file"),
        (RunConfig(hf_repo="user/name"), "--from-file=HF_TOKEN=FILE"),
        (RunConfig(tracker="wandb"), "--from-file=WANDB_API_KEY=FILE"),
    ],
)
def test_configurations_that_cannot_work_are_refused(cfg, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        deploy_kubernetes(cfg, PLAIN)


def test_the_files_hold_the_manifests(tmp_path):
    first = deploy_kubernetes(*CASES["everything"], out=tmp_path / "k8s")
    assert [
        yaml.safe_load(path.read_text()) for path in sorted((tmp_path / "k8s").iterdir())
    ] == first.manifests
    assert not any(re.search(r"[&*]id\d", path.read_text()) for path in first.files), (
        "a file has YAML references"
    )
    assert (
        "opt-lora" in repr(first)
        and "not sent" in repr(first)
        and "<table" in first._repr_html_()
        and "$(JOB_COMPLETION_INDEX)" in first._repr_html_()
    )
    (tmp_path / "k8s" / "20-mine.yaml").write_text("kind: ConfigMap\n")
    second = deploy_kubernetes(*CASES["builtin"], out=tmp_path / "k8s", target="trainjob")
    assert {path.name for path in (tmp_path / "k8s").iterdir()} == {
        *(path.name for path in second.files),
        "20-mine.yaml",
    }


class Api:
    "An API server that lists kinds, and stores and returns objects. Nothing acts on them."

    KINDS = {
        "v1": {
            kind: f"{kind.lower()}s"
            for kind in (
                "Namespace",
                "PersistentVolumeClaim",
                "ServiceAccount",
                "ConfigMap",
                "Service",
                "Secret",
            )
        },
        "batch/v1": {"Job": "jobs"},
        "apps/v1": {"Deployment": "deployments"},
        "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
        "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
        "trainer.kubeflow.org/v1alpha1": {
            "TrainingRuntime": "trainingruntimes",
            "TrainJob": "trainjobs",
        },
    }

    def __init__(self):
        self.objects, self.sent, self.minor, self.kinds, self.refused, self.lost = (
            {},
            [],
            "36+",
            dict(self.KINDS),
            {},
            None,
        )
        api = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, value, code=200):
                body = json.dumps(
                    value if code < 300 else {"kind": "Status", "message": value, "code": code}
                ).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                path = self.path.partition("?")[0].rstrip("/")
                if path == "/version":
                    names = (
                        "gitVersion",
                        "gitCommit",
                        "gitTreeState",
                        "buildDate",
                        "goVersion",
                        "compiler",
                        "platform",
                    )
                    return self.answer(
                        {"major": "1", "minor": api.minor, **dict.fromkeys(names, "x")}
                    )
                if path == "/apis":
                    groups = [version.split("/") for version in api.kinds if "/" in version]
                    one = [
                        {
                            "name": g,
                            "versions": [v := {"groupVersion": f"{g}/{n}", "version": n}],
                            "preferredVersion": v,
                        }
                        for g, n in groups
                    ]
                    return self.answer({"kind": "APIGroupList", "groups": one})
                version = path.removeprefix("/apis/").removeprefix("/api/")
                if version in api.kinds:
                    about = {"singularName": "", "verbs": ["get", "patch"]}
                    found = [
                        {"name": n, "kind": k, "namespaced": k != "Namespace", **about}
                        for k, n in api.kinds[version].items()
                    ]
                    return self.answer(
                        {"kind": "APIResourceList", "groupVersion": version, "resources": found}
                    )
                return (
                    self.answer(api.objects[path])
                    if path in api.objects
                    else self.answer(f"{path} not found", 404)
                )

            def do_PATCH(self):
                path, _, query = self.path.partition("?")
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if reason := api.refused.get(body["kind"]):
                    return self.answer(*reason)
                if body["kind"] == api.lost:
                    self.close_connection = True  # without an answer
                    return None
                api.sent.append((path, query, self.headers["Content-Type"], body))
                api.objects[path] = body
                self.answer(body)

            def do_DELETE(self):
                api.sent.append(
                    (self.path, "", "DELETE", api.objects.pop(self.path.partition("?")[0]))
                )
                self.answer({"kind": "Status", "status": "Success"})

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def kubeconfig(folder, url):
    file = folder / "kubeconfig"
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [context],
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    return str(file)


@pytest.fixture
def api(tmp_path, monkeypatch):
    found = Api()
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, found.url))
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_nothing_is_sent_unless_asked(api, tmp_path):
    deployed = deploy_kubernetes(*CASES["builtin"], out=tmp_path / "k8s")
    assert api.sent == [] and deployed.cluster is None and "not sent" in repr(deployed)


@pytest.mark.parametrize("target", ["job", "trainjob"])
def test_the_rendered_manifests_are_sent(api, target):
    deployed = deploy_kubernetes(*CASES["everything"], target=target, submit=True)
    bodies = [body for *_, body in api.sent]
    (secret,) = find(bodies, "Secret")
    bodies.remove(secret)
    assert (
        bodies == deployed.manifests
        and deployed.cluster == api.url
        and f"sent to {api.url}" in repr(deployed)
    )
    for path, query, kind, body in api.sent:
        assert kind == "application/apply-patch+yaml" and set(query.lower().split("&")) == {
            "fieldmanager=multigpu-ft",
            "force=true",
        }
        assert path.endswith(body["metadata"]["name"]) and (
            "/namespaces/research/" in path or body["kind"] == "Namespace"
        )


def test_a_namespace_gets_one_run_secret(api, tmp_path):
    "Several nodes know each other by it; it is sent, and neither written nor shown."
    for name in ("one", "two"):
        deployed = deploy_kubernetes(RunConfig(run_name=name), PLAIN, out=tmp_path, submit=True)
        shown = [repr(deployed), deployed._repr_html_(), json.dumps(deployed.record())]
        shown += [path.read_text() for path in tmp_path.glob("*.yaml")]
        (secret,) = find([body for *_, body in api.sent], "Secret")
        assert secret["metadata"]["name"] == "multigpu-ft-run-secret" and secret["immutable"]
        assert len(secret["stringData"]["RUN_SECRET"]) == 64
        assert secret["stringData"]["RUN_SECRET"] not in "".join(shown)
    assert not [path for path, _, kind, _ in api.sent if kind == "DELETE" and "secret" in path]
    for cfg, resources in (
        (RunConfig(trusted_network=True), PLAIN),
        (RunConfig(), {**PLAIN, "replicas": 1}),
    ):
        deployed = deploy_kubernetes(cfg, resources)
        assert deployed.run_secret is None and "run-secret" not in json.dumps(deployed.manifests)


def test_the_command_shown_makes_the_run_secret(tmp_path):
    deployed = deploy_kubernetes(*CASES["builtin"], out=tmp_path / "k8s")
    (command,) = re.findall("openssl .*", repr(deployed))
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/said; cat > {tmp_path}/value\n'
    )
    kubectl.chmod(0o755)
    env = {"PATH": f"{kubectl.parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", command], env=env, check=True, timeout=60)
    assert (tmp_path / "said").read_text().split()[:4] == [
        "create",
        "secret",
        "generic",
        deployed.run_secret,
    ]
    assert len((tmp_path / "value").read_text().strip()) == 64, "and it is in no argument"


def test_an_existing_job_is_left_alone(api):
    deploy_kubernetes(*CASES["builtin"], submit=True)
    count = len(api.sent)
    with pytest.raises(
        ConfigError, match="kubectl delete job opt-tiny-0-5000 --namespace multigpu-ft"
    ):
        deploy_kubernetes(*CASES["builtin"], submit=True)
    assert len(api.sent) == count, "a part of it was sent"
    del api.objects["/apis/batch/v1/namespaces/multigpu-ft/jobs/opt-tiny-0-5000"]
    deploy_kubernetes(RunConfig(end_idx=5000, learning_rate=1e-4), PLAIN, submit=True)
    anew = [path.split("/")[-1] for path, _, kind, _ in api.sent if kind == "DELETE"]
    assert anew == ["opt-tiny-0-5000", "opt-tiny-0-5000-env"], "what is immutable"
    assert (
        '"learning_rate": 0.0001'
        in api.objects["/api/v1/namespaces/multigpu-ft/configmaps/opt-tiny-0-5000"]["data"][
            "cfg.json"
        ]
    )


def test_a_refusal_of_the_cluster_is_reported(api):
    api.refused = {"NetworkPolicy": ("networkpolicies is forbidden: User u cannot patch", 403)}
    with pytest.raises(
        ConfigError,
        match=(
            "refuses NetworkPolicy opt-tiny-0-5000-node: networkpolicies is forbidden: "
            "User u cannot patch. Sent before: Name"
        ),
    ):
        deploy_kubernetes(*CASES["builtin"], submit=True)
    api.refused, api.lost = {}, "NetworkPolicy"
    with pytest.raises(
        ConfigError,
        match="did not answer to NetworkPolicy opt-tiny-0-5000-node: .* Sent before: Name",
    ):
        deploy_kubernetes(*CASES["builtin"], submit=True)
    api.refused, api.lost = {"Namespace": ("namespaces is forbidden", 403)}, None
    deployed = deploy_kubernetes(*CASES["builtin"], submit=True)
    assert deployed.remarks == [
        "namespace multigpu-ft was left as it is: namespaces is forbidden"
    ] and "! namespace" in repr(deployed)
    api.minor = "30"
    with pytest.raises(ConfigError, match="is Kubernetes 1.30; .* needs 1.31"):
        deploy_kubernetes(*CASES["builtin"], submit=True)


def test_a_cluster_without_kubeflow(api):
    del api.kinds["trainer.kubeflow.org/v1alpha1"]
    with pytest.raises(ConfigError, match="knows no TrainJob .* use target='job'"):
        deploy_kubernetes(*CASES["builtin"], target="trainjob", submit=True)
    assert api.sent == []


def test_no_cluster_and_no_client(tmp_path, monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv(
            "KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{held.getsockname()[1]}")
        )
        with pytest.raises(ConfigError, match="cannot be reached"):
            deploy_kubernetes(*CASES["builtin"], submit=True)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="there is no kubeconfig"):
        deploy_kubernetes(*CASES["builtin"], submit=True)
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    monkeypatch.setitem(__import__("sys").modules, "kubernetes.client", None)
    with pytest.raises(ConfigError, match=r"multigpu_ft\[kubernetes\]"):
        deploy_kubernetes(*CASES["builtin"], submit=True)
    assert deploy_kubernetes(*CASES["builtin"]).manifests, "rendering needs no client"


def test_the_command_deploy(api, tmp_path):
    (tmp_path / "cfg.json").write_text(json.dumps({"end_idx": 5000}))
    (tmp_path / "resources.yaml").write_text(yaml.safe_dump(PLAIN))
    words = ("deploy", "kubernetes", "--config", "cfg.json", "--resources", "resources.yaml")
    done = multigpu_ft(*words, "--out", "k8s", "--target", "trainjob", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (
        said["cluster"] is None
        and len(said["files"]) == len(said["objects"]) == len(list((tmp_path / "k8s").iterdir()))
        and api.sent == []
    )
    done = multigpu_ft(*words, "--submit", cwd=tmp_path, KUBECONFIG=os.environ["KUBECONFIG"])
    assert done.returncode == 0 and f"sent to {api.url}" in done.stdout and len(api.sent) == 15, (
        done.stderr
    )
    (tmp_path / "cfg.json").write_text('{"strat_idx": 0}')
    done = multigpu_ft(*words, cwd=tmp_path)
    assert (
        done.returncode != 0
        and "did you mean 'start_idx'?" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert (
        "unknown deploy target 'mars'; use one of: kubernetes"
        in multigpu_ft("deploy", "mars", cwd=tmp_path).stderr
    )


def test_the_example():
    deployed = deploy_kubernetes(
        RunConfig(**json.loads((NBS / "examples/cfg.json").read_text())),
        NBS / "examples/resources.yaml",
    )
    assert violations(deployed.manifests) == []


DOCKERFILE = (REPO / "Dockerfile").read_text().replace("\\\n", " ")
LINES = [
    line.split(maxsplit=1)
    for line in DOCKERFILE.splitlines()
    if line.strip() and not line.startswith("#")
]


def test_the_image():
    stages = [rest for word, rest in LINES if word == "FROM"]
    bases = dict(rest.split("=", 1) for word, rest in LINES if word == "ARG" and "=" in rest)
    assert len(stages) >= 2 and all(stage.startswith("${BASE}") for stage in stages)
    assert re.search(r":\d+\.\d+\.\d+-|@sha256:", bases["BASE"]), "an exact version"
    last = max(i for i, (word, _) in enumerate(LINES) if word == "FROM")
    users = [rest for word, rest in LINES[last:] if word == "USER"]
    assert users[-1] == f"{_USER}:{_USER}", (
        "the user must be a number: a cluster cannot know that a name is not root"
    )
    assert not [
        rest
        for word, rest in LINES
        if word in ("ARG", "ENV") and re.search("TOKEN|SECRET|PASSW|KEY", rest)
    ]
    assert not [rest for word, rest in LINES if word == "ADD"] and "constraints.txt" in DOCKERFILE
    copied = [rest for word, rest in LINES[last:] if word == "COPY"]
    assert all("--from=" in rest for rest in copied), (
        "the image must hold only what was installed, no sources"
    )
    ignored = (REPO / ".dockerignore").read_text().split()
    assert ignored[0] == "*", "the build must get only the named files"


def test_hadolint():
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=BIN)
    assert linter, "pip install -e '.[dev]'"
    done = subprocess.run([linter, REPO / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

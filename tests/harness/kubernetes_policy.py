"""The rules for everything rendered for a cluster. Each violation is one sentence."""

import re

SECRET = re.compile(r"token(?!iz)|secret|passw|api_?key|credential", re.I)
SECRET_VALUE = re.compile(r"hf_\w{16,}|sk-\w{16,}")


def find(manifests, kind):
    return [m for m in manifests if m["kind"] == kind]


def job_of(manifests):
    "Return the spec of the Job, or of the one in a TrainingRuntime."
    for manifest in manifests:
        if manifest["kind"] == "Job":
            return manifest["spec"]
        if manifest["kind"] == "TrainingRuntime":
            return manifest["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def templates(manifests):
    "Return the name and template of each pod."
    return [
        ("node", job_of(manifests)["template"]),
        *((m["metadata"]["name"], m["spec"]["template"]) for m in find(manifests, "Deployment")),
    ]


def violations(manifests):
    "Return a sentence for each violation of safety or reliability."
    found = []
    for name, template in templates(manifests):
        found += [f"{name}: {said}" for said in _pod(template, manifests)]
    found += (
        _job(job_of(manifests), manifests)
        + _network(manifests)
        + _accounts(manifests)
        + _secrets(manifests)
    )
    for claim in find(manifests, "PersistentVolumeClaim"):
        if claim["spec"]["accessModes"] != ["ReadWriteMany"]:
            found.append(
                f"the shared volume is {claim['spec']['accessModes']}, which one node can mount"
            )
    for space in find(manifests, "Namespace"):
        if space["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
            found.append("the namespace does not enforce the restricted standard")
    if kinds := {m["kind"] for m in manifests} & {
        "ClusterRole",
        "ClusterRoleBinding",
        "PersistentVolume",
        "Pod",
    }:
        found.append(f"{kinds} reach beyond the namespace, or are not replaced")
    return found


def _pod(template, manifests):
    spec, (container,) = template["spec"], template["spec"]["containers"]
    whole, own = spec.get("securityContext", {}), container.get("securityContext", {})
    checks = {
        "image is not named by its digest": re.fullmatch(
            r"[^@]+@sha256:[0-9a-f]{64}", container["image"]
        ),
        "may run as root": whole.get("runAsNonRoot") is True
        and whole.get("runAsUser")
        and own.get("runAsNonRoot") is True
        and own.get("runAsUser") != 0,
        "has no group for the shared volume": whole.get("fsGroup"),
        "has no seccomp profile": whole.get("seccompProfile") == {"type": "RuntimeDefault"}
        and "seccompProfile" not in own,
        "is privileged": not own.get("privileged"),
        "may gain privileges": own.get("allowPrivilegeEscalation") is False,
        "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "can write to its image": own.get("readOnlyRootFilesystem") is True,
        "has a token of the API": spec.get("automountServiceAccountToken") is False
        and all({*s} == {"secret"} for v in spec["volumes"] for s in _projected(v)),
        "runs as the default account": spec.get("serviceAccountName")
        in [m["metadata"]["name"] for m in find(manifests, "ServiceAccount")],
        "shares something with its node": not any(
            spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")
        ),
        "mounts a folder of its node": not any("hostPath" in volume for volume in spec["volumes"]),
        "has no limits": all(
            {"cpu", "memory"} <= set(container.get("resources", {}).get(kind, {}))
            for kind in ("requests", "limits")
        ),
        "mounts what is no volume of it": {m["name"] for m in container["volumeMounts"]}
        <= {v["name"] for v in spec["volumes"]},
        "has more than one container": "initContainers" not in spec
        and "ephemeralContainers" not in spec,
        "nothing limits its scratch folders": all(
            "sizeLimit" in v["emptyDir"] for v in spec["volumes"] if "emptyDir" in v
        ),
        "can change secrets or configuration": all(
            m.get("readOnly")
            for m in container["volumeMounts"]
            if m["name"] in ("secrets", "config")
        ),
    }
    maps = {m["metadata"]["name"] for m in find(manifests, "ConfigMap")}
    used = [v["configMap"] for v in spec["volumes"] if "configMap" in v] + [
        e["configMapRef"] for e in container.get("envFrom", []) if "configMapRef" in e
    ]
    checks["names a ConfigMap that there is not"] = maps.issuperset(
        reference["name"] for reference in used
    )
    if container["command"][0] == "tensorboard":
        checks["TensorBoard can write to the shared volume"] = all(
            m.get("readOnly") for m in container["volumeMounts"] if m["name"] == "shared"
        )
    else:
        shm, amounts = (
            {v["name"]: v.get("emptyDir", {}) for v in spec["volumes"]}.get("shm", {}),
            container.get("resources", {}),
        )
        mounted = {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        checks["has the 64 MB of /dev/shm that a container gets"] = (
            shm.get("medium") == "Memory" and mounted
        )
        checks["is killed before its checkpoint is saved"] = (
            spec.get("terminationGracePeriodSeconds", 30) >= 330
        )
        checks["requests are not its limits"] = amounts.get("requests") == amounts.get("limits")
    return [said for said, holds in checks.items() if not holds]


def action(job, exit_code, disrupted=False):
    "Return what the Job does when a pod ends: Kubernetes takes the first rule that matches, or else counts it."
    for rule in job.get("podFailurePolicy", {}).get("rules", []):
        codes = rule.get("onExitCodes")
        if codes and exit_code and (exit_code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
        if disrupted and any(
            c["type"] == "DisruptionTarget" and c["status"] == "True"
            for c in rule.get("onPodConditions", [])
        ):
            return rule["action"]
    return "Count"


def _job(job, manifests):
    spec = job["template"]["spec"]
    checks = {
        "pods have no index": job.get("completionMode") == "Indexed"
        and job["completions"] == job["parallelism"],
        "a failed container starts again beside its peers' old ones": spec.get("restartPolicy")
        == "Never",
        "a pod is replaced before it is gone": job.get("podReplacementPolicy") == "Failed",
        "an eviction counts as a failure": action(job, 137, disrupted=True) == "Ignore",
        "a run that was interrupted counts as a failure": action(job, 75) == "Ignore",
        "bad settings are tried again": action(job, 78) == "FailJob",
        "a failure does not count": action(job, 1) == "Count",
        "one failure of all nodes is the end of the job": job.get("backoffLimit", 6)
        >= 2 * job["completions"],
        "the job waits for nodes that node 0 has left": job.get("successPolicy")
        == {"rules": [{"succeededIndexes": "0"}]},
    }
    words = spec["containers"][0]["command"]
    host = words[words.index("--rdzv") + 1].partition(":")[0]
    if "PET" not in host:
        labels = job["template"]["metadata"]["labels"]
        heads = [
            s
            for s in find(manifests, "Service")
            if s["metadata"]["name"] == spec.get("subdomain")
            and s["spec"].get("clusterIP") == "None"
        ]
        selected = heads and all(labels.items() >= s["spec"]["selector"].items() for s in heads)
        checks["nodes have no names"] = selected and host.endswith(f"-0.{spec['subdomain']}")
        checks["nodes that start cannot find each other"] = all(
            s["spec"].get("publishNotReadyAddresses") for s in heads
        )
    return [said for said, holds in checks.items() if not holds]


def _network(manifests):
    found, policies = [], find(manifests, "NetworkPolicy")
    for name, template in templates(manifests):
        labels = template["metadata"]["labels"]
        mine = [
            p["spec"]
            for p in policies
            if labels.items() >= p["spec"]["podSelector"].get("matchLabels", {}).items()
        ]
        for kind in ("Ingress", "Egress"):
            if not any(kind in p["policyTypes"] for p in mine):
                found.append(f"{name}: no policy for {kind}")
        for rule in [rule for p in mine for rule in p.get("ingress", [])]:
            if not rule.get("from") or any(
                "ipBlock" in peer or "namespaceSelector" in peer for peer in rule["from"]
            ):
                found.append(f"{name}: heard from outside the namespace")
            if name != "node" and [p["port"] for p in rule.get("ports", [])] != [6006]:
                found.append(f"{name}: more than its port is open")
            if name == "node" and any(not peer.get("podSelector") for peer in rule.get("from", [])):
                found.append("node: heard by other pods than its peers")
        rules = [rule for p in mine for rule in p.get("egress", [])]
        for rule in rules:
            blocks = [peer["ipBlock"] for peer in rule.get("to", []) if "ipBlock" in peer]
            wide = [b for b in blocks if b["cidr"] in ("0.0.0.0/0", "::/0")]
            ports = {p["port"] for p in rule.get("ports", [])}
            if not rule.get("to") or (wide and ports != {443}) or (blocks and not ports):
                found.append(f"{name}: may speak to anybody")
            if any(
                "169.254.0.0/16" not in b.get("except", [])
                for b in wide
                if b["cidr"] == "0.0.0.0/0"
            ):
                found.append(f"{name}: may ask the cloud's metadata for its node's credentials")
        if name == "node" and not any(
            {p["port"] for p in rule.get("ports", [])} == {53} for rule in rules
        ):
            found.append("node: cannot look up its peers")
    for service in find(manifests, "Service"):
        if service["spec"].get("type", "ClusterIP") != "ClusterIP" or service["spec"].get(
            "externalIPs"
        ):
            found.append(f"service {service['metadata']['name']} is open to the outside")
    return found


def _accounts(manifests):
    found = []
    pods = {template["spec"].get("serviceAccountName") for _, template in templates(manifests)}
    for binding in find(manifests, "RoleBinding"):
        if pods & {s["name"] for s in binding["subjects"]}:
            found.append("the pods' account is bound to a role")
    for role in find(manifests, "Role"):
        for rule in role["rules"]:
            writes = set(rule["verbs"]) - {"get", "list", "watch"}
            if (
                "*" in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
                or "secrets" in rule["resources"]
                or "pods/exec" in rule["resources"]
            ):
                found.append("a role may read secrets, or do anything")
            elif writes and rule["resources"] != ["pods/portforward"]:
                found.append(f"a role may {writes} {rule['resources']}")
    for account in find(manifests, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            found.append(f"account {account['metadata']['name']} gives its token to any pod")
    return found


def _projected(volume):
    return volume.get("projected", {}).get("sources", [])


def _secrets(manifests):
    found = ["a Secret with what is in it was rendered"] if find(manifests, "Secret") else []
    for manifest in find(manifests, "ConfigMap"):
        for name, value in manifest["data"].items():
            if (SECRET.search(name) and name != "MULTIGPU_FT_SECRETS_DIR") or SECRET_VALUE.search(
                value
            ):
                found.append(f"a token in ConfigMap {manifest['metadata']['name']}")
        if not manifest.get("immutable"):
            found.append(f"ConfigMap {manifest['metadata']['name']} can change under the run")
    for name, template in templates(manifests):
        (container,) = template["spec"]["containers"]
        named = [
            e
            for e in container.get("env", [])
            if SECRET.search(e["name"]) or "secretKeyRef" in e.get("valueFrom", {})
        ]
        if named or any("secretRef" in e for e in container.get("envFrom", [])):
            found.append(f"{name}: a token in its environment")
        if any(SECRET_VALUE.search(word) for word in container["command"]):
            found.append(f"{name}: a token in its command")
    return found

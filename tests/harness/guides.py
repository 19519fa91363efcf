"""What holds when a guide has run.

`check(NAME)` is the source of a cell that is appended to the guide, so that the guide itself has only what a user
would write."""

import inspect
import json
import sys
from pathlib import Path

import pytest
import yaml
from harness.runs import REPO

from multigpu_ft import ConfigError, RunConfig, deploy_kubernetes


def check(guide):
    "Return the source of a cell that checks the guide in whose kernel it runs."
    path = f"import sys\nsys.path.insert(0, {str(REPO / 'tests')!r})"
    return f"{path}\nfrom harness.guides import run_check\nrun_check({guide!r}, globals())"


def run_check(guide, variables):
    "Call the guide's check with those variables of the guide that it names."
    function = getattr(sys.modules[__name__], guide)
    variables = {**variables, "variables": variables}
    function(**{name: variables[name] for name in inspect.signature(function).parameters})


def first_run(checkup, found, run, evaluation, tomorrow, num_train):
    assert checkup.ok
    assert found.fits
    assert run.state == "done" and run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    assert run.next_config().start_idx == num_train
    assert evaluation.verdict == "better"
    assert tomorrow.state == "done" and tomorrow.metrics[0]["step"] == run.metrics[-1]["step"] + 1


def chat(found, run):
    assert all(estimate.fits for estimate in found.values())
    held_out = [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
    assert run.state == "done" and held_out[-1] < held_out[0]
    assert (Path(run.status["export"]) / "adapter_config.json").exists()


def sst2(run, accuracy):
    assert run.state == "done" and accuracy > 0.6


def slices(run, second, end_idx, hf_repo, variables):
    assert run.state == "done" and second.state == "done"
    assert second.metrics[0]["step"] == run.metrics[-1]["step"] + 1
    assert second.metrics[-1]["loss"] < run.metrics[-1]["loss"]
    if hf_repo:
        third, fourth = variables["third"], variables["fourth"]
        assert fourth.state == "done"
        assert fourth.metrics[0]["step"] == third.metrics[-1]["step"] + 1


def evaluation(evaluation, second):
    assert evaluation.verdict == "better"
    assert second.state == "done"


def loop(is_right, second):
    assert is_right("48", "/", "2", "24") and not is_right("48", "/", "2", "25")
    assert second.state == "done"


def machines(run, node_1, wrong_node_1):
    said = node_1.communicate(timeout=120)[0]
    assert run.state == "done" and node_1.returncode == 0, said
    assert wrong_node_1.returncode != 0


def strategies(found, ddp, fsdp):
    used = {name: estimate.simulation.used for name, estimate in found.items()}
    assert used["zero3"] < used["zero2"] < used["zero1"] < used["ddp"]
    assert used["full_shard"] < used["zero3"] and used["zero3, offload"] < used["zero3"]
    measured = json.loads((REPO / "bench" / "results" / "zero.json").read_text())
    kept = measured["bytes an element on a rank"]
    assert abs(kept["zero1"]["moments"] - 4) < 0.1
    assert abs(kept["zero2"]["gradients"] - 2) < 0.1
    assert abs(kept["zero3"]["parameters"] - 2) < 0.1
    for a, b in zip(ddp.metrics, fsdp.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-3)


def kubernetes(cfg, folder, deployed, mistakes, pod, following, kubeflow):
    for mistake in mistakes:
        with pytest.raises(ConfigError):
            deploy_kubernetes(*mistake)
    assert deployed.cluster is None, "the manifests were sent to a cluster"
    (node,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert node["securityContext"]["readOnlyRootFilesystem"]
    assert not pod["automountServiceAccountToken"]
    config_map = next(m for m in deployed.manifests if "cfg.json" in m.get("data", {}))
    settled = RunConfig(**json.loads(config_map["data"]["cfg.json"]))
    changed = {name for name, value in settled.model_dump().items() if value != getattr(cfg, name)}
    assert changed == {"run_root", "nproc", "nnodes", "tracker"}
    assert settled.run_root == "/shared/runs"
    written = yaml.safe_load((folder / "k8s" / "08-configmap.yaml").read_text())
    assert json.loads(written["data"]["cfg.json"])["run_root"] == "/shared/runs"
    kinds = ("Job", "PersistentVolumeClaim")
    names = [
        {m["metadata"]["name"] for m in manifests.manifests if m["kind"] in kinds}
        for manifests in (deployed, following)
    ]
    assert names == [{"opt-lora-1", "multigpu-ft"}, {"opt-lora-2", "multigpu-ft"}]
    assert kubeflow.pod["spec"]["securityContext"] == pod["securityContext"]

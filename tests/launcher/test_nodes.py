"""Runs on two machines, which are two network namespaces here.

The curve is the same whatever is cut, and wherever the files are."""

import functools
import json
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from harness import faults, forks, host_faults, hosts
from harness.runs import slow

from multigpu_ft import Run, RunConfig, RunDir, deploy_kubernetes
from multigpu_ft.launcher.commands import flags
from multigpu_ft.run.secrets import new_run_secret

no_hosts = hosts.missing()
pytestmark = pytest.mark.skipif(bool(no_hosts), reason=str(no_hosts))
BIN = hosts.BIN
HYBRID = {"strategy": "fsdp", "sharding": "hybrid_shard"}


@pytest.fixture(scope="module")
def one_host(server, material, tmp_path_factory):
    "A function that returns the losses of `nproc` ranks on one machine."

    @functools.cache
    def train(nproc, **settings):
        cfg = faults.config(
            material, tmp_path_factory.mktemp("one"), nproc=nproc, resume_file="none", **settings
        )
        return hosts.losses(server.finish(cfg).path)

    return train


@pytest.fixture
def net(tmp_path):
    with hosts.Hosts() as made:
        yield made
    left = hosts.workers(tmp_path)
    for process in left:
        process.kill()
    assert not left, f"left behind: {[p.cmdline() for p in left]}"


def configs(material, tmp_path, shared=True, **settings):
    "The settings of the two machines, with one disk or two."
    cfg = faults.config(
        material,
        tmp_path / "runs",
        nnodes=2,
        run_name="two",
        resume_file="none",
        timeout_s=20,
        **{"nproc": 2, **settings},
    )
    return cfg, cfg if shared else cfg.replace(run_root=str(tmp_path / "other disk"))


def run_both(net, cfgs, *more):
    codes, texts = hosts.wait([net.train(n, cfg, *more) for n, cfg in enumerate(cfgs)])
    assert codes == [0, 0], texts
    return RunDir(cfgs[0].run_root + "/two"), texts


def assert_trained_as_one(cfgs, texts, expected):
    nproc, run_dirs = (
        cfgs[0].nproc,
        [RunDir(cfg.run_root + "/two").of_node(node) for node, cfg in enumerate(cfgs)],
    )
    found = hosts.losses(run_dirs[0].path)
    assert [step for step, _, _ in found] == [step for step, _, _ in expected]
    assert all(
        abs(a - b) < 1e-5
        for row, other in zip(found, expected, strict=True)
        for a, b in zip(row, other, strict=True)
    )
    # the other node's own view of it
    part = run_dirs[1]
    assert (
        hosts.losses(part.path) == found
        and part.status()["state"] == "done"
        and Run(part).state == "done"
    )
    assert (
        "on node 1: multigpu-ft train" in texts[0]
        and "--node-rank 1 --rdzv 10.77.0.1:29400" in texts[0]
    )
    for rank in range(2 * nproc):
        node = rank // nproc
        log = run_dirs[node].log_file(rank).read_text()
        assert (
            f"RANK={rank} LOCAL_RANK={rank % nproc} WORLD_SIZE={2 * nproc} NODE_RANK={node} on host{node}"
            in log
        )
    # checkpoints are whole on node 0's disk, and nowhere else
    assert len(list(run_dirs[0].checkpoints()[-1].glob("rank*.safetensors"))) == 2 * nproc
    if cfgs[1].run_root != cfgs[0].run_root:
        other_disk = Path(cfgs[1].run_root)
        assert (
            other_disk.is_dir()
            and not list(other_disk.rglob("*.safetensors"))
            and not list(other_disk.rglob("export/*"))
        )


# On one disk: hybrid sharding in the next test; with a rank each, ddp where a machine comes
# late, full sharding where one is stopped.
@pytest.mark.parametrize(
    "settings", [{}, slow({"strategy": "fsdp"}), slow(HYBRID)], ids=["ddp", "full shard", "hybrid"]
)
def test_two_machines_with_a_disk_each_train_as_one(net, material, one_host, tmp_path, settings):
    cfgs = configs(material, tmp_path, shared=False, **settings)
    assert_trained_as_one(cfgs, run_both(net, cfgs)[1], one_host(4))


@pytest.mark.slow
def test_hybrid_sharding_adds_up_micro_batches_before_nodes_communicate(
    net, material, one_host, tmp_path
):
    split = {"batch_size": 1, "accum_steps": 2, "communication": "micro_batch"}
    cfgs = configs(material, tmp_path, **HYBRID, **split)
    assert_trained_as_one(cfgs, run_both(net, cfgs)[1], one_host(4, strategy="fsdp", **split))


@pytest.mark.slow
def test_plain_torchrun_does_it_too(net, material, one_host, tmp_path):
    cfg, _ = configs(material, tmp_path, strategy="fsdp", nproc=1)
    run_dir = RunDir.create(cfg)
    words = [
        "--nnodes",
        2,
        "--nproc-per-node",
        1,
        "--rdzv-backend",
        "static",
        "--master-addr",
        net.addresses[0],
        "--master-port",
        29400,
    ]
    interface = {"GLOO_SOCKET_IFNAME": "eth0"}
    nodes = [
        net.start(
            n,
            BIN / "torchrun",
            *words,
            "--node-rank",
            n,
            "--local-addr",
            net.addresses[n],
            "-m",
            "multigpu_ft.training",
            run_dir.path,
            **interface,
        )
        for n in range(2)
    ]
    codes, texts = hosts.wait(nodes)
    assert codes == [0, 0], texts
    assert all(
        abs(a[1] - b[1]) < 1e-5
        for a, b in zip(hosts.losses(run_dir.path), one_host(2), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["one disk", "two disks"])
def test_stopped_on_one_machine_and_started_again_on_both(net, material, server, tmp_path, shared):
    """The second machine gets SIGTERM: both save and end, and report no failure.

    Started again, they resume with exactly the state they had."""
    cfgs = configs(material, tmp_path, shared, strategy="fsdp", num_epochs=8, nproc=1)
    calm = server.finish(cfgs[0].replace(run_name="calm", nnodes=1, nproc=2))
    run_dir = RunDir(tmp_path / "runs" / "two")
    nodes = [net.train(n, cfg, "--as-job") for n, cfg in enumerate(cfgs)]
    while len(run_dir.metrics()) < 20:
        time.sleep(0.1)
        assert [n.poll() for n in nodes] == [None, None]
    launcher = psutil.Process(nodes[1].pid)
    assert "train" in launcher.cmdline()
    launcher.terminate()
    codes, texts = hosts.wait(nodes)
    assert codes == [75, 75] and run_dir.status()["state"] == "stopped", texts
    stopped_at = run_dir.status()["step"]
    assert 20 <= stopped_at < 96
    _, texts = run_both(net, cfgs, "--as-job")
    assert_trained_as_one(cfgs, texts, hosts.losses(calm.path))
    assert run_dir.status()["state"] == "done" and hosts.losses(run_dir.path) == hosts.losses(
        calm.path
    )
    assert faults.final_state(run_dir.checkpoints()[-1]) == faults.final_state(
        calm.checkpoints()[-1]
    )


@pytest.mark.slow
def test_a_job_that_was_asked_to_stop_has_succeeded(net, material, tmp_path):
    cfgs = configs(material, tmp_path, num_epochs=200, nproc=1)
    run_dir = RunDir(tmp_path / "runs" / "two")
    nodes = [net.train(n, cfg, "--as-job") for n, cfg in enumerate(cfgs)]
    while len(run_dir.metrics()) < 5:
        time.sleep(0.1)
    run_dir.request_stop()
    codes, texts = hosts.wait(nodes)
    assert codes == [0, 0] and run_dir.status()["state"] == "stopped", texts


@pytest.mark.slow
def test_a_cut_link_ends_both_sides(net, material, tmp_path):
    "Without restarts both say which node they lost, and no process is left. Started again, the run resumes."
    cfgs = configs(material, tmp_path, shared=False, num_epochs=10, nproc=1)
    cfgs = [cfg.replace(timeout_s=5) for cfg in cfgs]
    run_dir = RunDir(tmp_path / "runs" / "two")
    nodes = [net.train(n, cfg) for n, cfg in enumerate(cfgs)]
    while len(run_dir.metrics()) < 5:
        time.sleep(0.1)
    net.cut()
    began = time.monotonic()
    codes, texts = hosts.wait(nodes, 5 + 10)
    print(f"both ended {time.monotonic() - began:.1f} s after the cut")
    assert codes == [1, 1] and not hosts.workers(tmp_path)
    assert (
        "node 1 (host1, 10.77.0.2) was lost: nothing was heard of it for 5 s" in texts[0]
        and "node 0 at 10.77.0.1:29400 was lost" in texts[1]
    )
    net.mend()
    run_both(net, cfgs)
    assert run_dir.status()["step"] == 120


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shared", [True, False], ids=["one disk", "two disks"])
def test_the_link_is_cut_again_and_again(material, server, tmp_path, shared):
    "10 times, at random points. The run restarts itself and ends with the bits of an undisturbed run."
    print(hosts.Cuts(tmp_path, material, server, seed=3 + shared, shared=shared, nproc=1).run(10))


@pytest.fixture(scope="module")
def calm(server, material, tmp_path_factory):
    return host_faults.Calm(tmp_path_factory.mktemp("calm"), material, server)


# `make faults` has those that take minutes
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "cut from node 0 to node 1",
        "supervisor of node 0 stopped at the end",
        "node 0 killed and started again",
        "clock a year ahead",
        "older version",
        "full disk",
        "IPv6 only",
    ],
)
def test_a_fault_of_two_machines(calm, material, tmp_path, fault):
    "The run ends with the losses and weights of an undisturbed one, and nothing is left."
    host_faults.run_fault(fault, tmp_path, material, calm)


@pytest.mark.slow
@pytest.mark.parametrize("signal_name, nproc", [("SIGKILL", 2), ("SIGSTOP", 1)])
def test_a_rank_of_the_other_machine_fails(net, material, tmp_path, signal_name, nproc):
    cfgs = configs(material, tmp_path, num_epochs=200, nproc=nproc)
    cfgs = [cfg.replace(timeout_s=8) for cfg in cfgs]
    run_dir = RunDir(tmp_path / "runs" / "two")
    nodes = [net.train(n, cfg) for n, cfg in enumerate(cfgs)]
    while len(run_dir.of_node(1).metrics()) < 5:
        time.sleep(0.1)
    psutil.Process(run_dir.of_node(1).status()["pids"]["ranks"][-1]).send_signal(
        getattr(signal, signal_name)
    )
    codes, texts = hosts.wait(nodes, 40)
    why = (
        "on node 1 (host1): rank 3 (pid"
        if signal_name == "SIGKILL"
        else "on node 1 (host1): rank 1 hangs in step"
    )
    assert codes == [1, 1] and all(why in text for text in texts), texts
    assert (
        "was killed by signal 9" if signal_name == "SIGKILL" else "it was stopped by a signal"
    ) in texts[0]


@pytest.mark.slow
def test_a_machine_that_comes_late_or_never(net, material, one_host, tmp_path):
    cfgs = configs(material, tmp_path, nproc=1, join_timeout_s=20)
    late = net.train(1, cfgs[1])
    time.sleep(8)
    codes, texts = hosts.wait([net.train(0, cfgs[0]), late])
    assert codes == [0, 0], texts
    assert_trained_as_one(cfgs, texts, one_host(2))
    alone = [cfg.replace(join_timeout_s=5, run_name="alone") for cfg in cfgs]
    codes, texts = hosts.wait(
        [net.train(0, alone[0]), net.train(1, alone[1], rdzv="10.77.0.1:29999")], 60
    )
    assert codes == [1, 1]
    assert (
        "NodesError: node 1 of 2 did not join within join_timeout_s=5 s. Start the same command there"
        in texts[0]
    )
    assert (
        "NodesError: node 0 did not answer at 10.77.0.1:29999 within join_timeout_s=5 s (connection refused)"
        in texts[1]
    )


def test_a_wrong_address_is_explained(net, material, tmp_path):
    cfg, _ = configs(material, tmp_path)
    port = net.start(
        0,
        "python3",
        "-c",
        "import socket, time; s = socket.create_server(('10.77.0.1', 29400)); time.sleep(60)",
    )
    time.sleep(1)
    taken = net.train(0, cfg)
    elsewhere = net.train(0, cfg.replace(run_name="b"), rdzv="10.77.0.2:29400")
    unknown = net.train(1, cfg.replace(run_name="c", join_timeout_s=5), rdzv="10.77.0.99:29400")
    codes, texts = hosts.wait([taken, elsewhere, unknown], 60)
    port.kill()
    assert codes == [1, 1, 1]
    assert (
        "port 29400 of 10.77.0.1 is taken, perhaps by another run; use another one on all nodes"
        in texts[0]
    )
    assert (
        "rdzv='10.77.0.2:29400' is where node 0 listens, but that is no address of this machine"
        in texts[1]
        and "10.77.0.1" in texts[1]
    )
    assert "node 0 did not answer at 10.77.0.99:29400 within join_timeout_s=5 s" in texts[2]


@pytest.mark.slow
def test_machines_that_are_not_set_up_alike(net, material, one_host, tmp_path):
    cfg, other = configs(material, tmp_path, shared=False, join_timeout_s=40, nproc=1)
    leader = net.train(0, cfg)
    wrong = net.train(1, other.replace(learning_rate=0.5), "--as-job")
    codes, texts = hosts.wait([wrong], 30)
    assert (
        codes == [78]
        and "node 1 (host1) is not set up as node 0 is: learning_rate=0.5 there, 0.001 on node 0"
        in texts[0]
    )
    codes, texts = hosts.wait([net.train(1, other.replace(nproc=2))], 30)
    assert codes == [1] and "2 processes there, 1 on node 0" in texts[0]
    right = net.train(1, other)
    codes, texts = hosts.wait([leader, right])
    assert codes == [0, 0], texts
    assert_trained_as_one((cfg, other), texts, one_host(2))
    again = json.loads((tmp_path / "runs" / "two" / "status.json").read_text())
    assert again["state"] == "done"
    (texts,) = hosts.wait([net.train(0, cfg.replace(learning_rate=0.5))], 30)[1]
    assert "holds a run with other settings (learning_rate=0.001 there, 0.5 now)" in texts


def test_texts_that_differ_between_machines(net, material, tmp_path):
    mine = tmp_path / "texts.jsonl"
    mine.write_text((material / "texts.jsonl").read_text())
    cfgs = [cfg.replace(dataset=str(mine)) for cfg in configs(material, tmp_path, nproc=1)]
    # the other machine has a different file under that name, though no setting says so
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(mine.read_text().replace("w1", "w2"))
    leader = net.train(0, cfgs[0])
    train = f"{BIN / 'multigpu-ft'} train {flags(cfgs[1])}"
    command = f"mount --bind {theirs} {mine} && exec {train} --node-rank 1 --rdzv {net.rdzv()}"
    codes, texts = hosts.wait([leader, net.start(1, "unshare", "--mount", "sh", "-c", command)], 90)
    assert codes == [1, 1]
    assert all(
        "DataError: texts of rank 1, on node 1, differ from node 0's" in text for text in texts
    ), texts


@pytest.mark.slow
def test_the_pods_of_a_job(net, material, tmp_path):
    """Run the command of the rendered pods, with the variables that Kubernetes would set.

    Evicted, they end with 75 on both nodes; started again, they finish."""
    shared, config, secrets = (tmp_path / each for each in ("shared", "config", "secrets"))
    shutil.copytree(material, shared / "data")
    config.mkdir()
    resources = {
        "image": f"registry.example/multigpu-ft@sha256:{'0' * 64}",
        "replicas": 2,
        "shared_volume": {"size": "10Gi"},
        "resources": {"gpu": {"accelerator_count": 0, "memory": "4Gi", "cpu": 1}},
    }
    settings = {
        "model": "/shared/data/model",
        "dataset": "/shared/data/texts.jsonl",
        "run_root": "runs",
        "nproc": 1,
        "num_epochs": 15,
        "strategy": "fsdp",
    }
    cfg = RunConfig(
        max_length=faults.MAX_LENGTH,
        learning_rate=1e-3,
        packing="padded",
        batch_size=2,
        save_every=10,
        run_name="pods",
        **settings,
    )
    manifests = deploy_kubernetes(cfg, resources).manifests
    job = next(m for m in manifests if m["kind"] == "Job")
    maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
    name, variables = (
        job["metadata"]["name"],
        next(data for data in maps.values() if "HOME" in data),
    )
    secrets.mkdir()
    (secrets / "RUN_SECRET").write_text(new_run_secret())  # as the cluster mounts it
    (config / "cfg.json").write_text(
        next(data["cfg.json"] for data in maps.values() if "cfg.json" in data)
    )

    def pods():
        return [
            net.pod(n, name, job["spec"]["template"], variables, config, shared, secrets)
            for n in range(2)
        ]

    run_dir = RunDir(shared / "runs" / "pods")
    started = pods()
    while len(run_dir.metrics()) < 20:
        time.sleep(0.1)
        assert [pod.poll() for pod in started] == [None, None], hosts.wait(started, 5)
    psutil.Process(started[1].pid).children()[0].terminate()  # the kubelet's SIGTERM to process 1
    codes, texts = hosts.wait(started)
    assert codes == [75, 75] and run_dir.status()["state"] == "stopped", texts
    codes, texts = hosts.wait(pods())
    assert (
        codes == [0, 0] and run_dir.status()["state"] == "done" and run_dir.status()["step"] == 180
    ), texts
    assert list((shared / "runs" / "tensorboard").rglob("events.*"))


@pytest.mark.slow
def test_restarts_on_one_machine(material, server, tmp_path):
    "`max_restarts` also applies to a rank that dies on the only machine."
    cfg = faults.config(
        material,
        tmp_path / "runs",
        run_name="one",
        resume_file="none",
        num_epochs=20,
        max_restarts=1,
    )
    calm = server.finish(cfg.replace(run_name="calm", max_restarts=0))
    process = subprocess.Popen(
        [forks.command(), "train", *shlex.split(flags(cfg))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run_dir = RunDir(tmp_path / "runs" / "one")
    while len(run_dir.metrics()) < 10:
        time.sleep(0.05)
    psutil.Process(run_dir.status()["pids"]["ranks"][1]).kill()
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "restart 1 of 1, after: rank 1" in text, text
    assert hosts.losses(run_dir.path) == hosts.losses(calm.path)

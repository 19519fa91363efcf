"""What a run on two machines survives, as a table with a row for each fault.

    python tests/harness/host_faults.py               # all of them: part of `make faults`
    python tests/harness/host_faults.py --only "full disk"

Each row trains on two machines with a disk each, and ends with the losses and the weights of an
undisturbed run, bit for bit, and with no process left.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import faults, hosts, small_disks  # noqa: E402

from multigpu_ft.run.run_dir import RunDir  # noqa: E402

STEPS = 360  # of 48 texts, 2 per rank and step, 30 epochs
YEAR_S = 365 * 24 * 3600
# libfaketime makes Python's time.sleep fail, so Python itself is told another time
AHEAD = f"""\
import time

now, now_ns = time.time, time.time_ns
time.time = lambda: now() + {YEAR_S}
time.time_ns = lambda: now_ns() + {YEAR_S} * 10**9
"""


class Trial:
    "A run on two machines, to which something happens."

    def __init__(self, net, folder, material, **settings):
        self.net, self.folder = net, Path(folder)
        usual = {"strategy": "fsdp", "nproc": 1, "nnodes": 2, "num_epochs": 30, "save_every": 20}
        usual |= {"timeout_s": 10, "join_timeout_s": 120, "max_restarts": 20}
        root, known = self.folder / "runs", {"resume_file": "none", "run_name": "two"}
        cfg = faults.config(material, root, **{**usual, **known, **settings})
        self.cfgs = [cfg, cfg.replace(run_root=str(self.folder / "disk1"))]
        self.run_dir = RunDir(self.folder / "runs" / "two")
        self.nodes, self.started = [], 0

    def start(self, *hosts_to_start, **env):
        "Start these machines' parts of the run; all of them if none is named."
        for host in hosts_to_start or (0, 1):
            self.started += 1
            log = self.folder / f"node{host}-{self.started}.log"
            node = self.net.train(host, self.cfgs[host], log=log, **env.get(f"host{host}", {}))
            self.nodes[host : host + 1] = [node]

    def steps(self):
        return len(self.run_dir.metrics())

    def reach(self, step, seconds=120):
        end = time.monotonic() + seconds
        while self.steps() < step:
            assert time.monotonic() < end, (self.steps(), self.logs())
            time.sleep(0.05)

    def logs(self):
        files = sorted(self.folder.glob("node*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def end(self, codes=(0, 0), seconds=300):
        found, _ = hosts.wait(self.nodes, seconds)
        assert tuple(found) == codes, self.logs()
        assert not hosts.workers(self.folder), "processes are left"

    def restarts(self):
        remarks = self.run_dir.status().get("remarks", [])
        return sum(remark.startswith("restart") for remark in remarks)

    def processes_of(self, host, module):
        found = [p for p in hosts.workers(self.folder) if module in p.cmdline()]
        here = {p.pid for p in self.net.processes(host)}
        return [p for p in found if p.pid in here]


def one_way_cut(trial, deaf):
    trial.start()
    trial.reach(60)
    trial.net.do(deaf=[deaf])
    time.sleep(20)
    trial.net.do(deaf=[])
    trial.end()
    return f"{trial.restarts()} restarts"


def stopped_supervisor(trial, host):
    "A supervisor gets no time for 90 s, as in a machine that swaps, or a frozen container."
    trial.start()
    trial.reach(60)
    (frozen,) = trial.processes_of(host, "multigpu_ft.launcher.supervisor")
    frozen.send_signal(signal.SIGSTOP)
    time.sleep(90)
    frozen.send_signal(signal.SIGCONT)
    trial.end()
    return f"{trial.restarts()} restarts"


def stopped_at_the_end(trial):
    """Node 0's supervisor gets no time while training ends.

    Node 1 loses its connection to it meanwhile, but not the run."""
    trial.start()
    trial.reach(60)
    (frozen,) = trial.processes_of(0, "multigpu_ft.launcher.supervisor")
    frozen.send_signal(signal.SIGSTOP)
    part = RunDir(trial.folder / "disk1" / "two").of_node(1)
    end = time.monotonic() + 120
    while "no answer" not in (part.status().get("activity") or ""):
        assert time.monotonic() < end, trial.logs()
        time.sleep(0.1)
    assert trial.steps() == 120, "training ended meanwhile"
    frozen.send_signal(signal.SIGCONT)
    trial.end()
    return f"{trial.restarts()} restarts"


def node_0_killed(trial):
    "All processes of node 0 die, and its command is started again."
    trial.start()
    trial.reach(60)
    for process in trial.net.processes(0):
        process.kill()
    trial.nodes[0].wait()
    time.sleep(3)
    trial.start(0)
    trial.end()
    return "node 1 waited for it"


def year_off(trial):
    "Node 1's clock is a year ahead."
    (trial.folder / "ahead").mkdir()
    (trial.folder / "ahead" / "sitecustomize.py").write_text(AHEAD)
    trial.start(host1={"PYTHONPATH": f"{trial.folder / 'ahead'}:{hosts.REPO}"})
    trial.end()
    part = RunDir(trial.folder / "disk1" / "two").of_node(1)
    assert part.status()["launched"] - trial.run_dir.status()["launched"] > YEAR_S - 100
    return f"{trial.restarts()} restarts"


def older_version(trial):
    "Node 1 has an older version first, and is told so; then it has the same one."
    older = trial.folder / "older"
    shutil.copytree(hosts.REPO / "multigpu_ft", older / "multigpu_ft")
    initial = older / "multigpu_ft" / "__init__.py"
    text = initial.read_text()
    initial.write_text(text + '\n__version__ = "0.0.1"\n')
    trial.start(0)
    # else the folder where this runs comes first, which may be a checkout
    trial.start(1, host1={"PYTHONPATH": str(older), "PYTHONSAFEPATH": "1"})
    code = trial.nodes[1].wait(120)
    said = "".join(file.read_text() for file in trial.folder.glob("node1-*.log"))
    assert code and "multigpu_ft 0.0.1 there" in said, (code, said)
    trial.start(1)
    trial.end()
    return "refused with the two versions; then exact"


def full_disk(trial):
    "Node 1's disk is full; once there is room, the run continues."
    with small_disks.small_disk(2**22) as disk:
        trial.cfgs[1] = trial.cfgs[1].replace(run_root=str(disk / "runs"))
        trial.cfgs = [cfg.replace(max_restarts=0) for cfg in trial.cfgs]
        trial.start()
        trial.reach(60)
        small_disks.leave(disk, 0)
        found, _ = hosts.wait(trial.nodes, 120)
        failure = trial.run_dir.status()["failure"]["text"]
        assert found[0] and found[1] and "node 1" in failure, (found, failure, trial.logs())
        assert "space" in failure or "full" in failure, failure
        (disk / "filler").unlink()
        trial.start()
        trial.end()
    return f"said: {failure.splitlines()[0]}"


def undisturbed(trial):
    trial.start()
    trial.end()
    return f"{trial.restarts()} restarts"


def lossy(trial):
    trial.net.do(delay=0.05, loss=0.05)
    return undisturbed(trial)


# what happens; what the network is; how long a run is, because some networks are slow
FAULTS = {
    "cut from node 0 to node 1": (lambda t: one_way_cut(t, 1), {"relay": True}, {}),
    "cut from node 1 to node 0": (lambda t: one_way_cut(t, 0), {"relay": True}, {}),
    "supervisor of node 0 stopped for 90 s": (lambda t: stopped_supervisor(t, 0), {}, {}),
    "supervisor of node 1 stopped for 90 s": (lambda t: stopped_supervisor(t, 1), {}, {}),
    "supervisor of node 0 stopped at the end": (
        stopped_at_the_end,
        {},
        {"num_epochs": 10, "max_restarts": 0},
    ),
    "node 0 killed and started again": (node_0_killed, {}, {}),
    "clock a year ahead": (year_off, {}, {}),
    "older version": (older_version, {}, {}),
    "full disk": (full_disk, {}, {}),
    "IPv6 only": (undisturbed, {"ipv6": True}, {}),
    "5 % loss, 50 ms each way": (lossy, {"relay": True}, {"num_epochs": 2, "timeout_s": 60}),
}


class Calm:
    "Losses and weights of an undisturbed run of as many ranks on one machine."

    def __init__(self, folder, material, server):
        self._folder, self._material, self._server = folder, material, server
        self._known = {}

    def of(self, **settings):
        key = json.dumps(settings, sort_keys=True)
        if key not in self._known:
            root = Path(self._folder) / f"calm{len(self._known)}"
            cfg = Trial(None, root, self._material, **settings).cfgs[0]
            cfg = cfg.replace(nnodes=1, nproc=2, max_restarts=0, run_root=str(root))
            self._known[key] = outcome(self._server.finish(cfg, seconds=300))
        return self._known[key]


def outcome(run_dir):
    return hosts.losses(run_dir.path), faults.final_state(run_dir.checkpoints()[-1])


def run_fault(name, folder, material, calm):
    "Return what happened, and the seconds it took. Raises `AssertionError` unless the run is exact."
    do, network, settings = FAULTS[name]
    expected, began = calm.of(**settings), time.monotonic()
    with hosts.Hosts(**network) as net:
        trial = Trial(net, folder, material, **settings)
        what = do(trial)
    assert outcome(trial.run_dir) == expected, "losses or weights differ from an undisturbed run"
    return what, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=FAULTS, action="append")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all ranks are on the CPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    names = asked.only or list(FAULTS)
    found = {name: {"outcomes": [], "seconds": []} for name in names}
    with tempfile.TemporaryDirectory() as shared:
        material = faults.make_material(Path(shared))
        server = faults.Server(material / "model")
        calm = Calm(shared, material, server)
        for name in names * asked.rounds:
            with tempfile.TemporaryDirectory() as folder:
                what, seconds = run_fault(name, folder, material, calm)
            found[name]["outcomes"].append(what)
            found[name]["seconds"].append(round(seconds, 1))
            print(f"{name:40} exact, nothing left after {seconds:5.1f} s; {what}", flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
        server.close()


if __name__ == "__main__":
    main()

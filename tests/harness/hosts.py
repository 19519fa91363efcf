"""Two machines on this one, as network namespaces.

Each has an address and a name, and the cable between them can be pulled.

python tests/harness/hosts.py --cuts 100          # the link is cut at random points of a run: part of `make faults`
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil  # noqa: E402
from harness import faults  # noqa: E402

from multigpu_ft.launcher.commands import flags
from multigpu_ft.run.run_dir import RunDir
from multigpu_ft.run.secrets import new_run_secret

BIN, REPO = Path(sys.executable).parent, Path(__file__).parents[2]
_NUMBERS = itertools.count()


def missing():
    "Return why network namespaces are impossible here; None if they are possible."
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "needs root and iproute2 for network namespaces"
    probe = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return (
        f"needs the right to make network namespaces: {made.stderr.strip()}"
        if made.returncode
        else None
    )


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """`count` machines on a switch, which have the same run secret.

    They see this machine's files; a folder stands for a machine's own disk. With `relay` the switch
    is a program, which can `do` more than cut a link."""

    def __init__(self, count=2, ipv6=False, relay=False):
        self.tag = f"{os.getpid():x}{next(_NUMBERS)}"
        self.ipv6, self.relay = ipv6, relay
        self.switch, self.names = f"sw{self.tag}", [f"h{i}x{self.tag}" for i in range(count)]
        prefix = "fd00:77::" if ipv6 else "10.77.0."
        self.addresses = [f"{prefix}{i + 1}" for i in range(count)]
        self.started = []
        self.settings = tempfile.mkdtemp(prefix="hosts-")

    def __enter__(self):
        self.give_secret(self.settings)
        ip("netns", "add", self.switch)
        if not self.relay:
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ip("netns", "add", name)
            ip(
                "-n",
                self.switch,
                "link",
                "add",
                f"port{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            at = [] if self.relay else ["master", "bridge"]
            ip("-n", self.switch, "link", "set", f"port{number}", *at, "promisc", "on", "up")
            size = ["64", "nodad"] if self.ipv6 else ["24"]
            ip("-n", name, "address", "add", f"{address}/{size[0]}", "dev", "eth0", *size[1:])
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        if self.relay:
            words = [sys.executable, Path(__file__).with_name("relay.py"), "port0", "port1"]
            self.relay = subprocess.Popen(
                ["ip", "netns", "exec", self.switch, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self.relay.stdout.readline() == "ready\n"
            self.started.append(self.relay)
        return self

    def __exit__(self, *_):
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()
        for name in [*self.names, self.switch]:
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(self.settings)

    def do(self, **what):
        "Have the relay delay (s), lose (share), or keep frames from the ports in `deaf`."
        self.relay.stdin.write(json.dumps(what) + "\n")
        self.relay.stdin.flush()

    def processes(self, host):
        "Return the processes of a machine."
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[host]], capture_output=True, text=True
        )
        return [psutil.Process(int(pid)) for pid in listed.stdout.split()]

    @staticmethod
    def give_secret(settings):
        "Put a new run secret where a machine with the folder `settings` looks for it."
        file = Path(settings, "multigpu_ft", "run_secret")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.write_text(new_run_secret())

    def cut(self, host=1):
        "Pull the cable of `host` out of the switch: messages are lost without an error."
        ip("-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def mend(self, host=1):
        ip("-n", self.switch, "link", "set", f"port{host}", "master", "bridge")

    def start(self, host, *words, log=None, **env):
        command = [
            "ip",
            "netns",
            "exec",
            self.names[host],
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            f"host{host}",
            *map(str, words),
        ]
        out = open(log, "w") if log else subprocess.PIPE
        ours = {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": self.settings}
        environment = {**os.environ, **ours, **env}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.started.append(process)
        return process

    def pod(self, host, name, template, environment, config, shared, secrets):
        """Run `template` as pod number `host` of job `name`, as Kubernetes does.

        Its command is process 1, its root is read-only, and its hosts have names.

        `config`, `shared` and `secrets` are folders of this machine. The user stays the same, because a
        developer's interpreter may be readable by root only."""
        hosts = Path("/etc/netns", self.names[host], "hosts")
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{a} {name}-{n}.{name} {name}-{n}\n" for n, a in enumerate(self.addresses))
        )
        container = template["spec"]["containers"][0]
        mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        # /var/run is an absolute link in many systems, and would lead out of the root made below
        secrets_dir = os.path.realpath(mounted["secrets"])
        command = [
            word.replace("$(JOB_COMPLETION_INDEX)", str(host)) for word in container["command"]
        ]
        binds = "".join(
            f"mkdir -p .{path}; mount --rbind {path} .{path}; "
            for path in (sys.prefix, sys.base_prefix, REPO)
        )
        script = (
            f"set -e; hostname {name}-{host}; mount --make-rprivate /; "
            "mount -t tmpfs tmpfs /mnt; mkdir /mnt/upper /mnt/work /mnt/root; "
            "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work "
            "/mnt/root; cd /mnt/root; mkdir -p config shared home/multigpu-ft; "
            f"mkdir -p .{secrets_dir}; mount --bind {secrets} .{secrets_dir}; "
            f"mount -t tmpfs tmpfs tmp; {binds} "  # the order matters: the checkout may be in /tmp
            f"mount --bind {config} config; mount -o remount,bind,ro config; "
            f"mount --bind {shared} shared; mount -t tmpfs tmpfs home/multigpu-ft; "
            "mount --bind /etc/hosts etc/hosts; mount --rbind /dev dev; "
            "mount -t proc proc proc; mount -o remount,bind,ro /mnt/root; "
            'exec chroot . "$@"'
        )
        env = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(host),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        words = [
            "ip",
            "netns",
            "exec",
            self.names[host],
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
            "sh",
            *command,
        ]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        self.started.append(process)
        return process

    def rdzv(self, port=29400):
        return f"[{self.addresses[0]}]:{port}" if self.ipv6 else f"{self.addresses[0]}:{port}"

    def train(self, host, cfg, *more, rdzv=None, **env):
        "Run `multigpu-ft train` as node `host`."
        command = [
            BIN / "multigpu-ft",
            "train",
            *shlex.split(flags(cfg)),
            "--node-rank",
            host,
            "--rdzv",
            rdzv or self.rdzv(),
            *more,
        ]
        return self.start(host, *command, **env)


def wait(processes, seconds=200):
    "Wait for `processes` to end. Returns their exit codes and output."
    until, ends = time.monotonic() + seconds, []
    for process in processes:
        text, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        ends.append((process.returncode, text))
    return [code for code, _ in ends], [text or "" for _, text in ends]


def workers(folder):
    "Return the supervisors, agents and ranks of the runs under `folder`."
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and any(w.startswith("multigpu_ft.") for w in words)
                and words[-1].startswith(str(folder))
            ):
                found.append(process)
    return found


def losses(run_dir):
    return [
        (record["step"], record["loss"], record["grad_norm"])
        for record in RunDir(run_dir).metrics()
    ]


class Cuts:
    """Cuts the link at a random point of a run, restores it when all ranks are gone, and lets the run resume.

    In the end losses and weights are, bit for bit, those of an undisturbed run."""

    def __init__(
        self, folder, material, server, seed=0, strategy="fsdp", shared=True, nproc=2, timeout_s=5
    ):
        self.server, self.folder, self.random, self.shared = (
            server,
            Path(folder),
            random.Random(seed),
            shared,
        )
        self.cfg = faults.config(
            material,
            self.folder / "runs",
            strategy=strategy,
            num_epochs=30,
            save_every=10,
            keep=2,
            nnodes=2,
            nproc=nproc,
            timeout_s=timeout_s,
            join_timeout_s=60,
            max_restarts=10_000,
            resume_file="none",
        )
        self.gone, self.steps, self.restarts = [], [], 0

    def expected(self):
        "Return the losses and weights of a run of as many ranks on one machine."
        self.server.finish(
            self.cfg.replace(run_name="calm", nnodes=1, nproc=2 * self.cfg.nproc, max_restarts=0),
            seconds=300,
        )
        return self._outcome("calm")

    def _outcome(self, name):
        run = RunDir(self.folder / "runs" / name)
        return losses(run.path), faults.final_state(run.checkpoints()[-1])

    def _config(self, host, name):
        return self.cfg.replace(
            run_name=name,
            run_root=str(self.folder / ("runs" if self.shared or host == 0 else f"disk{host}")),
        )

    def trial(self, hosts, run, nodes):
        """Cut once, while the supervisors connect, or while ranks import, load, train or save.

        All ranks on both machines have to end in time."""
        in_training = self.random.random() < 0.7
        while in_training and run.status()["state"] != "running" and nodes[0].poll() is None:
            time.sleep(0.05)
        time.sleep(self.random.uniform(0, 3 if in_training else 6))
        hosts.cut()
        began = time.monotonic()
        ranks = {
            p for p in workers(self.folder) if "multigpu_ft.launcher.supervisor" not in p.cmdline()
        }
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks):
            assert time.monotonic() - began < self.cfg.timeout_s + 10, (
                f"{ranks} are there {time.monotonic() - began:.1f} s after the cut"
            )
            time.sleep(0.05)
        self.gone.append(time.monotonic() - began)
        self.steps.append(run.status().get("step", 0))
        time.sleep(self.random.uniform(0, 2))
        hosts.mend()

    def run(self, count):
        expected = self.expected()
        with Hosts() as hosts:
            for number in itertools.count(1):
                name = f"cut{number}"
                run = RunDir(self.folder / "runs" / name)
                nodes = [
                    hosts.train(n, self._config(n, name), log=self.folder / f"node{n}.log")
                    for n in range(2)
                ]
                while len(self.gone) < count and nodes[0].poll() is None:
                    self.trial(hosts, run, nodes)
                codes, _ = wait(nodes, 300)
                assert codes == [0, 0], "\n".join(
                    (self.folder / f"node{n}.log").read_text()[-3000:] for n in range(2)
                )
                assert self._outcome(name) == expected, (
                    "losses or weights differ from those of an undisturbed run"
                )
                assert not workers(self.folder)
                self.restarts += sum(
                    remark.startswith("restart") for remark in run.status().get("remarks", [])
                )
                if len(self.gone) == count:
                    break
        return {
            "cuts": count,
            "runs": number,
            "restarts": self.restarts,
            "steps": self.steps,
            "gone_s": [round(s, 2) for s in self.gone],
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all ranks are on the CPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found = {}
    for shared in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            material = faults.make_material(Path(folder))
            server = faults.Server(material / "model")
            found["one disk" if shared else "two disks"] = Cuts(
                folder, material, server, asked.seed, shared=shared
            ).run(asked.cuts // 2)
            server.close()
    for name, result in found.items():
        times = result["gone_s"]
        print(
            f"{name}: {result['cuts']} cuts, {result['restarts']} restarts, "
            f"ranks gone after {statistics.median(times):.1f} s, {max(times):.1f} s at most"
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Load a task with SkyPilot itself, for test_skypilot.py.

The Python of SkyPilot's own environment runs this in the task's folder. It prints as JSON what the
loader read, and which machine the optimizer would choose from a catalog with one cloud, without
using a network."""

import json
import sys
from pathlib import Path
from unittest import mock

CATALOG = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone,Arch
p5.48xlarge,H100,8.0,192.0,2048.0,{'Gpus': []},98.32,19.66,us-east-1,us-east-1a,x86_64
p4d.24xlarge,A100,8.0,96.0,1152.0,{'Gpus': []},32.77,12.1,us-east-1,us-east-1a,x86_64
m6i.2xlarge,,,8.0,32.0,,0.384,0.1,us-east-1,us-east-1a,x86_64
"""
catalogs = Path.home() / ".sky" / "catalogs" / "v8"
for name, text in (
    ("aws/vms.csv", CATALOG),
    ("common/accelerators.csv", "AcceleratorName,Clouds\nH100,AWS\nA100,AWS\n"),
):
    (catalogs / name).parent.mkdir(parents=True)
    (catalogs / name).write_text(text)

import sky  # noqa: E402
import yaml  # noqa: E402
from sky import clouds, optimizer  # noqa: E402
from sky.client.cli import command  # noqa: E402
from sky.utils import registry  # noqa: E402

task = sky.Task.from_yaml("task.yaml")
written = yaml.safe_load(Path("task.yaml").read_text())
# as --secret NAME does
given = sky.Task.from_yaml_config(
    dict(written), secrets_overrides=[(name, "its value") for name in written.get("secrets", {})]
)
resources = next(iter(task.resources))
strategy = resources.job_recovery["strategy"] if resources.job_recovery else None
read = {
    "name": task.name,
    "num_nodes": task.num_nodes,
    "run": task.run,
    "setup": task.setup,
    "workdir": task.workdir,
    "secrets": sorted(given.secrets),
    "accelerators": resources.accelerators,
    "use_spot": resources.use_spot,
    "job_recovery": resources.job_recovery,
    "volumes": task.volumes,
    "strategy_known": strategy is None
    or registry.JOBS_RECOVERY_STRATEGY_REGISTRY.from_str(strategy) is not None,
    "file_mounts": task.file_mounts,
    "storage_mounts": {
        path: [storage.source, storage.mode.value] for path, storage in task.storage_mounts.items()
    },
}
# the flags, as SkyPilot's own parser reads them
context = command.jobs_launch.make_context("launch", json.loads(sys.argv[1]))
read["launch"] = {
    "entrypoint": list(context.params["entrypoint"]),
    "detach_run": context.params["detach_run"],
    "yes": context.params["yes"],
}
task.set_volumes(
    {}
)  # only the API server knows whether volumes exist, and only the cloud knows about buckets
task.storage_mounts, task.file_mounts = {}, None
with sky.Dag() as dag:
    dag.add(task)
with mock.patch(
    "sky.check.get_cached_enabled_clouds_or_refresh", lambda *args, **kwargs: [clouds.AWS()]
):
    task.validate()
    optimizer.Optimizer.optimize(dag, quiet=True)
read["machine"] = task.best_resources.instance_type
print(f"READ {json.dumps(read)}")

"""The real SageMaker SDK against moto's server, and the entry script, started as SageMaker starts it."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from harness.runs import free_port, until

from multigpu_ft.run.config import RunConfig
from multigpu_ft.run.errors import ConfigError
from multigpu_ft.run.run_dir import RunDir

REGION, ROLE, S3 = "eu-central-1", "SageMakerRole", "s3://bucket/ft"
TRUST = {
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
    "Version": "2012-10-17",
}
missing = [
    name
    for name in ("sagemaker.train", "moto.server")
    if importlib.util.find_spec(name.partition(".")[0]) is None
]
pytestmark = pytest.mark.skipif(bool(missing), reason="needs pip install -e '.[cloud]'")


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    "Run AWS on the loopback interface, with a bucket and a role, for a user without other settings."
    import boto3
    from moto.server import ThreadedMotoServer

    folder = tmp_path_factory.mktemp("aws")
    (folder / "sagemaker.yaml").write_text("SchemaVersion: '1.0'\n")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server._server.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(folder / "sagemaker.yaml"),
            "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(folder / "sagemaker.yaml"),
            # moto knows whether a role exists, but not its permissions
            "SAGEMAKER_VALIDATE_ROLE": "false",
        }.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(
            Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": REGION}
        )
        boto3.client("iam").create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(TRUST))
        yield boto3
    server.stop()


@pytest.fixture
def sent(monkeypatch):
    """Return the bodies of CreateTrainingJob as they were sent, since moto drops parts of them.

    Asserts that the SDK sends no usage statistics."""
    from moto.sagemaker.responses import SageMakerResponse
    from sagemaker.core.telemetry import telemetry_logging

    bodies, create = [], SageMakerResponse.create_training_job

    def record(self):
        bodies.append(json.loads(self.body))
        return create(self)

    told = []
    monkeypatch.setattr(SageMakerResponse, "create_training_job", record)
    monkeypatch.setattr(
        telemetry_logging, "_send_telemetry_request", lambda *event: told.append(event)
    )
    yield bodies
    assert not told


def keys(aws):
    return [
        item["Key"]
        for item in aws.client("s3").list_objects_v2(Bucket="bucket").get("Contents", [])
    ]


def assert_sent_as_shown(told, sent, found):
    "Assert that the request shown before was sent, and is what SageMaker describes."
    for name, value in told.items():
        for there in (sent, found if name not in ("Environment", "Tags") else sent):
            if name in ("TrainingJobName", "RoleArn"):
                assert value in there[name]
            elif name == "InputDataConfig":
                channels = {
                    channel["ChannelName"]: channel["DataSource"] for channel in there[name]
                }
                assert all(
                    channels[channel["ChannelName"]] == channel["DataSource"] for channel in value
                )
            elif isinstance(value, dict):
                assert value.items() <= there[name].items(), name
            else:
                assert there[name] == value, name


def test_the_job_is_as_shown_and_nothing_is_sent_before_submit(aws, sent):
    from multigpu_ft.deploy.sagemaker import deploy_sagemaker

    cfg = RunConfig.preset(
        "opt-1.3b-arxiv",
        dataset="s3://bucket/data/abstracts.jsonl",
        end_idx=5000,
        max_hours=11,
        save_minutes=None,
        save_every=50,
        strategy="fsdp",
        revision="123",  # not the number
    )
    secret = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:ft-abc"
    job = deploy_sagemaker(cfg, S3, role=ROLE, secret_arn=secret, max_run_hours=12)
    sagemaker = aws.client("sagemaker")
    assert (
        sagemaker.list_training_jobs()["TrainingJobSummaries"] == []
        and keys(aws) == []
        and "not sent" in repr(job)
        and job.name is None
    )

    job.submit()
    found = sagemaker.describe_training_job(TrainingJobName=job.name)
    assert job.arn == found["TrainingJobArn"] and found["RoleArn"].endswith(f"role/{ROLE}")
    assert_sent_as_shown(job.request, sent[0], found)
    assert (
        found["CheckpointConfig"] == {"S3Uri": f"{S3}/runs", "LocalPath": "/opt/ml/checkpoints"}
        and found["EnableManagedSpotTraining"] is True
    )
    assert found["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 43200,
        "MaxWaitTimeInSeconds": 86400,
    }
    assert found["AlgorithmSpecification"]["TrainingImage"].endswith(
        f".dkr.ecr.{REGION}.amazonaws.com/pytorch-training:2.10-gpu-py313"
    )
    channels = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in found["InputDataConfig"]
    }
    assert channels["dataset"] == "s3://bucket/data/abstracts.jsonl" and channels.keys() == {
        "dataset",
        "code",
        "sm_drivers",
    }
    code = channels["code"].removeprefix("s3://bucket/")
    assert code.startswith("ft/") and {
        f"{code}/sagemaker_run.py",
        f"{code}/requirements.txt",
        f"{code}/multigpu_ft/training/trainer.py",
    } <= set(keys(aws))
    drivers = channels["sm_drivers"].removeprefix("s3://bucket/")
    started, source = (
        aws.client("s3").get_object(Bucket="bucket", Key=f"{drivers}/{name}")["Body"].read()
        for name in ("sm_train.sh", "sourcecode.json")
    )
    assert (
        b"torchrun_driver.py" in started
        and json.loads(source)["entry_script"] == "sagemaker_run.py"
    )
    assert sent[0]["Environment"] == {"MULTIGPU_FT_SECRET_ARN": secret} and len(sent) == 1

    from sagemaker.train.container_drivers.scripts.environment import deserialize_hyperparameters

    there = RunConfig(**deserialize_hyperparameters(found["HyperParameters"]))
    assert there == cfg.replace(
        run_root="/opt/ml/checkpoints",
        run_name="opt-1.3b_0-5000",
        **({"nnodes": 1} if "nnodes" in RunConfig.model_fields else {}),
    )
    with pytest.raises(ConfigError, match="sent already"):
        job.submit()


def test_several_machines_share_a_file_system(aws, sent):
    from multigpu_ft.deploy.sagemaker import deploy_sagemaker

    job = deploy_sagemaker(
        RunConfig(strategy="fsdp"),
        S3,
        role=ROLE,
        instance_type="ml.p4d.24xlarge",
        instance_count=2,
        spot=False,
        file_system="fs-0123456789abcdef0/scratch/ft",
        subnets=["subnet-1"],
        security_groups=["sg-1"],
        submit=True,
    )
    found = aws.client("sagemaker").describe_training_job(TrainingJobName=job.name)
    assert_sent_as_shown(job.request, sent[0], found)
    runs = next(c for c in found["InputDataConfig"] if c["ChannelName"] == "runs")["DataSource"][
        "FileSystemDataSource"
    ]
    assert runs == {
        "FileSystemId": "fs-0123456789abcdef0",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": "/scratch/ft",
        "FileSystemAccessMode": "rw",
    }
    assert found["HyperParameters"]["run_root"] == "/opt/ml/input/data/runs" and found["VpcConfig"][
        "Subnets"
    ] == ["subnet-1"]
    assert found["ResourceConfig"]["InstanceCount"] == 2 and "CheckpointConfig" not in job.request


def test_missing_requirements_are_reported(aws, monkeypatch):
    from multigpu_ft.deploy import sagemaker

    deploy = sagemaker.deploy_sagemaker
    with pytest.raises(ConfigError, match="no_such_role"):
        deploy(RunConfig(), S3, role="no_such_role", submit=True)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="no AWS credentials"):
        deploy(RunConfig(), S3, role=ROLE, submit=True)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(ConfigError, match="no AWS region"):
        deploy(RunConfig(), S3, role=ROLE)
    monkeypatch.setitem(sys.modules, "sagemaker.train.distributed", None)
    with pytest.raises(ConfigError, match=r"multigpu_ft\[sagemaker\]"):
        deploy(RunConfig(), S3, role=ROLE)


def start_as_sagemaker_does(folder, hyper_parameters, **environ):
    "Run two processes of torchrun, with the environment and arguments of the SDK's driver in the container."
    from sagemaker.train.container_drivers.common.utils import hyperparameters_to_cli_args

    code = folder / "code"
    (folder / "model").mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc_per_node=2",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
        "sagemaker_run.py",
        *hyperparameters_to_cli_args(hyper_parameters),
    ]
    env = {
        **os.environ,
        "SM_HPS": json.dumps(hyper_parameters),
        "SM_MODEL_DIR": str(folder / "model"),
        "SM_HOST_COUNT": "1",
        "SM_CURRENT_HOST_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **environ,
    }
    done = subprocess.run(command, cwd=code, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_entry_trains_and_resumes_after_an_interruption(aws, tmp_path):
    from sagemaker.train.container_drivers.scripts.environment import deserialize_hyperparameters

    from multigpu_ft.deploy.bundle import pack
    from multigpu_ft.deploy.sagemaker import deploy_sagemaker

    data = tmp_path / "inputs" / "texts.jsonl"
    data.parent.mkdir()
    data.write_text(
        "".join(
            json.dumps({"text": f"text {i}: " + "one and another word " * 9}) + "\n"
            for i in range(64)
        )
    )
    arn = aws.client("secretsmanager").create_secret(
        Name="ft", SecretString=json.dumps({"HF_TOKEN": "hf_" + "x" * 30})
    )["ARN"]
    job = deploy_sagemaker(
        RunConfig(
            dataset="s3://bucket/data/texts.jsonl",
            end_idx=64,
            max_length=64,
            packing="padded",
            max_steps=2,
            save_every=1,
        ),
        S3,
        role=ROLE,
        secret_arn=arn,
    )
    pack(tmp_path / "code", job.config, without=("torch",))
    (tmp_path / "code" / "sagemaker_run.py").write_text(
        "from multigpu_ft.deploy.sagemaker_entry import main\n\nmain()\n"
    )
    told = deserialize_hyperparameters(
        {**job.request["HyperParameters"], "run_root": str(tmp_path / "checkpoints")}
    )
    environ = {"SM_CHANNEL_DATASET": str(data.parent), **job.request["Environment"]}
    start_as_sagemaker_does(tmp_path, told, **environ)
    run_dir = RunDir(tmp_path / "checkpoints" / job.config.run_name)
    status = run_dir.status()
    assert (
        status["state"] == "done"
        and status["world_size"] == 2
        and [m["step"] for m in run_dir.metrics()] == [1, 2]
        and status["resumed_from"] is None
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "model").iterdir()
    }
    assert "hf_x" not in "".join(p.read_text(errors="ignore") for p in run_dir.path.rglob("*.json"))

    # an interruption leaves this state
    (run_dir.path / "status.json").write_text(json.dumps({**status, "state": "running"}))
    start_as_sagemaker_does(tmp_path, {**told, "max_steps": 4}, **environ)
    assert [m["step"] for m in run_dir.metrics()] == [1, 2, 3, 4] and run_dir.status()[
        "state"
    ] == "done"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1, "it used another directory"


def test_sigterm_saves_and_the_next_start_resumes(tmp_path):
    """SIGTERM, with which torchrun ends its processes, lets a rank finish its step and save. The same
    job, started again, does the rest."""
    told = {
        "run_root": str(tmp_path / "checkpoints"),
        "run_name": "mine",
        "max_length": 64,
        "packing": "padded",
        "end_idx": 4000,
        "batch_size": 1,
    }
    env = {
        **os.environ,
        "SM_MODEL_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    command = [sys.executable, "-c", "from multigpu_ft.deploy.sagemaker_entry import main; main()"]
    run_dir = RunDir(tmp_path / "checkpoints" / "mine")
    process = subprocess.Popen(
        command, env={**env, "SM_HPS": json.dumps(told), "MASTER_PORT": str(free_port())}
    )
    try:
        until(lambda: len(run_dir.metrics()) >= 2, 200, "two steps")
        process.terminate()
        process.wait(100)
    finally:
        process.kill()
    reached = run_dir.status()["step"]
    assert (
        run_dir.status()["state"] == "stopped"
        and reached >= 2
        and not (tmp_path / "config.json").exists()
    )
    env |= {
        "SM_HPS": json.dumps({**told, "max_steps": reached + 2}),
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [m["step"] for m in run_dir.metrics()] == list(range(1, reached + 3)) and (
        tmp_path / "config.json"
    ).exists()


def test_a_bad_setting_ends_every_rank_with_its_reason(tmp_path):
    env = {
        **os.environ,
        "SM_HPS": json.dumps({"run_root": str(tmp_path), "run_name": "x", "batch_sise": 2}),
        "RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from multigpu_ft.deploy.sagemaker_entry import main; main()"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "batch_size" in done.stderr and "Traceback" not in done.stderr


def test_an_unusable_secret_is_reported_without_its_value(aws):
    from multigpu_ft.deploy.sagemaker_entry import take_secrets

    client = aws.client("secretsmanager")
    good = client.create_secret(
        Name="good", SecretString=json.dumps({"WANDB_API_KEY": "k" * 40, "other": "o"})
    )["ARN"]
    assert take_secrets(good) == {"WANDB_API_KEY": "k" * 40}
    for name, text in (
        ("plain", "very-secret"),
        ("other", json.dumps({"PASSWORD": "very-secret"})),
    ):
        with pytest.raises(ConfigError, match="HF_TOKEN") as error:
            take_secrets(client.create_secret(Name=name, SecretString=text)["ARN"])
        assert "very-secret" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        take_secrets(good.replace("good", "none"))

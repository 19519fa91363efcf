"""Uploads and downloads with the real client library and a small Hub on loopback (hub.py): refusals, faults."""

import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import faults, forks
from harness import hub as local
from harness.runs import processes, until

from multigpu_ft import RunConfig, RunDir, model_card
from multigpu_ft.checkpoints.discovery import kept_checkpoints
from multigpu_ft.checkpoints.manifest import (
    at_home,
    contents,
    difference,
    fingerprint,
    verify_checkpoint,
)
from multigpu_ft.hub.upload import Uploader, _without_folder, not_uploaded, read_record
from multigpu_ft.run.run_dir import commit_digest


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    server = local.Hub(tmp_path_factory.mktemp("hub") / "hub")
    yield server
    server.close()
    assert not server.violations, "a revision has a partial checkpoint"


@pytest.fixture(scope="module")
def client(hub):
    started = local.Client(hub)
    yield started
    started.close()


@pytest.fixture(scope="module")
def hub_server(hub, material):
    "Start runs in milliseconds that use the local Hub."
    before = dict(os.environ)
    os.environ.update(local.environment(hub))
    started = faults.Server(material / "model")
    os.environ.clear()
    os.environ.update(before)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def no_faults(hub):
    yield
    hub.faults.end()


numbers = itertools.count()


@pytest.fixture
def run(tmp_path):
    "Return a run directory with one checkpoint and an export, and its own repository."
    rng = random.Random(0)
    made = local.make_run(tmp_path / "runs", f"jane/model{next(numbers)}")
    local.add_checkpoint(made, 1, rng)
    local.add_export(made, rng)
    return made


def resume(run, **settings):
    "Return settings of a run that resumes from the repository of `run`."
    return {
        **run.config().model_dump(),
        "hf_repo": None,
        "resume_file": f"hub:{run.config().hf_repo}",
        **settings,
    }


def refused(client, do, reason, **arguments):
    with pytest.raises(local.Raised) as caught:
        client(do, **arguments)
    assert caught.value.args[0] == "CheckpointError" and reason in caught.value.args[1], (
        caught.value
    )
    return caught.value.args[1]


# -- sending --------------------------------------------------------------------------------------------------------


def test_what_is_uploaded_comes_back_unchanged(hub, client, run, tmp_path):
    repo, newest = run.config().hf_repo, run.checkpoints()[-1]
    assert client("push", run=str(run.path)) == []
    assert hub.repos[repo]["private"] and all(
        local.is_there(hub, run, name) for name in (newest.name, "export")
    )
    card = hub.read(repo, "README.md").decode()
    assert (
        card == model_card(run)
        and str(tmp_path) not in card
        and card.startswith("---\n")
        and "| 0–48 | 0 | 1 |" in card
    )
    record = read_record(run)
    assert (
        record["url"] == f"{hub.url}/{repo}" and record["pending"] == [] and record["error"] is None
    )
    assert {r["sha"] for r in hub.repos[repo]["revisions"]} >= {
        what["commit"] for what in record["uploaded"].values()
    }

    before = hub.received, hub.repos[repo]["revisions"][:]
    assert (
        client("push", run=str(run.path)) == []
        and (hub.received, hub.repos[repo]["revisions"]) == before
    ), "nothing is sent twice"
    (run.path / "hub.json").unlink()
    assert (
        client("push", run=str(run.path)) == []
        and (hub.received, hub.repos[repo]["revisions"]) == before
    ), "not even if hub.json is lost"

    root = tmp_path / "cold"
    pulled = client("pull", cfg=resume(run), root=str(root))
    assert pulled["revision"] == hub.repos[repo]["revisions"][-1]["sha"]
    path = Path(pulled["path"])
    assert path == root / f"hub--jane--{repo.split('/')[1]}" / "checkpoints" / newest.name
    assert path.parents[1].stat().st_mode & 0o777 == 0o700, "others can't read a private model"
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {
        p.name: p.read_bytes() for p in newest.iterdir()
    }
    sent = hub.sent
    assert client("pull", cfg=resume(run), root=str(root)) == pulled and hub.sent == sent, (
        "an intact local copy is not downloaded again"
    )
    (path / "rank0.safetensors").write_bytes(b"damaged")
    assert client("pull", cfg=resume(run), root=str(root)) == pulled and hub.sent > sent
    verify_checkpoint(path)

    continued = RunDir.create(RunConfig(run_root=str(root)))
    continued.update_status(resumed_from=str(path))
    assert kept_checkpoints(continued) == [path], "it is deleted when newer ones replace it"


def test_an_interrupted_upload_continues_with_the_file_where_it_stopped(hub, client, run):
    first = json.loads((run.checkpoints()[0] / "commit.json").read_text())["commit"]["files"][
        "rank0.safetensors"
    ]
    hub.faults.bytes_per_second = 2e6
    pid, out = client.start("push", run=str(run.path))
    until(hub.object(first["sha256"]).exists, 30, "the first file")
    os.kill(pid, signal.SIGKILL)
    assert client.result(pid, out) is None and hub.checkpoints(run.config().hf_repo) == [], (
        "a checkpoint without its commit does not exist"
    )
    hub.faults.end()
    before = hub.received
    assert client("push", run=str(run.path)) == []
    rest = sum(
        p.stat().st_size
        for p in [
            *run.checkpoints()[0].glob("rank1.*"),
            *(run.path / "export").glob("*.safetensors"),
        ]
    )
    assert hub.received - before <= rest, "the first file was sent twice"


def test_an_interrupted_download_continues_at_the_byte_where_it_stopped(hub, client, run, tmp_path):
    client("push", run=str(run.path))
    hub.faults.bytes_per_second = 1e6
    pid, out = client.start("pull", cfg=resume(run), root=str(tmp_path / "cold"))
    part = until(
        lambda: next(
            (
                p
                for p in tmp_path.glob("cold/*/checkpoints/*/rank0*.partial")
                if p.stat().st_size > 300_000
            ),
            None,
        ),
        30,
        "a part",
    )
    os.kill(pid, signal.SIGKILL)
    client.result(pid, out)
    hub.faults.end()
    time.sleep(0.1)
    have, before = part.stat().st_size, hub.sent
    verify_checkpoint(Path(client("pull", cfg=resume(run), root=str(tmp_path / "cold"))["path"]))
    whole = sum(p.stat().st_size for p in run.checkpoints()[0].glob("rank*"))
    assert hub.sent - before <= whole - have, "it restarted from the beginning"


def test_the_repository_keeps_the_newest_the_best_and_files_of_others(hub, client, tmp_path):
    rng, run = random.Random(1), local.make_run(tmp_path / "runs", "jane/kept", keep=2)
    hub.create("jane/kept")
    own_card = b"# My own card\n"
    foreign = {
        "checkpoints/mine/commit.json": b"{}",
        "checkpoints/mine/notes.txt": b"x",
        "checkpoints/odd/commit.json": b"{}",
    }
    hub.put("jane/kept", **foreign, **{"README.md": own_card})
    names = []
    for step in range(1, 6):
        names.append(local.add_checkpoint(run, step, rng, sizes=(1000,)).name)
        if step != 4:
            assert client("push", run=str(run.path)) == []
    assert hub.checkpoints("jane/kept") == sorted(["mine", "odd", names[2], names[4]]), (
        "the two newest that were sent"
    )
    assert hub.read("jane/kept", "README.md") == own_card, "a card written by the user stays"
    assert "checkpoints/mine/notes.txt" in hub.tree("jane/kept")


def test_files_that_arrive_repeatedly_are_not_progress(hub, client, run):
    "Each attempt stores all files and none is committed: the tries must end."
    hub.faults.full = True
    assert client("push", run=str(run.path)) == [run.checkpoints()[0].name, "export"]
    assert (
        read_record(run)["attempts"] == local.QUICK["tries"]
        and "answers 503" in read_record(run)["error"]
    )
    hub.faults.end()
    assert client("push", run=str(run.path)) == []


def test_a_damaged_checkpoint_is_reported_and_everything_else_is_sent(hub, client, run):
    shard = run.checkpoints()[0] / "rank1.safetensors"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    assert client("push", run=str(run.path)) == [run.checkpoints()[0].name]
    assert "is damaged, so it is not uploaded: rank1.safetensors" in read_record(run)["error"]
    assert local.is_there(hub, run, "export") and hub.checkpoints(run.config().hf_repo) == []


def test_a_second_export_replaces_the_first(hub, client, run):
    client("push", run=str(run.path))
    for name in ("model.safetensors", "config.json"):
        (run.path / "export" / name).unlink()
    (run.path / "export" / "adapter_model.safetensors").write_bytes(b"adapter")
    settings = {"base_model_name_or_path": "/home/jane/models/opt", "r": 8}
    (run.path / "export" / "adapter_config.json").write_text(json.dumps(settings))
    assert client("push", run=str(run.path)) == []
    tree = hub.tree(run.config().hf_repo)
    assert "adapter_model.safetensors" in tree and "model.safetensors" not in tree, (
        "a mixture of two exports would be loaded"
    )
    assert json.loads(hub.read(run.config().hf_repo, "adapter_config.json")) == {
        **settings,
        "base_model_name_or_path": "opt",
    }
    sent = _without_folder(run.path / "export" / "adapter_config.json", "builtin:smollm2-135m")
    base = json.loads(sent)["base_model_name_or_path"]
    assert base == "HuggingFaceTB/SmolLM2-135M-Instruct", "others can't use a folder of our cache"


# -- access ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token, repo, reason",
    [
        (None, "jane/model", "there is no Hub token: put one in the environment variable HF_TOKEN"),
        (local.READ, "jane/model", "is read-only"),
        (local.WRONG, "jane/model", "the Hub rejects the token"),
        (local.WRITE, "bob/model", "jane, who can't write to bob's repositories"),
    ],
)
def test_an_unusable_token_is_reported_before_training(client, token, repo, reason):
    told = refused(client, "check", reason, token=token, cfg=RunConfig(hf_repo=repo).model_dump())
    assert (token or "none") not in told


def test_no_network_is_a_remark_for_uploads_and_an_error_for_resuming(hub, client, run):
    assert client("check", cfg=run.config().model_dump()) == []
    hub.faults.outage_until = time.monotonic() + 1e6
    begun = time.monotonic()
    (remark,) = client("check", cfg=run.config().model_dump())
    assert "the Hub can't be reached to check" in remark and "Training continues" in remark
    refused(client, "find", "the Hub can't be reached", cfg=resume(run))
    assert (
        client("push", run=str(run.path))
        == [run.checkpoints()[0].name, "export"]
        == not_uploaded(run)
    )
    assert "Server disconnected" in read_record(run)["error"] and not read_record(run)["lasting"]
    assert time.monotonic() - begun < 60


def test_a_repository_that_cannot_be_resumed_from_is_reported(hub, client, run):
    client("push", run=str(run.path))
    repo = run.config().hf_repo
    refused(
        client,
        "find",
        "no readable model repository jane/nothing",
        cfg=resume(run, resume_file="hub:jane/nothing"),
    )
    refused(client, "find", "private, put a token", token=None, cfg=resume(run))
    assert client("find", token=local.READ, cfg=resume(run))["name"] == run.checkpoints()[0].name, (
        "reading needs no write access"
    )
    refused(
        client,
        "find",
        f"it has: {run.checkpoints()[0].name}",
        cfg=resume(run, resume_file=f"hub:{repo}@other"),
    )
    refused(
        client, "find", "belongs to another run (model:", cfg=resume(run, model="facebook/opt-125m")
    )
    hub.create("jane/plain")
    hub.put("jane/plain", **{"config.json": b"{}", "model.safetensors": b"x"})
    refused(client, "find", "use model='jane/plain'", cfg=resume(run, resume_file="hub:jane/plain"))


# -- nothing is trusted ---------------------------------------------------------------------------------------------


def forge(run, hub, name, **changes):
    "Add a checkpoint to the repository with a commit.json from a stranger."
    record = json.loads((run.checkpoints()[0] / "commit.json").read_text())["commit"]
    record = {**record, "time": time.time() + 1000, **changes}
    content = json.dumps({"commit": record, "sha256": commit_digest(record)}).encode()
    files = {p.name: p.read_bytes() for p in run.checkpoints()[0].iterdir()}
    hub.put(
        run.config().hf_repo,
        **{
            f"checkpoints/{name}/{file}": body
            for file, body in {**files, "commit.json": content}.items()
        },
    )


@pytest.mark.parametrize(
    "name",
    [
        "../../../evil",
        "/etc/passwd",
        "rank0.pkl",
        "model.pt",
        "rank0.safetensors/../x",
        "optimizer.safetensors",
        "commit.json",
    ],
)
def test_foreign_file_names_are_refused(hub, client, run, name, tmp_path):
    client("push", run=str(run.path))
    files = json.loads((run.checkpoints()[0] / "commit.json").read_text())["commit"]["files"]
    forge(run, hub, "forged", files={**files, name: {"bytes": 1, "sha256": "0" * 64}})
    repo = run.config().hf_repo
    refused(
        client,
        "pull",
        f"lists {name!r}",
        cfg=resume(run, resume_file=f"hub:{repo}@forged"),
        root=str(tmp_path / "cold"),
    )
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name or p.suffix in (".pkl", ".pt")]
    assert client("find", cfg=resume(run))["name"] == run.checkpoints()[0].name, (
        "without its name in resume_file it is skipped"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"files": []},
        {"files": {"progress.json": {"bytes": -1, "sha256": "0" * 64}}},
        {"files": {"progress.json": {"bytes": 1, "sha256": "x"}}},
        {"time": "now"},
        {"fingerprint": []},
        {"fingerprint": {"contents": 3}},
        {"fingerprint": {"contents": {"model": [-1, "x"]}}},
    ],
)
def test_a_malformed_commit_is_refused(hub, client, run, changes):
    client("push", run=str(run.path))
    forge(run, hub, "forged", **changes)
    refused(client, "find", "", cfg=resume(run, resume_file=f"hub:{run.config().hf_repo}@forged"))


def test_other_files_beside_a_checkpoint_are_not_fetched(hub, client, run, tmp_path):
    client("push", run=str(run.path))
    folder = f"checkpoints/{run.checkpoints()[0].name}"
    hub.put(
        run.config().hf_repo,
        **{
            f"{folder}/rank9.safetensors": b"x",
            f"{folder}/evil.pkl": b"x",
            f"{folder}/sub/rank0.safetensors": b"x",
        },
    )
    path = Path(client("pull", cfg=resume(run), root=str(tmp_path / "cold"))["path"])
    assert sorted(p.name for p in path.iterdir()) == [
        "commit.json",
        "progress.json",
        "rank0.safetensors",
        "rank1.safetensors",
    ]


def test_a_damaged_file_is_named_and_does_not_become_a_checkpoint(hub, client, run, tmp_path):
    client("push", run=str(run.path))
    repo, folder = run.config().hf_repo, f"checkpoints/{run.checkpoints()[0].name}"
    whole = hub.read(repo, f"{folder}/rank1.safetensors")
    hub.put(repo, **{f"{folder}/rank1.safetensors": bytes(len(whole))})
    refused(
        client,
        "pull",
        "rank1.safetensors: its content was altered",
        cfg=resume(run),
        root=str(tmp_path / "cold"),
    )
    assert not list(tmp_path.glob("cold/*/checkpoints/*/commit.json"))
    hub.put(repo, **{f"{folder}/rank1.safetensors": whole})
    verify_checkpoint(Path(client("pull", cfg=resume(run), root=str(tmp_path / "cold"))["path"]))
    hub.put(repo, **{f"{folder}/rank0.safetensors": None})
    refused(client, "find", "is damaged: rank0.safetensors is missing", cfg=resume(run))


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_transfers_survive_random_faults(hub, client, seed):
    "The full size is python tests/harness/hub.py --trials 60."
    local.trial(hub, client, seed)


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_machine_resumes_bit_for_bit(hub, hub_server, material, run_root, tmp_path):
    "The second half of a run resumes from the Hub in a fresh directory, with model and texts in another folder."
    cfg = faults.config(material, run_root / "a", strategy="fsdp", save_every=3)
    expected = faults.outcome(run_root / "a", [hub_server.finish(cfg)])
    first = hub_server.finish(
        cfg.replace(run_root=str(run_root / "b"), hf_repo="jane/half", max_steps=14)
    )
    status = first.status()
    assert (
        status["state"] == "done"
        and status["pushed_to"] == f"{hub.url}/jane/half"
        and status["not_uploaded"] == []
    ), first.log_file("hub").read_text()
    assert (
        local.is_there(hub, first, first.checkpoints()[-1].name)
        and len(hub.checkpoints("jane/half")) <= cfg.keep
    )
    for path in [p for p in first.path.rglob("*") if p.is_file()] + [
        p for p in hub.folder.glob("objects/*")
    ]:
        content = path.read_bytes()
        assert local.WRITE.encode() not in content, path
    for path in hub.tree("jane/half"):
        if path.endswith((".json", ".md", ".jinja", ".txt")):
            assert (
                str(material) not in hub.read("jane/half", path).decode()
                and str(run_root) not in hub.read("jane/half", path).decode()
            ), path

    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(material / "model", elsewhere / "model")
    shutil.copy(material / "texts.jsonl", elsewhere)
    cold = faults.config(
        elsewhere, run_root / "c", strategy="fsdp", save_every=3, resume_file="hub:jane/half"
    )
    second = hub_server.finish(cold)
    status = second.status()
    assert status["state"] == "done", second.log_file(0).read_text()[-3000:]
    assert (
        status["first_step"] == 15
        and status["resumed_revision"] == hub.repos["jane/half"]["revisions"][-1]["sha"]
    )
    assert any(
        f"revision {status['resumed_revision'][:12]}" in remark for remark in status["remarks"]
    )
    faults.assert_exact(faults.outcome(run_root / "c", [first, second]), expected)

    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\nfrom huggingface_hub import snapshot_download\n"
        "from multigpu_ft import load_export\n"
        "a = AutoModelForCausalLM.from_pretrained('jane/half')\n"
        "b = load_export(snapshot_download('jane/half', ignore_patterns='checkpoints/*'))[0]\n"
        "assert all((x == y).all() for x, y in zip(a.parameters(), b.parameters()))\n"
        "assert len(AutoTokenizer.from_pretrained('jane/half')) > 10"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=local.environment(hub), check=True, timeout=100
    )

    wrong = elsewhere / "wrong"
    wrong.mkdir()
    (wrong / "texts.jsonl").write_text(
        "".join(reversed((elsewhere / "texts.jsonl").read_text().splitlines(keepends=True)))
    )
    other = hub_server.finish(cold.replace(dataset=str(wrong / "texts.jsonl")))
    assert (
        "belongs to another run (dataset:"
        in json.loads(other.error_file(0).read_text())["message"]["message"]
    )


def test_no_service_is_asked_to_convert_a_model_with_bin_files(hub, material):
    "transformers would look for a conversion service's pull request, and without one send it the model's name."
    import torch
    from safetensors.torch import load_file

    files = {
        p.name: p.read_bytes() for p in (material / "model").iterdir() if p.suffix != ".safetensors"
    }
    weights = io.BytesIO()
    torch.save(load_file(material / "model" / "model.safetensors"), weights)
    hub.create("jane/old", private=True)
    hub.put("jane/old", **files, **{"pytorch_model.bin": weights.getvalue()})
    before = len(hub.requests)
    code = (
        "import sys, torch\nfrom safetensors.torch import load_file\n"
        "from multigpu_ft import RunConfig\nfrom multigpu_ft.models.loading import load_model, load_tokenizer\n"
        "cfg = RunConfig(model='jane/old', tuning='full', max_length=32)\n"
        "model, was = load_model(cfg, load_tokenizer(cfg)), load_file(sys.argv[1])\n"
        "assert all(torch.equal(p, was[name].float()) for name, p in model.named_parameters() if name in was)"
    )
    subprocess.run(
        [sys.executable, "-c", code, material / "model" / "model.safetensors"],
        env=local.environment(hub),
        check=True,
        timeout=100,
    )
    asked = hub.requests[before:]
    assert any(path.endswith("pytorch_model.bin") for _, path in asked) and not [
        path for _, path in asked if "/commits" in path or "/discussions" in path
    ]


@pytest.mark.slow
def test_a_run_survives_a_refusing_hub_and_sync_sends_its_results_later(
    hub, hub_server, material, run_root
):
    hub.create("jane/base")
    hub.put("jane/base", **{p.name: p.read_bytes() for p in (material / "model").iterdir()})
    hub.faults.forbidden = True
    run = hub_server.finish(
        faults.config(
            material,
            run_root,
            hf_repo="jane/refused",
            model="jane/base",
            max_steps=4,
            tuning="lora",
            quantization="none",
        )
    )
    status, newest = run.status(), run.checkpoints()[-1].name
    assert (
        status["state"] == "done"
        and status["not_uploaded"] == [newest, "export"]
        and "pushed_to" not in status
    )
    assert any(
        "not uploaded to jane/refused" in r
        and r.endswith(f"multigpu-ft sync {run.path}")
        and "you may not" in r
        for r in status["remarks"]
    ), status
    command = [forks.command(), "sync", str(run.path), "--json"]
    failed = subprocess.run(
        command, env=local.environment(hub), capture_output=True, text=True, timeout=100
    )
    assert failed.returncode == 1 and json.loads(failed.stdout)["hub"]["not_uploaded"] == [
        newest,
        "export",
    ]
    hub.faults.end()
    done = subprocess.run(
        command, env=local.environment(hub), capture_output=True, text=True, timeout=100
    )
    assert (
        done.returncode == 0
        and json.loads(done.stdout)["hub"]["pushed_to"] == f"{hub.url}/jane/refused"
    ), done.stderr
    assert (
        local.is_there(hub, run, newest)
        and run.status()["pushed_to"]
        and run.status()["not_uploaded"] == []
    )
    card = hub.read("jane/refused", "README.md").decode()
    assert "library_name: peft" in card and "base_model: jane/base" in card
    # The code that the card shows.
    code = re.search(r"```python\n(from peft.*?)```", card, re.S)[1]
    subprocess.run(
        [sys.executable, "-c", code], env=local.environment(hub), check=True, timeout=100
    )


def test_the_uploader_ends_with_rank_0(hub, hub_server, material, run_root):
    hub.faults.bytes_per_second = 1000
    run, agent = hub_server.start(
        faults.config(material, run_root, hf_repo="jane/killed", save_every=2, num_epochs=20)
    )
    pid = until(
        lambda: [p.pid for p in processes(run.path) if "multigpu_ft.hub.upload" in p.cmdline()],
        30,
        "an uploader",
    )
    until(lambda: read_record(run)["attempts"], 30, "something being sent")
    os.kill(run.status()["pids"]["ranks"][0], signal.SIGKILL)
    until(lambda: all(map(faults.gone, pid)), 10, "its end")
    faults.wait_for_end(run, agent)


def test_a_killed_uploader_is_restarted_at_the_end(hub, run, monkeypatch):
    for name, value in local.environment(hub).items():
        monkeypatch.setenv(name, value)
    uploader = Uploader(run)
    until(lambda: read_record(run)["attempts"], 30, "its start")
    for process in processes(run.path):
        process.kill()
    assert uploader.finish() == (
        {"pushed_to": f"{hub.url}/{run.config().hf_repo}", "not_uploaded": []},
        [],
    )
    assert local.is_there(hub, run, "export") and not processes(run.path)


def test_a_stop_request_does_not_wait_for_uploads(hub, run, monkeypatch):
    monkeypatch.setattr("multigpu_ft.hub.upload._HURRIED_S", 1.0)
    hub.faults.bytes_per_second = 1000
    for name, value in local.environment(hub).items():
        monkeypatch.setenv(name, value)
    uploader, begun = Uploader(run), time.monotonic()
    about, remarks = uploader.finish(lambda: True)
    assert (
        about == {"not_uploaded": [run.checkpoints()[0].name, "export"]}
        and "multigpu-ft sync" in remarks[0]
        and time.monotonic() - begun < 30
    )
    assert not processes(run.path)


def test_launch_asks_the_hub_before_it_starts_a_process(hub, client, material, run_root, tmp_path):
    run = local.make_run(
        tmp_path / "sent",
        "jane/launched",
        model=str(material / "model"),
        dataset=str(material / "texts.jsonl"),
    )
    local.add_checkpoint(run, 1, random.Random(0))
    client("push", run=str(run.path))
    code = (
        "import sys, json; from multigpu_ft import launch, RunConfig\n"
        "for settings in json.loads(sys.argv[1]):\n"
        "    try: launch(RunConfig(**settings))\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "assert 'torch' not in sys.modules"
    )
    common = {
        "run_root": str(run_root),
        "model": str(material / "model"),
        "dataset": str(material / "texts.jsonl"),
    }
    resuming = [
        {"resume_file": "hub:jane/nothing"},
        {"resume_file": "hub:x"},
        {"resume_file": "hub:jane/launched", "text_field": "label"},
    ]
    asked = [{"hf_repo": "bob/model"}, *resuming]
    command = [
        sys.executable,
        "-c",
        code,
        json.dumps([{**common, **settings} for settings in asked]),
    ]
    told = subprocess.run(
        command, env=local.environment(hub), capture_output=True, text=True, timeout=100
    )
    lines = told.stdout.splitlines()
    assert len(lines) == 4 and not told.returncode, told
    reasons = (
        "jane, who can't write to bob's repositories",
        "no readable model repository jane/nothing",
        "not of the form hub:user/repo",
        "belongs to another run (fields:",
    )
    assert all(reason in line for reason, line in zip(reasons, lines, strict=True)), lines
    assert not run_root.exists() or not list(run_root.iterdir()), "nothing was started"


def test_the_cell_shows_uploads(hub, hub_server, material, run_root):
    hub_server.finish(faults.config(material, run_root / "a", hf_repo="jane/told", max_steps=4))
    cfg = faults.config(
        material,
        run_root / "b",
        max_steps=1,
        start_idx=24,
        end_idx=48,
        resume_file="hub:jane/told",
        hf_repo="jane/told",
    )
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in cfg.model_dump(exclude_defaults=True).items()
    ]
    done = subprocess.run(
        [forks.command(), "train", *flags],
        env=local.environment(hub),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "continues from checkpoint model_0-48-step-4 of jane/told on the Hub, revision"
        in done.stderr
    )
    assert "rows 24–48 were trained before" in done.stderr
    assert re.search(rf"uploaded +{re.escape(hub.url)}/jane/told", done.stdout)


# -- cards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, says, says_not",
    [
        (
            {"model": "facebook/opt-125m", "tuning": "lora"},
            ["library_name: peft", "base_model: facebook/opt-125m", "AutoPeftModelForCausalLM"],
            ["merged"],
        ),
        (
            {"tuning": "lora"},
            ["library_name: peft", "PeftModel.from_pretrained(base", "builtin:opt-tiny"],
            ["base_model"],
        ),
        (
            {"model": "builtin:smollm2-135m", "tuning": "lora"},
            ["base_model: HuggingFaceTB/SmolLM2-135M-Instruct", "AutoPeftModelForCausalLM"],
            ["builtin:smollm2-135m`", "merged"],
        ),
        (
            {"model": "user/small-GGUF/small-Q8_0.gguf", "tuning": "lora"},
            ["base_model: user/small-GGUF", "PeftModel.from_pretrained(base"],
            ["AutoPeft"],
        ),
        (
            {"tuning": "lora", "merge_adapter": True},
            ["library_name: transformers", "merged into the weights", "AutoModelForCausalLM"],
            ["AutoPeft"],
        ),
        (
            {"task": "classification", "dataset": "user/data"},
            ["text-classification", "AutoModelForSequenceClassification", "- user/data"],
            ["CausalLM"],
        ),
        (
            {"dataset": "/home/jane/texts.jsonl", "eval_dataset": "/home/jane/held-out.jsonl"},
            ["`texts.jsonl`", "held-out.jsonl"],
            ["/home", "datasets"],
        ),
    ],
)
def test_a_card_describes_the_model_and_how_to_load_it(tmp_path, settings, says, says_not):
    run = RunDir.create(RunConfig(run_root=str(tmp_path), **settings), 100)
    run.update_status(
        export="export",
        eval_before={"loss": 2.0, "accuracy": 0.5},
        eval_after={"loss": 1.5, "accuracy": 0.75},
    )
    (run.path / "report" / "evaluation.json").write_text(json.dumps({"verdict": "better"}))
    card = model_card(run)
    assert all(
        words in card
        for words in [
            *says,
            "| held-out accuracy | 50.0 % | 75.0 % |",
            "Compared with the base model: better",
        ]
    ), card
    assert not any(words in card for words in [*says_not, str(tmp_path), "license"]), card


# -- on another machine ---------------------------------------------------------------------------------------------


def test_a_model_in_another_folder_must_have_the_same_weights(material, tmp_path):
    cfg = faults.config(material, tmp_path)
    stored = {**fingerprint(cfg), "contents": contents(cfg)}
    shutil.copytree(material / "model", tmp_path / "model")
    moved = cfg.replace(model=str(tmp_path / "model"))
    assert difference(stored, fingerprint(moved)) and not difference(
        at_home(stored, moved), fingerprint(moved)
    )
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-10] ^= 1
    weights.write_bytes(content)
    assert "model: checkpoint" in difference(at_home(stored, moved), fingerprint(moved))

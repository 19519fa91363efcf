import json
import re
import signal
import socket
import time

import pytest
from harness.runs import NBS, multigpu_ft

from multigpu_ft import Run, RunConfig, RunDir, __version__
from multigpu_ft.cli import _SUMMARIES, _VERBS, describe


def test_train_and_runs(tmp_path, run_root):
    (tmp_path / "x.jsonl").write_text(
        "".join(
            json.dumps({"text": f"number {i} is followed by {i + 1}"}) + "\n" for i in range(600)
        )
    )
    settings = "--dataset x.jsonl --start-idx 0 --end-idx 500 --batch-size 8 --packing padded"
    done = multigpu_ft("train", *settings.split(), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (
        result["state"] == "done"
        and result["step"] == 32
        and result["checkpoint"] == "opt-tiny_0-500-epoch-1"
    )
    listed = multigpu_ft("runs", "--json", cwd=tmp_path)
    assert [r["run"] for r in json.loads(listed.stdout)] == [result["run"]]
    asked = ("ask", result["run"], "number 3 is", "--max-new-tokens", "4", "--temperature", "0")
    done = multigpu_ft(*asked, "--compare", cwd=tmp_path)
    before, after = re.fullmatch(r"before:\n(.*)\nafter:\n(.*)\n", done.stdout, re.S).groups()
    done = multigpu_ft(*asked, "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)["run"]
    assert answer["text"] == after and answer["model"] == "opt-tiny_0-500-epoch-1"
    done = multigpu_ft(*asked, "--base", cwd=tmp_path)
    assert done.stdout == f"{before}\n" and "was loaded" in done.stderr
    told = multigpu_ft("runs", "--last", cwd=tmp_path).stdout
    assert (
        re.search(r"first-step loss  \d\.\d{4} → \d\.\d{4} nats per token", told)
        and "loss.png" in told
        and "export" in told
    )


def test_failures_end_non_zero_with_one_message(tmp_path):
    for arguments, reason in (
        (("train", "--dataset", "none.jsonl"), "DataError: dataset 'none.jsonl'"),
        (("train", "--preset", "nope"), "ConfigError: unknown preset 'nope'"),
        (("train", "--batch-size", "0"), "batch_size"),
        (("train", "--strat-idx", "0"), "strat-idx"),
        (("train", "--hf-token", "abc"), "'hf_token' looks like a secret"),
        (("fly",), "unknown verb 'fly'; use one of: train"),
    ):
        done = multigpu_ft(*arguments, cwd=tmp_path)
        assert (
            done.returncode != 0
            and reason in done.stderr + done.stdout
            and "Traceback" not in done.stderr
        ), (
            arguments,
            done,
        )


def test_a_question_to_no_run_ends_with_one_sentence(tmp_path):
    done = multigpu_ft("ask", "runs/nothing", "Why?", cwd=tmp_path)
    assert done.returncode == 1 and "is not a run directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_made_from_the_fields(tmp_path):
    shown = multigpu_ft("train", "--help", cwd=tmp_path)
    assert (
        shown.returncode == 0
        and "--start-idx" in shown.stdout
        and "first row of the slice" in shown.stdout
        and "--node-rank N" in shown.stdout
    )
    assert "opt-1.3b-arxiv" in multigpu_ft("presets", cwd=tmp_path).stdout


def test_help_has_a_line_for_each_verb_and_each_verb_its_own_text(tmp_path):
    shown = multigpu_ft("--help", cwd=tmp_path).stdout
    for verb, summary in _SUMMARIES.items():
        assert f"  {verb:8}  {summary}\n" in shown
    assert list(_SUMMARIES) == list(_VERBS)
    for verb in ("estimate", "runs", "generate", "notebook"):
        own = multigpu_ft(verb, "--help", cwd=tmp_path)
        assert own.returncode == 0 and _SUMMARIES[verb] in own.stdout
        assert "Raises" not in own.stdout and "RunConfig" not in own.stdout
    targets = multigpu_ft("deploy", "--help", cwd=tmp_path).stdout
    assert "\n  kubernetes  Write the manifests" in targets
    assert multigpu_ft("--version", cwd=tmp_path).stdout == f"multigpu-ft {__version__}\n"


def test_a_mistyped_verb_gets_a_suggestion_and_exit_code_2(tmp_path):
    done = multigpu_ft("trian", cwd=tmp_path)
    assert done.returncode == 2 and "unknown verb 'trian' (did you mean 'train'?)" in done.stderr
    done = multigpu_ft("deploy", "kubernets", cwd=tmp_path)
    assert done.returncode == 1 and "(did you mean 'kubernetes'?)" in done.stderr


def test_deploy_takes_a_preset_or_a_file(tmp_path):
    deploy = ("deploy", "kubernetes", "--resources", NBS / "examples" / "resources.yaml")
    done = multigpu_ft(*deploy, "--preset", "tiny", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["name"] == "opt-tiny-0-5000", done.stderr
    both = ("--preset", "tiny", "--config", "c.json")
    for more, reason in (((), "--config FILE, or a preset"), (both, "use only one of them")):
        done = multigpu_ft(*deploy, *more, cwd=tmp_path)
        assert done.returncode == 1 and reason in done.stderr


def lines(shown):
    "Return the lines of a summary, with two spaces after the name of each."
    return [re.sub(r"^(\w+)  +", r"\1  ", line) for line in shown.splitlines()]


def test_the_last_run_says_why_it_failed(tmp_path, run_root, failing_rank):
    settings = "--end-idx 500 --packing padded --run-name mine --save-every 2"
    fault = {**failing_rank, "FAIL_AFTER_A_SAVE": "1"}
    failed = multigpu_ft("train", *settings.split(), cwd=tmp_path, **fault)
    assert failed.returncode == 1
    shown = lines(multigpu_ft("runs", "--last", cwd=tmp_path).stdout)
    log = run_root / "mine" / "logs" / "rank1.log"
    assert shown[:3] == [
        f"run  {run_root / 'mine'}  (failed)",
        "why  rank 1 raised ZeroDivisionError: planted in rank 1",
        f"log  {log}",
    ]
    saved, resume = shown[-2:]
    assert saved.startswith("saved  opt-tiny_0-500-step-")
    assert resume.startswith("resume  multigpu-ft train --run-name mine --end-idx 500")
    (told,) = json.loads(multigpu_ft("runs", "--last", "--json", cwd=tmp_path).stdout)
    assert told["state"] == "failed" and told["log"] == str(log)
    assert told["why"] == "rank 1 raised ZeroDivisionError: planted in rank 1"
    done = multigpu_ft(*told["resume"].split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumes from its checkpoint opt-tiny_0-500-step" in done.stderr


KILLED = {"rank": 1, "pid": 7, "exitcode": -signal.SIGKILL}
REFUSED = {"rank": 0, "type": "DataError", "clear": True, "text": "no column 'text'"}


@pytest.mark.parametrize(
    "status, why",
    [
        ({"state": "failed", "failure": KILLED}, "rank 1 (pid 7) was killed by signal 9 (SIGKILL)"),
        ({"state": "failed", "failure": REFUSED}, "no column 'text'"),
        ({"state": "failed", "failure": {"rank": 0, "text": "a\n" * 50}}, "[42 more lines"),
        ({"state": "running", "pids": {}}, "all processes of mine disappeared 3 h ago"),
        ({"state": "stopped", "message": "killed"}, "killed"),
        ({"state": "stopped"}, "it was asked to stop: by Stop, an interrupt or run.stop()"),
    ],
)
def test_every_end_has_its_reason(status, why, tmp_path):
    run_dir = RunDir.create(RunConfig(run_root=str(tmp_path), run_name="mine"))
    run_dir.log_file(1).write_text("the last line of its log\n")
    if status["state"] == "stopped" and "message" not in status:
        run_dir.request_stop()
    run_dir.update_status(host=socket.gethostname(), **status)
    content = json.loads((run_dir.path / "status.json").read_text())
    (run_dir.path / "status.json").write_text(
        json.dumps({**content, "heartbeat": time.time() - 3 * 3600})
    )
    shown = "\n".join(lines(describe(Run(run_dir))))
    assert f"why  {why.splitlines()[0]}" in shown or why in shown
    assert "the last line" not in shown and "Traceback" not in shown
    assert shown.endswith(f"resume  multigpu-ft train --run-root {tmp_path} --run-name mine")


def test_help_lists_flags_by_group(tmp_path):
    groups = {
        "train": "run model data training parallelism memory checkpoint tracking",
        "generate": "model questions answers files processes",
        "evaluate": "models rows forgetting computing samples report",
    }
    for verb, names in groups.items():
        shown = multigpu_ft(verb, "--help", cwd=tmp_path).stdout
        assert re.findall(r"╭─ (\w+) options ─", shown) == names.split()
    assert shown.index("rows options") < shown.index("--start-idx") < shown.index("forgetting opt")

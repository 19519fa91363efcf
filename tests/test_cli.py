import json
import re

from harness.runs import multigpu_ft


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
    told = multigpu_ft("runs", "--last", cwd=tmp_path).stdout
    assert "at the start ->" in told and "loss.png" in told and "export" in told


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


def test_help_is_made_from_the_fields(tmp_path):
    shown = multigpu_ft("train", "--help", cwd=tmp_path)
    assert (
        shown.returncode == 0
        and "--start-idx" in shown.stdout
        and "first row of the slice" in shown.stdout
        and "--node-rank N" in shown.stdout
    )
    assert "opt-1.3b-arxiv" in multigpu_ft("presets", cwd=tmp_path).stdout


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

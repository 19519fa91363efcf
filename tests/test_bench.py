"""The benches and the tests that need a GPU, as far as a CPU can tell: what they name exists, their
settings are valid, all arms of a bench run on one device, and the first hour on a GPU has its plan."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import test_gpu
from conftest import asks_for_gpus
from harness import waits
from harness.runs import REPO

sys.path.insert(0, str(REPO / "bench"))
import first_hour  # noqa: E402
import memory  # noqa: E402
import training  # noqa: E402

BENCHES = sorted((REPO / "bench").glob("*.py"))
ON_GPUS = [
    *(path for path in BENCHES if path.stem != "launchers"),
    REPO / "tests" / "test_gpu.py",
    REPO / "tests" / "harness" / "waits.py",
]
# what a bench or the ranks of one import, and what needs no device
WITHOUT_ARMS = {"gpus", "paired", "bare", "ours", "peers", "intervals", "first_hour"}


def vanished(source):
    """Return what `source` imports from this project and doesn't find there, and calls of such names
    with arguments that they don't take."""
    tree, found, known = ast.parse(source), [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and is_ours(node.module):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if alias.name == "*":
                    continue
                try:
                    known[alias.asname or alias.name] = named(module, alias.name)
                except (AttributeError, ImportError):
                    found.append(f"line {node.lineno}: {node.module}.{alias.name}")
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = node.func.id
            if called in known and called not in own and not fits(known[called], node):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def is_ours(module):
    return module.split(".")[0] in ("multigpu_ft", "harness", *(path.stem for path in BENCHES))


def named(module, name):
    try:
        return getattr(module, name)
    except AttributeError:
        return importlib.import_module(f"{module.__name__}.{name}")


def fits(function, call):
    "Return whether `function` takes the arguments of `call`, as far as they are written out."
    if any(isinstance(a, ast.Starred) for a in call.args) or None in [k.arg for k in call.keywords]:
        return True
    try:
        inspect.signature(function).bind(*call.args, **{k.arg: k.value for k in call.keywords})
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_what_benches_and_gpu_tests_name_exists(path):
    assert not vanished(path.read_text())


def test_a_vanished_name_is_noticed():
    source = (
        "from multigpu_ft.data.batches import Order, epoch_steps\n"
        "def f():\n    from multigpu_ft.training.setup import make_strategy\n"
        "    make_strategy(1)\n    epoch_steps(*f(), order=1)\n"
    )
    assert vanished(source) == [
        "line 1: multigpu_ft.data.batches.Order",
        "line 4: make_strategy(1)",
    ]


def test_the_settings_of_the_gpu_tests_are_valid(tmp_path):
    assert len(list(test_gpu.every_config(tmp_path))) > len(test_gpu.WAYS)


def test_steps_are_counted_in_a_rank_that_is_set_up_as_one_of_a_run():
    from multigpu_ft import launch

    found = launch(waits.count, test_gpu.of_a_step("single", "fp32", "packed"), nproc=1)
    assert found["device"] == "cpu" and found["packing"] == "packed" and found["finite"]
    assert found["waits"] == 0 and found["phases"]["forward_backward"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp, bf16", "qlora, fsdp", "BERT"])
def test_the_memory_bench_runs_as_rank_0_alone(name, tmp_path):
    import torch

    architecture, settings = memory.ON_CPU[name]
    memory.save_model(architecture, str(tmp_path), settings.get("task"))
    cfg = memory.configuration(str(tmp_path), settings)
    found = memory.measure_alone(cfg, torch.device("cpu"))
    # torch 2.10 gives what ranks that aren't there would send as memory that nothing was written to
    assert found["seconds"] > 0 and (found["finite"] or torch.__version__ < "2.11")


# -- hidden GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "marks, shown",
    [
        ("", False),
        ("not slow", False),
        ("slow", False),
        ("not gpu", False),
        ("slow and not gpu", False),
        ("gpu", True),
        ("gpu and not slow", True),
        ("gpu or not slow", True),
    ],
)
def test_gpus_are_shown_only_to_tests_that_need_one(marks, shown):
    assert asks_for_gpus(marks) == shown


def test_what_a_test_starts_sees_no_gpu(pytestconfig, tmp_path, monkeypatch):
    if asks_for_gpus(pytestconfig.option.markexpr):
        pytest.skip("needs a CUDA GPU less")
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho '0, GPU-1, Tesla T4, 15360, 3, 550.1, 7.5'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    code = (
        "from multigpu_ft.run.environment import installed_gpus, visible_gpus\n"
        "print(len(installed_gpus()), len(visible_gpus()))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "0"]


def test_the_makefile_hides_gpus_from_notebooks():
    lines = [line for line in (REPO / "Makefile").read_text().splitlines() if "/nbdev_test" in line]
    assert lines and all(line.strip().startswith("CUDA_VISIBLE_DEVICES= ") for line in lines)


@pytest.mark.parametrize(
    "path", [p for p in BENCHES if p.stem not in WITHOUT_ARMS], ids=lambda path: path.stem
)
def test_a_bench_hides_the_gpus_unless_it_measures_them(path):
    tree = ast.parse(path.read_text())
    calls = [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert "hide_gpus" in calls


def test_a_bench_can_be_shown_some_of_the_gpus(tmp_path, monkeypatch):
    import gpus

    fake = tmp_path / "nvidia-smi"
    lines = [f"echo '{i}, GPU-{i}, Tesla T4, 15360, 3, 550.1, 7.5'\n" for i in range(4)]
    fake.write_text("#!/bin/sh\n" + "".join(lines))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for before, after in ((None, "0,1"), ("2,1,3", "2,1"), ("3", "3")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
        if before is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert gpus.use_gpus(2) == len(after.split(","))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after
    gpus.hide_gpus()
    with pytest.raises(SystemExit, match="there is no GPU here"):
        gpus.use_gpus(1)


# -- the first hour on a GPU ------------------------------------------------------------------------


def first_hour_says(*words):
    command = [sys.executable, "bench/first_hour.py", *words]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)


def test_the_plan_of_the_first_hour_can_be_read_without_a_gpu():
    told = first_hour_says("--list")
    assert told.returncode == 0
    assert all(f"{step.name}, at most" in told.stdout for step in first_hour.PLAN)
    without = first_hour_says()
    assert without.returncode == 1 and "There is no GPU here" in without.stderr


def test_the_first_hour_names_tests_and_arms_that_exist():
    ids = collected()
    for step in first_hour.PLAN:
        words = step.command
        if "-k" in words:
            assert [i for i in ids if selects(words[words.index("-k") + 1], i)], step.name
        elif words[1].startswith("bench/"):
            assert (REPO / words[1]).is_file()
        if "bench/memory.py" in words:
            assert set(words[3:]) <= set(memory.gpu_configurations())
        if "bench/training.py" in words:
            assert [p for p in training.GPU_PARTS if words[words.index("--only") + 1] in p]
    assert len({step.name for step in first_hour.PLAN}) == len(first_hour.PLAN)


def collected():
    "Return the names of the tests that need a GPU."
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu"]
    told = subprocess.run(
        [*command, "tests/test_gpu.py"], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    return re.findall(r"test_gpu\.py::(.+)", told.stdout)


def selects(expression, name):
    "Return what pytest makes of `-k expression` for the test `name`."

    def told(word):
        is_operator = word[0] in ("and", "or", "not")
        return word[0] if is_operator else str(word[0].lower() in name.lower())

    return eval(re.sub(r"[\w-]+", told, expression))


def fake_step(name, code, limit_s=30, **more):
    return first_hour.Step(name, f"{name}?", (sys.executable, "-c", code), limit_s, **more)


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(tmp_path, capsys):
    wait = "import time; print('begun', flush=True); time.sleep(60)"
    write = f"open({str(tmp_path / 'numbers.json')!r}, 'w').write('[7]')"
    told = "print('tests/test_gpu.py::test_it[a b] PASSED  [ 50%]\\ntests/x.py::test_no FAILED'); 1 / 0"
    plan = (
        fake_step("fails", told),
        fake_step("hangs", wait, limit_s=1),
        fake_step("passes", write, numbers="numbers.json"),
        fake_step("skips", "print('tests/test_gpu.py::test_it SKIPPED (needs a GPU)')"),
        fake_step("too-long", "1", limit_s=10_000),
    )
    first_hour.run(plan, minutes=5, results=tmp_path)
    found = {
        step.name: json.loads((tmp_path / f"gpu-{step.name}.json").read_text()) for step in plan
    }
    assert {name: record["result"] for name, record in found.items()} == {
        "fails": "failed",
        "hangs": "failed",
        "passes": "passed",
        "skips": "failed",
        "too-long": "skipped",
    }
    assert (
        found["fails"]["exit_code"] == 1 and "ZeroDivisionError" in found["fails"]["last_lines"][-1]
    )
    assert found["fails"]["tests"] == {"test_it[a b]": "PASSED", "test_no": "FAILED"}
    assert found["hangs"]["exit_code"] is None and "longer than 1 s" in found["hangs"]["why"]
    assert found["hangs"]["last_lines"][0] == "begun" and found["hangs"]["seconds"] < 30
    assert found["passes"]["numbers"] == [7] and found["passes"]["command"].startswith("python -c")
    assert "are left" in found["too-long"]["why"]
    shown = capsys.readouterr().out
    assert all(step.name in shown for step in plan) and "1 passed, 3 failed, 1 skipped" in shown
    assert str(REPO) not in json.dumps(found), "results don't name this machine's folders"


def test_a_step_that_these_gpus_cannot_run_is_skipped(tmp_path):
    from multigpu_ft.run.environment import Device

    t4 = Device(0, "GPU-1", "Tesla T4", 15 * 2**30, 0, "550.1", "7.5")
    plan = (
        fake_step("two", "1", gpus=2),
        fake_step("large", "1", memory_gib=38),
        fake_step("fits", "1"),
    )
    records = first_hour.run(plan, minutes=5, results=tmp_path, devices=[t4])
    assert [record["result"] for record in records] == ["skipped", "skipped", "passed"]


def test_the_page_of_the_first_hour_names_every_step_and_row():
    page = (REPO / "bench" / "README.md").read_text().partition("## First hour on a GPU")[2]
    assert all(f"`{step.name}`" in page for step in first_hour.PLAN)
    assert {int(row) for row in re.findall(r"^\| (\d+) \|", page, re.M)} == set(range(1, 18))

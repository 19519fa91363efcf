"""Names that users type, read on disk or pass to papermill stay the same: today's names are compared
with a recorded list."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import multigpu_ft

RECORD = Path(__file__).with_name("public_names.json")


def members(thing):
    "Return the parameters of a function, or the public members of a class and its bases, with their parameters."
    if inspect.isclass(thing):
        ours = [cls for cls in reversed(thing.__mro__) if cls.__module__.startswith("multigpu_ft")]
        own = {
            name: value
            for cls in ours
            for name, value in vars(cls).items()
            if not name.startswith("_")
        }
        return {
            name: list(inspect.signature(v).parameters) if inspect.isfunction(v) else ""
            for name, v in own.items()
        }
    return list(inspect.signature(thing).parameters)


def public_names():
    from multigpu_ft import RunConfig, cli
    from multigpu_ft.run import run_dir
    from multigpu_ft.run.config import PRESETS

    skipped = ("model_config", "model_fields", "model_computed_fields")
    names = {name: members(getattr(multigpu_ft, name)) for name in sorted(multigpu_ft.__all__)}
    names["RunConfig"] = {
        k: v for k, v in names["RunConfig"].items() if k not in [*skipped, *RunConfig.model_fields]
    }
    return {
        "names": names,
        "settings": list(RunConfig.model_fields),
        "presets": list(PRESETS),
        "verbs": list(cli._VERBS),
        "exit codes": {"stopped": run_dir.STOPPED_EXIT_CODE},
        "states": [*run_dir.LIVE_STATES, *run_dir.FINAL_STATES],
        "files": [
            getattr(run_dir, f"{n}_FILE")
            for n in ("PLAN", "FAILURE", "GENERATION", "HUB", "COMMIT")
        ],
        "commands": ["multigpu_ft.training", "multigpu_ft.generation"],
    }


def test_public_names_match_the_record():
    "Add a new name to the record by hand. A missing name breaks the notebooks that used it."
    assert public_names() == json.loads(RECORD.read_text())


def test_the_recorded_commands_start_ranks():
    for module in json.loads(RECORD.read_text())["commands"]:
        done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
        assert "IndexError" in done.stdout + done.stderr, (
            "it did not start, or did not ask for its run directory"
        )


def test_a_run_directory_has_the_recorded_layout(tmp_path):
    from multigpu_ft import RunConfig, RunDir

    run = RunDir.create(RunConfig(run_root=str(tmp_path), run_name="a"))
    rank = str(run.log_file(1)), str(run.error_file(1)), str(run.beat_file(1))
    assert [Path(path).relative_to(run.path).as_posix() for path in rank] == [
        "logs/rank1.log",
        "errors/rank1.json",
        "beats/rank1",
    ]
    run.request_stop()
    run.update_status(step=1)
    files = {
        path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()
    }
    assert files == {"config.json", "status.json", "stop"}

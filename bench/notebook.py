"""Measure the notebook experience in JupyterLab and a real browser.

It measures the seconds from the form to reattaching to a run, the cost of the panel, and the size
of a notebook in which a long run was watched.

python bench/notebook.py --rounds 5 --steps 20000"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gpus import hide_gpus  # noqa: E402
from harness.browser import Lab, make_notebook  # noqa: E402

RESULTS = Path(__file__).parent / "results"
IMPORTS = "from multigpu_ft import Run, RunConfig, form, launch\n"
COST = """
import time, json
from multigpu_ft import Run
from multigpu_ft.display.panel import Panel
run = Run('runs/long')
panel = Panel(run)
times = []
for _ in range(50):
    panel._curve.recent.clear(); panel._drawing.value = ''
    t = time.perf_counter(); panel.show(now=True); times.append(time.perf_counter() - t)
print(json.dumps({'redraw_ms': 1000 * sorted(times)[25], 'points': len(panel._curve.points)}))
"""


def journey(folder):
    "Return the seconds that a user waits for each step."
    cells = (
        IMPORTS + "form(RunConfig(run_root='runs', packing='padded', batch_size=2, nproc=2))",
        IMPORTS + "run = Run.attach('runs/mine')",
    )
    legs, clock = {}, time.monotonic()

    def leg(name):
        nonlocal clock
        legs[name], clock = round(time.monotonic() - clock, 2), time.monotonic()

    with Lab(folder, env={"OMP_NUM_THREADS": "1"}) as lab:
        page = lab.open(make_notebook(folder / "a.ipynb", *cells))
        clock = time.monotonic()
        page.run_cell(0)
        page.field("run_name").wait_for()
        leg("the cell with the form to the form")
        page.type("run_name", "mine")
        page.type("end_idx", "4000")
        page.wait_for_text("end_idx=4000", 20, 0)
        leg("two fields filled to the call that is shown")
        page.click("Run")
        page.wait_for_text(re.compile(r"step [1-9]\d* of 1,000"), 90, 0)
        leg("Run to the first step on the panel")
        time.sleep(3)
        clock = time.monotonic()
        page.click("Stop (saves)")
        page.wait_for_text("the same settings again continue", 60, 0)
        leg("Stop to saved, stopped, and the summary there")
        page.restart_kernel()
        page.run_cell(1)
        page.wait_for_text(re.compile(r"opt-tiny_0-4000-step-\d+ \("), 30, 1)
        leg("kernel restart and attach to the summary")
    return legs


def long_run(folder, steps):
    """Watch a run of many steps, save the notebook, and open it again without running a cell."""
    epochs = max(1, steps // 10_000)
    settings = (
        "run_root='runs', run_name='long', packing='padded', batch_size=1, max_length=16, "
        f"nproc=1, end_idx={steps // epochs}, num_epochs={epochs}"
    )
    with Lab(folder, env={"OMP_NUM_THREADS": "1"}) as lab:
        page = lab.open(
            make_notebook(
                folder / "long.ipynb", IMPORTS + f"run = launch(RunConfig({settings}))", COST
            )
        )
        begun = time.monotonic()
        page.run_cell(0, wait=3000)
        seconds = time.monotonic() - begun
        page.run_cell(1)
        page.wait_for_text("redraw_ms", 30, 1)
        cost = json.loads(re.search(r"\{.*redraw_ms.*\}", page.output(1).inner_text())[0])
        page.page.evaluate(
            "window.panel.content.activeCellIndex = 1; window.jupyterapp.commands.execute('notebook:delete-cell')"
        )
        page.save()
        size = (folder / "long.ipynb").stat().st_size
    done = [
        m["step"]
        for m in map(
            json.loads, (folder / "runs" / "long" / "metrics.jsonl").read_text().splitlines()
        )
    ]
    with Lab(folder) as lab:
        page = lab.open(folder / "long.ipynb")
        page.wait_for_text("done", 20, 0)
        page.page.locator(".jp-OutputArea img").wait_for()
        page.screenshot(RESULTS / "reopened.png")
    return {
        "steps": done[-1],
        "lines": len(done),
        "seconds": round(seconds, 1),
        "notebook_bytes": size,
        **cost,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    hide_gpus()
    path = RESULTS / "notebook.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if options.rounds:
        found["journeys"] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found["journeys"].append(journey(Path(folder)))
            print(found["journeys"][-1], flush=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    for name in found["journeys"][0] if options.rounds else ():
        seconds = sorted(j[name] for j in found["journeys"])
        print(
            f"| {name} | {statistics.median(seconds):.1f} s ({seconds[0]:.1f}-{seconds[-1]:.1f}) |"
        )
    if options.steps:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found["long_run"] = long_run(Path(folder), options.steps)
        print(found["long_run"])
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

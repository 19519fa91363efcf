"""What a person sees and clicks, in JupyterLab and in the classic notebook."""

import json
import os
import re
import signal

import pytest
from harness.browser import make_notebook
from harness.runs import processes, ranks, running, until

IMPORTS = "from multigpu_ft import Run, RunConfig, form, launch, runs\n"
# while a page shows it, each rank takes a processor for itself
LONG = (
    "RunConfig(run_root='runs', packing='padded', batch_size=2, end_idx=4000, "
    "save_every=50, keep=2, lr_scheduler='cosine', nproc={})"
)


@pytest.fixture
def place(lab):
    "Return a function that starts a lab, `place(theme, **env)`; its runs are gone when the test ends."
    folders = []

    def start(theme="light", app="lab", **env):
        here = lab(theme=theme, app=app, env={"OMP_NUM_THREADS": "1", **env})
        folders.append(here.folder)
        return here

    yield start
    left = [p for folder in folders for p in processes(folder / "runs")]
    for process in left:
        process.kill()
    assert not left, f"processes outlived the run: {left}"


def points(page, cell=0):
    "Return the number of points of the loss curve that a cell shows."
    lines = page.output(cell).locator("svg polyline")
    return len(lines.first.get_attribute("points").split()) if lines.count() else 0


def test_fill_the_form_run_stop_restart_attach_and_resume(place, shots):
    here = place()
    notebook = make_notebook(
        here.folder / "form.ipynb",
        IMPORTS
        + "f = form(RunConfig(run_root='runs', packing='padded', save_every=50, nproc=1))\nf",
        IMPORTS + "run = Run.attach('runs/mine')",
        IMPORTS + "runs('runs')",
        IMPORTS
        + "run = Run('runs/mine')\n"
        + "again = launch(run.config.replace(max_steps=run.status['step'] + 5))",
    )
    page = here.open(notebook)
    page.run_cell(0)
    page.type("run_name", "mine me")
    page.wait_for_text("may hold letters, digits", 20, 0)
    page.type("run_name", "mine")
    page.type("end_idx", "4000")
    page.type("batch_size", "two")
    page.wait_for_text("valid integer", 20, 0)
    page.screenshots(shots, "form-error", page.output(0))
    page.type("batch_size", "2")
    page.wait_for_text("batch_size=2", 20, 0)
    page.screenshots(shots, "form", page.output(0))
    page.click("Run")
    page.wait_for_text(re.compile(r"step \d+ of 2,000"), 60, 0)
    first = until(lambda: points(page), 20, "a curve")
    until(lambda: points(page) > first + 10, 60, "the curve moves")
    page.page.get_by_text("checkpoints", exact=True).click()
    page.wait_for_text(re.compile(r"opt-tiny_0-4000-step-\d+"), 40, 0)
    page.screenshots(shots, "live", page.output(0).locator(".jp-OutputArea-child:has(svg)").first)
    page.click("Stop (saves)")
    page.wait_for_text("stopped", 30, 0)
    page.wait_for_text("resumes from that checkpoint", 10, 0)
    page.restart_kernel()
    page.run_cell(1)
    page.wait_for_text(re.compile(r"opt-tiny_0-4000-step-\d+ \("), 10, 1)
    page.screenshots(shots, "stopped", page.output(1))
    page.run_cell(3, wait=90)
    page.wait_for_text(re.compile(r"resumes from its checkpoint opt-tiny_0-4000-step-\d+"), 10, 3)
    page.run_cell(2)
    page.wait_for_text("done", 5, 2)
    page.screenshots(shots, "runs", page.output(2))


@pytest.mark.slow
def test_a_failure_is_red_and_names_its_cause(place, shots, failing_rank):
    here = place("dark", **failing_rank)
    page = here.open(
        make_notebook(
            here.folder / "a.ipynb",
            IMPORTS + f"run = launch({LONG.format(2)})",
            "'the next cell ran'",
        )
    )
    page.run_all(wait=0)
    page.wait_for_text("failed", 60, 0)
    page.wait_for_text("rank 1 raised ZeroDivisionError: planted in rank 1", 10, 0)
    page.wait(20)
    details = page.output(0).locator("details")
    assert details.count() == 1 and not details.evaluate("e => e.open")
    assert page.output(1).inner_text() == "" if page.output(1).count() else True, (
        "the cell after it did not run"
    )
    page.screenshots(shots, "failed", page.output(0).locator(".jp-OutputArea-child").nth(1))
    details.locator("summary").click()
    page.wait_for_text("Traceback of rank 1", 5, 0)
    page.save()
    outputs = json.loads((here.folder / "a.ipynb").read_text())["cells"][0]["outputs"]
    html = ["".join(o["data"]["text/html"]) for o in outputs if "text/html" in o.get("data", {})]
    assert len(html) == 1 and "ZeroDivisionError" in html[0] and "<script" not in html[0]


@pytest.mark.slow
def test_a_detached_run_is_found_again_alive_killed_or_gone(place, shots):
    here = place()
    attach = IMPORTS + "run = Run.attach(runs('runs')[-1].dir.path)"
    start = IMPORTS + f"run = launch({LONG.format(1)}, wait=False, detach=True)"
    page = here.open(
        make_notebook(here.folder / "a.ipynb", start, IMPORTS + "runs('runs')", attach)
    )
    page.run_cell(0)
    running(here.folder / "runs")
    page.restart_kernel()
    page.run_cell(1)
    page.wait_for_text("running", 10, 1)
    page.run_cell(2)
    page.wait_for_text(re.compile(r"step \d+ of 2,000"), 20, 2)
    before = points(page, 2)
    until(lambda: points(page, 2) > before, 30, "the curve moves in the new kernel")
    page.click("Kill")
    page.click("Really? Nothing is saved")
    page.wait_for_text("killed", 20, 2)
    assert not processes(here.folder / "runs")
    (here.folder / "runs" / "opt-tiny_0-4000").rename(here.folder / "first")
    page.run_cell(0)
    run_dir = running(here.folder / "runs")
    page.restart_kernel()
    for pid in [
        json.loads((run_dir / "status.json").read_text())["pids"]["agent"],
        *ranks(run_dir),
    ]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not processes(here.folder / "runs"), 5, "killed")
    page.run_cell(1)
    page.wait_for_text("processes are gone", 10, 1)
    page.run_cell(2)
    page.wait_for_text(re.compile(r"disappeared .* ago \(killed, or the machine stopped\)"), 10, 2)
    page.screenshots(shots, "gone", page.output(2))


@pytest.mark.slow
def test_stopped_by_its_button_while_the_cell_waits(place, shots):
    here = place()
    page = here.open(
        make_notebook(
            here.folder / "a.ipynb",
            IMPORTS + f"run = launch({LONG.format(1)})",
            "print('then', run.state)",
        )
    )
    page.run_all(wait=0)
    page.wait_for_text(re.compile(r"step [1-9]\d* of 2,000"), 60, 0)
    page.click("Stop (saves)")
    page.wait(30)
    page.wait_for_text("then stopped", 5, 1)
    page.save()
    saved = json.loads((here.folder / "a.ipynb").read_text())["cells"][0]["outputs"]
    assert [sorted(o.get("data", ())) for o in saved] == [
        [],
        ["text/html", "text/plain"],
        ["image/png", "text/plain"],
    ], "nothing in it needs a kernel"


@pytest.mark.slow
def test_the_classic_notebook_shows_the_panel_and_interrupts(place, shots):
    here = place(app="nbclassic")
    page = here.open(
        make_notebook(here.folder / "a.ipynb", IMPORTS + f"run = launch({LONG.format(1)})")
    )
    page.run_cell(0, wait=0)
    page.wait_for_text(re.compile(r"step [1-9]\d* of 2,000"), 60)
    until(lambda: points(page) > 5, 30, "a curve")
    page.screenshot(shots / "classic-live.png")
    page.interrupt()
    page.wait_for_text("stopped", 30)
    page.wait(20)
    page.screenshot(shots / "classic-stopped.png")


def stop_button(page):
    "Return where Stop is within its panel, and None once there is no panel."
    return page.page.evaluate("""() => {
        const stop = [...document.querySelectorAll('button')].find(b => b.textContent.startsWith('Stop'))
        const panel = stop && stop.closest('.jp-OutputArea-child')
        return panel ? stop.getBoundingClientRect().y - panel.getBoundingClientRect().y : null
    }""")


@pytest.mark.slow
def test_nothing_in_the_panel_moves_and_its_curve_tells_values(place, shots):
    held_out = "eval_start_idx=4000, eval_end_idx=4020, eval_every=20, run_name={!r}, max_steps={}"
    cfg = LONG.format(1).rstrip(")") + ", " + held_out + ", resume_file='none')"
    here = place()
    page = here.open(
        make_notebook(
            here.folder / "a.ipynb",
            IMPORTS
            + f"run = launch({cfg.format('a-name-much-longer-than-its-place-in-a-panel', 60)})",
            IMPORTS + f"run = launch({cfg.format('second', 1900)})",
            "run.plot(over=['a-name-much-longer-than-its-place-in-a-panel'])",
        )
    )
    page.run_cell(0, wait=0)
    places = {until(lambda: stop_button(page), 60, "a panel")}
    page.wait_for_text(re.compile(r"step \d+ of 60"), 60, 0)
    while (at := stop_button(page)) is not None:
        places.add(at)
        page.page.wait_for_timeout(100)
    assert len(places) == 1, places
    page.wait(20)
    page.wait_for_text(re.compile(r"held-out loss\s*\d\.\d{4} → \d\.\d{4}"), 5, 0)
    page.wait_for_text(re.compile(r"60 of 60 of slice 0–4,000"), 5, 0)
    name = page.output(0).get_by_title("a-name-much-longer-than-its-place-in-a-panel")
    assert "…" in name.first.inner_text()
    page.run_cell(1, wait=0)
    page.wait_for_text(re.compile(r"step \d\d+ of 1,900"), 60, 1)
    lines = page.output(1).locator("svg polyline")
    before = lines.count()
    page.page.get_by_text("other runs", exact=True).click()
    page.output(1).locator("select").select_option(index=0)
    until(lambda: lines.count() > before, 10, "the other run's curve")
    box = page.output(1).locator("svg[aria-label^=loss]").bounding_box()
    page.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] / 2)
    until(
        lambda: any(
            re.match(r"step \d+: \d\.\d{4}, held-out \d\.\d{4}", words)
            for words in page.output(1).locator(".mft-at text:visible").all_text_contents()
        ),
        10,
        "the values under the mouse",
    )
    page.screenshots(shots, "compared", page.output(1))
    page.click("Stop (saves)")
    page.wait(60)
    page.run_cell(2)
    assert page.output(2).locator("img").count() == 1
    page.screenshots(shots, "laid-over", page.output(2))

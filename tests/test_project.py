"""The rules of this repository: modules come from notebooks, imports point downwards, importing is
cheap, and the README's commands run."""

import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import forks
from harness.runs import BIN, NBS, REPO

PACKAGE = REPO / "multigpu_ft"
# A folder imports only from folders before it, and a file only from files before it in its folder. "" is the root.
FOLDERS = (
    *(
        "run",
        "data",
        "models",
        "distributed",
        "checkpoints",
        "hub",
        "tracking",
        "display",
        "training",
        "memory",
    ),
    *("launcher", "generation", "evaluation", "deploy", ""),
)


def exported_module(notebook):
    text = "".join(
        "".join(cell["source"]) + "\n" for cell in json.loads(notebook.read_text())["cells"]
    )
    return re.search(r"#\| default_exp ([\w.]+)", text)[1]


NOTEBOOKS = [
    notebook for folder in FOLDERS for notebook in sorted((NBS / folder).glob("[0-9]*.ipynb"))
]
ORDER = [exported_module(notebook) for notebook in NOTEBOOKS]


def file_of(module):
    return PACKAGE / f"{module.replace('.', '/')}.py"


def imports(path, package="multigpu_ft"):
    "Return which of our modules the module at `path`, in `package`, imports anywhere."
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [above, node.module]))
            if module.split(".")[0] == "multigpu_ft":
                names = [f"{module}.{alias.name}" for alias in node.names]
                found = [
                    name if name.removeprefix("multigpu_ft.") in ORDER else module for name in names
                ]
                yield from dict.fromkeys(
                    name.removeprefix("multigpu_ft").strip(".") for name in found
                )
        if isinstance(node, ast.Import):
            yield from (
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("multigpu_ft.")
            )


def test_modules_are_what_the_notebooks_export(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(
        REPO, copy, ignore=shutil.ignore_patterns(".venv", "runs", ".git", "*.egg-info")
    )
    subprocess.run([BIN / "nbdev_export"], cwd=copy, check=True)
    expected = {file_of(module) for module in [*ORDER, "_modidx"]}
    for path in expected:
        fresh = copy / path.relative_to(REPO)
        assert fresh.read_text() == path.read_text(), f"{path.relative_to(REPO)} is stale"
    assert {path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"} == expected
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(FOLDERS) - {""}
    assert not any(path.read_text().strip() for path in PACKAGE.glob("*/__init__.py")), (
        "importing a folder must cost nothing"
    )


def test_every_numbered_notebook_is_in_a_known_folder_and_named_like_its_module():
    assert {
        path for path in NBS.rglob("[0-9]*.ipynb") if ".ipynb_checkpoints" not in path.parts
    } == set(NOTEBOOKS)
    for notebook, module in zip(NOTEBOOKS, ORDER, strict=True):
        folder, _, name = module.rpartition(".")
        assert notebook.parent == NBS / folder.replace(".", "/")
        assert notebook.stem[3:] == name.strip("_"), f"{notebook.name} exports {module}"
    for folder in FOLDERS:
        numbers = [
            int(notebook.stem[:2]) for notebook in sorted((NBS / folder).glob("[0-9]*.ipynb"))
        ]
        assert numbers == list(range(1, len(numbers) + 1)), (
            f"{folder or 'nbs'}: the numbers are not the reading order"
        )


def test_tests_are_in_the_folders_of_what_they_test():
    folders = {
        path.parent.relative_to(REPO / "tests").as_posix()
        for path in (REPO / "tests").rglob("test_*.py")
    }
    assert folders == {folder or "." for folder in FOLDERS} | {"second_device"}
    # pytest imports test files by their name alone
    names = [path.name for path in (REPO / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("room", ORDER)
def test_imports_point_downwards(room):
    package = ".".join(["multigpu_ft", *room.split(".")[:-1]])
    for other in imports(file_of(room), package):
        if other:  # "" is the package itself
            assert ORDER.index(other) < ORDER.index(room), (
                f"{room} imports {other}, which comes after it"
            )


def test_an_upward_import_would_be_noticed(tmp_path):
    (tmp_path / "m.py").write_text(
        "from ..launcher.api import launch\nimport multigpu_ft.cli\ndef f():\n    from "
        "multigpu_ft.training import trainer\n"
    )
    found = list(imports(tmp_path / "m.py", "multigpu_ft.run"))
    assert found == ["launcher.api", "cli", "training.trainer"]


@pytest.mark.parametrize("room", ORDER)
def test_exported_code_needs_no_notebook_tooling(room):
    source = file_of(room).read_text()
    assert not re.search(r"^\s*(from|import) (nbdev|fastcore|execnb)|import \*", source, re.M)


@pytest.mark.parametrize(
    "statement, absent",
    [
        ("import multigpu_ft", "torch transformers pydantic numpy matplotlib IPython"),
        ("from multigpu_ft import RunConfig; RunConfig()", "torch transformers numpy matplotlib"),
        ("from multigpu_ft import launch", "torch transformers datasets matplotlib"),
        ("from multigpu_ft import evaluate", "torch transformers datasets"),
        ("from multigpu_ft import generate", "torch transformers datasets"),
        (
            "from multigpu_ft import deploy_kubernetes",
            "torch transformers datasets matplotlib kubernetes",
        ),
    ],
)
def test_the_kernel_side_imports_no_torch(statement, absent):
    code = f"import sys; {statement}; loaded = set(sys.modules) & set({absent.split()!r}); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "notebook", sorted(NBS.rglob("*.ipynb")), ids=lambda p: str(p.relative_to(NBS))
)
def test_notebooks_are_readable(notebook):
    content = json.loads(notebook.read_text())
    assert content["metadata"]["kernelspec"]["language"] == "python", "papermill needs it"
    first = "".join(content["cells"][0]["source"])
    recipes = ("train", "slices", "evaluate", "generate")
    recipe = notebook.parent == NBS and notebook.stem in recipes
    assert first.startswith("# ") and (recipe or "\n> " in first), (
        "needs a title, and a summary in one line"
    )


def test_no_file_names_the_machine_it_was_made_on():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        content = (REPO / name).read_bytes().decode("utf-8", "ignore")
        assert f"{REPO}/" not in content and f"{Path.home()}/" not in content, name


PAGES = [
    *REPO.glob("*.md"),
    *REPO.glob("*/README.md"),
    *NBS.rglob("*.ipynb"),
    *REPO.glob("kaggle/*/*.ipynb"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = "".join(
            "".join(cell["source"]) + "\n"
            for cell in json.loads(text)["cells"]
            if cell["cell_type"] == "markdown"
        )
    links = [
        link.split("#")[0]
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))
        if "://" not in link
    ]
    assert not [link for link in links if link and not (page.parent / link).exists()]


@pytest.mark.parametrize("room", ORDER)
def test_nothing_from_elsewhere_is_unpickled_or_run(room):
    """SECURITY.md says so: pickle goes only from a notebook to its own ranks, and no code of a
    model or a dataset is run. Nor are modes changed."""
    source = file_of(room).read_text()
    called = [
        (ast.unparse(node.func), node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
    ]
    if any(
        name.split(".")[-1] in ("loads", "load", "Unpickler") and "pickle" in name
        for name, _ in called
    ):
        assert room in ("launcher.functions", "run.payload"), f"{room} unpickles"
    for name, node in called:
        sends_pickles = name.startswith("dist.") and name.endswith(("_object", "_object_list"))
        assert not sends_pickles, f"{room} calls {name}"
        # modes are the umask's, except of the files that safetensors makes; a fork gets its kernel's umask
        changes_modes = name.split(".")[-1] in ("chmod", "fchmod", "lchmod", "umask")
        allowed = ("checkpoints.writer", "run.fork_server")
        assert not changes_modes or room in allowed, f"{room} calls {name}"
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert name != "torch.load" or given.get("weights_only") == "True", (
            f"{room} loads without weights_only"
        )
        assert given.get("shell") != "True" and name not in (
            "os.system",
            "yaml.unsafe_load",
            "yaml.full_load",
        ), f"{room} calls {name}"
        assert (
            name != "yaml.load"
            or ast.unparse(node.args[1]) == "_Loader"
            and "class _Loader(yaml.SafeLoader)" in source
        ), f"{room} loads any YAML"
        # %%torchrun runs its cell
        assert name not in ("eval", "exec") or room == "magic", f"{room} calls {name}"
        # without it, transformers asks "run the custom code? [y/N]", and y runs it
        loads = name.rpartition(".")[2] in ("from_pretrained", "from_config")
        of_data = name.startswith(("GenerationConfig.", "PeftConfig.", "PeftModel."))
        assert not loads or of_data or given.get("trust_remote_code") == "False", (
            f"{room} loads {name} without trust_remote_code=False"
        )
        assert given.get("trust_remote_code") in (None, "False"), room
        # an adapter may name a module for peft to import
        assert not name.startswith("PeftConfig.") or room == "models.lora", (
            f"{room} reads an adapter without read_adapter"
        )


README = (REPO / "README.md").read_text()
BLOCKS = [
    [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
]
CELLS = [
    cells
    for part in README.split("\n## ")
    if (cells := re.findall(r"```python\n(.*?)```", part, re.S))
]


# One block has 8 commands, three of which train. Each has a limit of its own.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("commands", BLOCKS, ids=lambda commands: commands[0])
def test_the_commands_of_the_readme_work(commands, tmp_path):
    "Run the commands of a block one after the other in one folder, as a reader would."
    shutil.copytree(NBS, tmp_path / "nbs", ignore=shutil.ignore_patterns("runs"))
    (tmp_path / "q.jsonl").write_text('{"question": "Why?"}\n')
    (tmp_path / "x.jsonl").write_text(
        "".join(
            json.dumps({"text": f"number {i} is followed by {i + 1}"}) + "\n" for i in range(500)
        )
    )
    for command in commands:
        if command.startswith("make "):
            # running the gate inside the gate would never end, so make only prints what it would run
            done = subprocess.run(
                ["make", "-n", *command.split()[1:]], cwd=REPO, capture_output=True, text=True
            )
        else:
            words = command.replace("papermill", str(BIN / "papermill"), 1).replace(
                "multigpu-ft", str(forks.command()), 1
            )
            done = subprocess.run(
                words,
                shell=True,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
            )
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"


def _address():
    "Return the address of the repository, from where the README installs until there is a release."
    settings = configparser.ConfigParser()
    settings.read(REPO / "settings.ini")
    address = settings["DEFAULT"]["git_url"]
    assert f'%pip install -q "multigpu_ft @ git+{address}"' in README
    return address


@pytest.mark.parametrize("cells", CELLS, ids=lambda cells: cells[0].splitlines()[0])
def test_the_cells_of_the_readme_work(cells, kernel, tmp_path):
    "Run the cells of a section one after the other in one notebook, without a network."
    # the packages to install are here already
    notebook = kernel(PIP_NO_INDEX="1", XDG_CACHE_HOME=str(tmp_path / "cache"))
    for cell in cells:
        shown = notebook.run(cell.replace(f" @ git+{_address()}", ""), timeout=300)
        assert "ERROR" not in shown, shown


def test_there_is_a_row_for_every_folder():
    table = (REPO / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \[[\w/]+\]\((nbs/\w*)/?\)", table, re.M)
    assert [row.removeprefix("nbs").strip("/") for row in rows] == [*FOLDERS, "guides"], (
        "the rows must be in the order of imports"
    )
    assert {path.parent.relative_to(NBS).parts for path in NOTEBOOKS} == {
        (f,) if f else () for f in FOLDERS
    }

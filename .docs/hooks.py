"""Builds the site's pages from the README, the notebooks and the docstrings, without running any of them."""

import ast
import json
import posixpath
import re
from base64 import b64decode
from html import escape
from pathlib import Path

import griffe
from latex2mathml.converter import convert as to_mathml
from mkdocs.structure.files import File

REPO = Path(__file__).parent.parent
FOLDERS = (
    "run data models distributed checkpoints hub tracking display training memory launcher generation evaluation deploy"
).split()
RECIPES = ["train", "slices", "evaluate", "generate"]
PROJECT = """bench/README.md bench/architectures.md kaggle/README.md SECURITY.md CONTRIBUTING.md CHANGELOG.md""".split()
CODE = re.compile(r"((`{3,}).*?\2|`[^`\n]*`)", re.S)
OUTPUTS = {}  # page -> HTML of its cells' outputs


class Notebook(File):
    """A notebook as a page of the site. It keeps its path, so links to it work unchanged."""

    def is_documentation_page(self):
        return True


class ParameterHelp(griffe.Extension):
    """Adds the help texts in `@documented(group=TEXTS, ...)` to a function's docstring, as the decorator does."""

    def on_function_instance(self, *, func, **kwargs):
        for decorator in func.decorators:
            call = ast.parse(str(decorator.value), mode="eval").body
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "documented":
                continue
            for group in call.keywords:
                texts = ast.literal_eval(str(func.parent[group.value.id].value))
                lines = [f"    {name}: {text}" for name, text in texts.items()]
                func.docstring.value += "\n".join(
                    ["", "", f"Args: {group.arg.capitalize()}", *lines]
                )


def notebooks():
    """Return {section of the navigation: paths of its notebooks} in reading order. Guides follow the README's order."""
    readme = (REPO / "README.md").read_text(encoding="utf-8")

    def place_in_readme(path):
        place = readme.find(path)
        return place < 0, place, path

    found = sorted(
        p.relative_to(REPO).as_posix()
        for folder in ("nbs", "nbs/[!.]*")
        for p in REPO.glob(f"{folder}/*.ipynb")
    )
    found = [p for p in found if not p.startswith("nbs/runs/")]
    guides = [p for p in found if p.startswith(("nbs/guides/", "nbs/guide_"))]
    sections = {
        "Guides": sorted(guides, key=place_in_readme),
        "Recipes": [p for name in RECIPES if (p := f"nbs/{name}.ipynb") in found],
    }
    numbered = [p for p in found if re.match(r"\d", posixpath.basename(p)) and p not in guides]
    folders = {p.split("/")[1] for p in numbered if p.count("/") == 2}
    reference = [
        {folder: [p for p in numbered if p.startswith(f"nbs/{folder}/")]}
        for folder in [*(f for f in FOLDERS if f in folders), *sorted(folders - set(FOLDERS))]
    ]
    sections["Reference"] = [
        *reference,
        *(p for p in found if p.count("/") == 1 and p not in sum(sections.values(), [])),
    ]
    return sections


def paths(entries):
    """Yield the paths in a section of the navigation."""
    for entry in entries:
        yield from [entry] if isinstance(entry, str) else paths(sum(entry.values(), []))


def settings(config):
    """Return {group: {name: (annotation, default, help)}} of RunConfig, from `_field(default, group, help, ...)`."""
    found = {}
    for base in reversed(config.resolved_bases):
        for parent in [*reversed(base.mro()), base]:
            for name, field in parent.attributes.items():
                if str(field.value).startswith("_field("):
                    default, group, text = ast.parse(str(field.value), mode="eval").body.args
                    parts = getattr(text, "values", [text])  # an f-string has several
                    help = "".join(p.value if isinstance(p, ast.Constant) else "..." for p in parts)
                    if isinstance(default, ast.Name):
                        default = ast.parse(str(config.module[default.id].value), mode="eval").body
                    setting = str(field.annotation), ast.unparse(default), help
                    found.setdefault(group.value, {})[name] = setting
    return found


def settings_page(config):
    """Return a table for each group of RunConfig's settings."""
    lines = []
    for group, fields in settings(config).items():
        lines += [
            f"## Settings: {group}",
            "",
            "| setting | values | default | meaning |",
            "|---|---|---|---|",
        ]
        for name, (annotation, default, text) in fields.items():
            values = re.sub(r"Annotated\[(\w+), .*?\]", r"\1", annotation)
            values = re.sub(r"Literal\[([^]]*)\]", r"\1", values).replace(", ", "`, `")
            values = " or ".join(f"`{value.strip()}`" for value in values.split(" | "))
            link = f'<span id="{config.path}.{name}">`{name}`</span>'
            lines.append(f"| {link} | {values} | `{default}` | {text} |")
        lines.append("")
    return "\n".join(lines)


def api_pages():
    """Return {path: Markdown} of the API: an overview, then a page for each module with public names."""
    package = griffe.load("multigpu_ft", search_paths=[REPO], allow_inspection=False)
    homes = {}
    for name, home in ast.literal_eval(str(package["_HOMES"].value)).items():
        homes.setdefault(home, []).append(name)
    pages = {
        "api/index.md": "# API\n\nAll of these are imported from `multigpu_ft`.\n\n| name | summary |\n|---|---|\n"
    }
    for home, names in homes.items():
        level = 2 if len(names) > 1 else 1
        page = f"---\ntitle: {', '.join(names)}\n---\n" + f"# {', '.join(names)}\n" * (level - 1)
        for name in names:
            docstring = package[f"{home}.{name}"].docstring
            summary = " ".join(docstring.value.split("\n\n")[0].split()) if docstring else ""
            pages["api/index.md"] += (
                f"| [`{name}`]({home}.md#multigpu_ft.{home}.{name}) | {summary} |\n"
            )
            page += f"\n::: multigpu_ft.{home}.{name}\n    options:\n      heading_level: {level}\n"
            if name == "RunConfig":
                config = package[f"{home}.{name}"]
                fields = {field for group in settings(config).values() for field in group}
                others = [
                    m
                    for m in config.all_members
                    if m not in {*fields, "model_config"} and m[0] != "_"
                ]
                page += f"      members: {others}\n\n{settings_page(config)}"
        pages[f"api/{home}.md"] = page
    return pages


def on_config(config):
    """Compute the navigation."""
    overview, *modules = api_pages()
    config.nav = [
        {"Home": "README.md"},
        *({title: entries} for title, entries in notebooks().items()),
        {"API": [{"Overview": overview}, *modules]},
        {"Project": PROJECT},
    ]
    return config


def on_files(files, config):
    """Add the pages and the pictures, each under its path in the repository."""
    where = str(REPO), config.site_dir, config.use_directory_urls
    for path in [
        "README.md",
        *PROJECT,
        *(p.relative_to(REPO).as_posix() for p in REPO.glob("bench/results/*.png")),
    ]:
        files.append(File(path, *where))
    for path in paths(sum(notebooks().values(), [])):
        files.append(Notebook(path, *where))
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def show(output):
    """Return the HTML of one output of a cell."""
    data = output.get("data", {})
    if "image/png" in data:
        image = (
            "".join(data["image/png"].split())
            if isinstance(data["image/png"], str)
            else "".join(data["image/png"])
        )
        width = int.from_bytes(b64decode(image[:44])[16:20], "big")
        return f'<img alt="Picture that the cell above draws" width="{width}" src="data:image/png;base64,{image}">'
    if "text/html" in data:
        return "".join(data["text/html"])
    if "application/vnd.jupyter.widget-view+json" in data:
        return ""
    text = "".join(output.get("text") or data.get("text/plain") or output.get("traceback") or [])
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    text = re.sub(r"[^\n]*\r(?!\n)", "", text).strip("\n")
    return f"<pre>{escape(text)}</pre>" if text else ""


def on_page_read_source(page, config):
    """Return a notebook as Markdown, with a placeholder for each output."""
    if not isinstance(page.file, Notebook):
        return None
    parts, outputs = [], OUTPUTS.setdefault(page.file.src_uri, [])
    outputs.clear()
    for cell in json.loads(page.file.content_string)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(outside_code(to_math, source))
        if cell["cell_type"] != "code" or re.search(r"^#\| *(hide|default_exp)", source, re.M):
            continue
        if code := re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip("\n"):
            fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`{3,}", code))])
            parts.append(f"{fence}python\n{code}\n{fence}")
        for output in cell["outputs"]:
            if "text/markdown" in output.get("data", {}):
                parts.append("".join(output["data"]["text/markdown"]))
            elif html := show(output):
                parts.append(f'<div class="output" id="output-{len(outputs)}"></div>')
                outputs.append(html)
    path = page.file.src_uri
    parts.append(f"[{path} on GitHub]({config.extra['source']}/blob/main/{path})")
    return "\n\n".join(parts)


def outside_code(change, text):
    """Apply `change` to the parts of Markdown text that are not code."""
    parts = CODE.split(text)  # text, code, its fence, text, ...
    return "".join(
        change(part) if i % 3 == 0 else part for i, part in enumerate(parts) if i % 3 < 2 and part
    )


def to_math(text):
    """Turn TeX into MathML, which browsers show without a script."""
    return re.sub(r"\$([^$\n]+)\$", lambda match: to_mathml(match[1]), text)


def on_page_markdown(markdown, page, config, files):
    """Point links to files outside the site at GitHub, and write anchors in lower case, as the site does."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]

    def link(match):
        target, _, anchor = match[1].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), target))
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        if target and not files.get_file_from_path(path) and (REPO / path).exists():
            kind = "tree" if (REPO / path).is_dir() else "blob"
            return f"]({config.extra['source']}/{kind}/main/{path}{'#' * bool(anchor)}{anchor})"
        if not path.startswith("api/"):
            anchor = anchor.lower()
        return f"]({target}{'#' * bool(anchor)}{anchor})"

    return outside_code(lambda text: re.sub(r"\]\(([^)\s]+)\)", link, text), markdown)


def on_page_content(html, page, **kwargs):
    """Replace the placeholders with the outputs, after Markdown, which would change their HTML."""

    def output(match):
        return f'<div class="output">{OUTPUTS[page.file.src_uri][int(match[1])]}</div>'

    return re.sub(r'<div class="output" id="output-(\d+)"></div>', output, html)

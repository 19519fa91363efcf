"""Packaging: everything said here is read from settings.ini, which nbdev shares."""

import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

# The notebooks that users run and the files that go with them: where they go, and what from where.
NOTEBOOKS = {
    "": ("nbs", "train.ipynb", "slices.ipynb", "evaluate.ipynb", "generate.ipynb"),
    "guides": ("nbs/guides", "*.ipynb"),
    "examples": ("nbs/examples", "*"),
}


class BuildWithNotebooks(build_py):
    "Gather the notebooks in the package, for `multigpu-ft notebook`; a checkout has them in nbs/."

    def run(self):
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "multigpu_ft" / "notebooks"
        shutil.rmtree(target, ignore_errors=True)
        for place, (folder, *patterns) in NOTEBOOKS.items():
            (target / place).mkdir(parents=True, exist_ok=True)
            for pattern in patterns:
                for file in (here / folder).glob(pattern):
                    shutil.copyfile(file, target / place / file.name)


setup(
    cmdclass={"build_py": BuildWithNotebooks},
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="MIT",
    license_files=["LICENSE"],
    url=cfg["git_url"],
    keywords=cfg["keywords"].split(),
    packages=find_packages(include=["multigpu_ft*"]),
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        name: cfg[f"{name}_requirements"].split()
        for name in (
            "dev",
            "cloud",
            "quantization",
            "deepspeed",
            "tracking",
            "vllm",
            "kubernetes",
            "sagemaker",
            "skypilot",
            "bench",
            "docs",
        )
    },
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Framework :: Jupyter",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

"""Builds the second device, which torch loads by itself wherever it is installed, because of the entry point."""

import os
import shutil
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = Path(__file__).parent
os.environ.setdefault("MAX_JOBS", "2")
setup(
    name="second_device",
    version="1.0",
    packages=["second_device"],
    package_dir={"": "src"},
    ext_modules=[
        CppExtension(
            "second_device._device",
            sorted(str(path.relative_to(HERE)) for path in HERE.glob("csrc/*.cpp")),
            extra_compile_args=["-O1", "-g0", "-w"],
        )
    ],
    cmdclass={
        "build_ext": BuildExtension.with_options(use_ninja=shutil.which("ninja") is not None)
    },
    entry_points={"torch.backends": ["second = second_device:load"]},
)

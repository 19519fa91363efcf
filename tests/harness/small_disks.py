"""Make file systems of a few megabytes, and fill them up."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(size):
    "Mount a file system of `size` bytes. Skips the test if that is not possible."
    folder = Path(tempfile.mkdtemp(prefix="small-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def leave(folder, free):
    "Fill the disk of `folder` until `free` bytes are left."
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    with open(filler, "wb") as file:
        while (wanted := shutil.disk_usage(folder).free - free) > 0:
            # a checkpoint may be taking the space in between
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, wanted)

"""Find secrets in files, in any of several spellings.

python tests/harness/secrets_scan.py FOLDER HF_TOKEN WANDB_API_KEY      # looks for the values of these variables
"""

import base64
import gzip
import io
import json
import os
import sys
import zipfile
import zlib
from pathlib import Path
from urllib.parse import quote


def spellings(secret):
    """Return spellings of `secret` as bytes: plain, backwards, hex, URL-encoded, and base64 in all three alignments.

    Only the part of the base64 that does not depend on its neighbours is included.
    """
    raw = secret.encode()
    found = {
        "plain": raw,
        "backwards": raw[::-1],
        "hex": raw.hex().encode(),
        "url": quote(secret, safe="").encode(),
        "utf-16": secret.encode("utf-16-le"),
    }
    found["url, every byte"] = "".join(f"%{b:02x}" for b in raw).encode()
    found["json"] = json.dumps(secret)[1:-1].encode()
    for shift in range(3):
        padded = b"\0" * shift + raw
        whole = base64.b64encode(padded + b"\0" * (-len(padded) % 3))
        # the characters that consist only of the secret's bits
        first, last = -(-shift * 8 // 6), len(padded) * 8 // 6
        found[f"base64, shifted by {shift}"] = whole[first:last]
        found[f"base64 for URLs, shifted by {shift}"] = whole[first:last].translate(
            bytes.maketrans(b"+/", b"-_")
        )
    return found


def _contents(name, data, depth=3):
    "Yield `data`, and the contents of archives in it."
    yield name, data
    if depth == 0:
        return
    if data[:2] == b"\x1f\x8b":
        try:
            yield from _contents(f"{name} (gzip)", gzip.decompress(data), depth - 1)
        except (OSError, EOFError, zlib.error):
            pass
    if data[:4] == b"PK\x03\x04":
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for member in archive.namelist():
                    yield from _contents(f"{name}/{member}", archive.read(member), depth - 1)
        except (zipfile.BadZipFile, OSError, RuntimeError):
            pass


def find_secrets(folder, secrets):
    """Find values of `secrets`, a dictionary by name, in names and contents of files under `folder`.

    Returns `(file, name of the secret, spelling)` for each.
    """
    wanted = [
        (name, how, bytes_)
        for name, secret in secrets.items()
        for how, bytes_ in spellings(secret).items()
    ]
    found = []
    for path in sorted(Path(folder).rglob("*")):
        names = str(path.relative_to(folder)).encode()
        parts = [("(its name)", names)]
        if path.is_symlink():
            parts.append(("(its target)", os.readlink(path).encode()))
        elif path.is_file():
            parts += _contents("", path.read_bytes())
        for part, data in parts:
            lower = data.lower()
            for name, how, bytes_ in wanted:
                if bytes_ in data or (how.startswith(("hex", "url, every")) and bytes_ in lower):
                    found.append((f"{path.relative_to(folder)}{part}", name, how))
    return found


if __name__ == "__main__":
    hits = find_secrets(sys.argv[1], {name: os.environ[name] for name in sys.argv[2:]})
    print(*hits, sep="\n")
    sys.exit(bool(hits))

"""A small Hub on loopback for the real huggingface_hub: create, list, upload, commit, download, with faults on request.

    python tests/harness/hub.py --trials 60 --json bench/results/hub.json     # uploads and downloads under faults

The client finds it by `HF_ENDPOINT`, which must be set before huggingface_hub is imported. So clients are separate
processes, forked from one that has imported it. Content is kept in a folder, by digest; repositories are lists
of revisions. After each commit the server checks whether a checkpoint lacks one of its files.
"""

import argparse
import base64
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.faults import gone  # noqa: E402

WRITE = "hf_" + "w" * 34  # jane's token with write access
READ = "hf_" + "r" * 34  # jane's read-only token
WRONG = "hf_" + "x" * 34  # an invalid token
PART = 256 * 1024  # bytes; larger files are uploaded in parts of this size
PAGE = 50  # files on a page of a listing
LFS = (".safetensors", ".bin", ".pt", ".pkl")


class Faults:
    "The faults: chances for each request, and lasting states."

    def __init__(self, seed=0):
        self.rng, self.lock = random.Random(seed), threading.Lock()
        self.cut_up = self.cut_down = (
            0.0  # chances that the connection is cut during an upload or a download
        )
        self.busy = 0.0  # chance of an answer of 500, 503 or 429
        self.bytes_per_second = None
        self.outage_until = 0.0  # by time.monotonic(); until then connections are closed at once
        self.forbidden = False  # writing is answered with 403
        self.full = False  # commits are answered with 503
        self.happened = {}

    def draw(self, name, chance):
        with self.lock:
            hit = self.rng.random() < chance
            if hit:
                self.count(name)
            return hit

    def count(self, name):
        self.happened[name] = self.happened.get(name, 0) + 1

    def below(self, number):
        with self.lock:
            return self.rng.randrange(max(1, number))

    def end(self):
        self.cut_up = self.cut_down = self.busy = self.outage_until = 0.0
        self.bytes_per_second, self.forbidden, self.full = None, False, False


class Cut(Exception):
    "Closes the connection without an answer."


class Refused(Exception):
    def __init__(self, code, error, text=""):
        self.code, self.error, self.text = code, error, text or error


class Hub:
    "Repositories, and the requests to them. `url` is the value for HF_ENDPOINT."

    def __init__(self, folder, seed=0):
        self.folder, self.faults, self.lock = Path(folder), Faults(seed), threading.RLock()
        self.repos, self.uploads, self.violations, self.requests = {}, {}, [], []
        self.received = self.sent = 0  # bytes of large files
        (self.folder / "objects").mkdir(parents=True)
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    # -- content

    def object(self, sha):
        return self.folder / "objects" / sha

    def keep(self, content):
        sha = hashlib.sha256(content).hexdigest()
        partial = self.folder / f"{sha}.{threading.get_ident()}"
        partial.write_bytes(content)
        partial.rename(self.object(sha))
        return sha

    # -- repositories

    def create(self, repo, private=False):
        with self.lock:
            self.repos[repo] = {"private": private, "revisions": []}
            self.commit(
                repo,
                {".gitattributes": self.regular(b"*.safetensors filter=lfs\n")},
                "initial commit",
            )

    def regular(self, content):
        return {
            "lfs": False,
            "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
            "sha": self.keep(content),
            "size": len(content),
        }

    def commit(self, repo, tree, message):
        revisions = self.repos[repo]["revisions"]
        body = json.dumps([len(revisions), message, tree, repo], sort_keys=True)
        revisions.append(
            {"sha": hashlib.sha1(body.encode()).hexdigest(), "tree": tree, "message": message}
        )
        return revisions[-1]["sha"]

    def revision(self, repo, name):
        "Return the revision of `repo` for `name`, a branch or a commit."
        revisions = self.repos[repo]["revisions"]
        found = (
            revisions[-1]
            if name == "main"
            else next((r for r in revisions if r["sha"] == name), None)
        )
        if not found:
            raise Refused(404, "RevisionNotFound")
        return found

    def put(self, repo, **files):
        "Commit these files (path to bytes; `None` deletes one), as another client would."
        with self.lock:
            tree = dict(self.tree(repo))
            for path, content in files.items():
                if content is None:
                    tree.pop(path)
                else:
                    tree[path] = {**self.regular(content), "lfs": path.endswith(LFS)}
            return self.commit(repo, tree, "put")

    def tree(self, repo):
        return self.repos[repo]["revisions"][-1]["tree"]

    def read(self, repo, path):
        return self.object(self.tree(repo)[path]["sha"]).read_bytes()

    def checkpoints(self, repo):
        "Return the names of the checkpoints in `repo`."
        return (
            sorted(
                {path.split("/")[1] for path in self.tree(repo) if path.startswith("checkpoints/")}
            )
            if repo in self.repos
            else []
        )


def incomplete(hub, tree):
    "Yield what checkpoints in `tree` lack of the files that their commit.json lists."
    for folder in {path.rpartition("/")[0] for path in tree if path.startswith("checkpoints/")}:
        if f"{folder}/commit.json" not in tree:
            yield f"{folder} has no commit.json"
            continue
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for name, about in json.loads(
                hub.object(tree[f"{folder}/commit.json"]["sha"]).read_bytes()
            )["commit"]["files"].items():
                file = tree.get(f"{folder}/{name}")
                if not file or (file["size"], file["sha"]) != (about["bytes"], about["sha256"]):
                    yield f"{folder}/{name} is {'altered' if file else 'missing'}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1
    hub: Hub

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (Cut, ConnectionError):
            self.close_connection = True
            with contextlib.suppress(OSError):  # a reset, not an orderly end
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
                )

    def answer(self):
        hub, faults = self.hub, self.hub.faults
        self.path_only, _, query = self.path.partition("?")
        self.path_only, self.query = unquote(self.path_only), parse_qs(query)
        hub.requests.append((self.command, self.path_only))
        if time.monotonic() < faults.outage_until:
            faults.count("outage")
            raise Cut
        self.body = self.take()
        if faults.draw("busy", faults.busy):
            code = (500, 503, 429)[faults.below(3)]
            return self.reply(code, {"error": "later"})
        try:
            self.route()
        except Refused as error:
            self.reply(
                error.code,
                {"error": error.text},
                {"X-Error-Code": error.error, "X-Error-Message": error.text},
            )

    do_GET = do_POST = do_PUT = do_HEAD = answer

    # -- bytes

    def take(self):
        "Read the request's content, cut or slowed down if a fault says so."
        faults = self.hub.faults
        if self.headers.get("Transfer-Encoding") == "chunked":
            length, chunks = 0, []
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
                self.flow(size)
            self.rfile.readline()
            content = b"".join(chunks)
            if content and faults.draw("cut up", faults.cut_up):
                raise Cut
            return content
        length = int(self.headers.get("Content-Length") or 0)
        end = faults.below(length) if length and faults.draw("cut up", faults.cut_up) else length
        content = b""
        while len(content) < end:
            piece = self.rfile.read(min(65536, end - len(content)))
            if not piece:
                raise Cut
            content += piece
            self.flow(len(piece))
        if end < length:
            raise Cut
        return content

    def flow(self, count):
        self.hub.received += count if self.command == "PUT" else 0
        if speed := self.hub.faults.bytes_per_second:
            time.sleep(count / speed)

    def reply(self, code, value=None, headers=None):
        content = json.dumps(value).encode() if value is not None else b""
        self.send(code, content, {"Content-Type": "application/json", **(headers or {})})

    def send(self, code, content, headers):
        faults = self.hub.faults
        self.send_response(code)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = (
            faults.below(len(content))
            if content and faults.draw("cut down", faults.cut_down)
            else len(content)
        )
        for start in range(0, end, 16384):
            piece = content[start : min(end, start + 16384)]
            self.wfile.write(piece)
            self.hub.sent += len(piece) if self.path_only.startswith("/objects/") else 0
            if speed := faults.bytes_per_second:
                time.sleep(len(piece) / speed)
        self.wfile.flush()
        if end < len(content):
            raise Cut

    def json(self):
        return json.loads(self.body)

    # -- access

    def user(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in (WRITE, READ):
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return token or None

    def may(self, repo, write=False):
        "Raise `Refused` unless the client has access to `repo`."
        token, about = self.user(), self.hub.repos.get(repo)
        if not about or (about["private"] and not token):
            raise Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if write and (token != WRITE or self.hub.faults.forbidden or not repo.startswith("jane/")):
            raise Refused(403, "", "you may not write here")

    # -- requests

    def route(self):
        path = self.path_only
        for method, pattern, name in _ROUTES:
            if method in (self.command, "*") and (found := re.fullmatch(pattern, path)):
                return getattr(self, name)(**found.groupdict())
        raise Refused(404, "EntryNotFound", f"no such address: {self.command} {path}")

    def whoami(self):
        token = self.user()
        if not token:
            raise Refused(401, "", "Invalid username or password.")
        role = {"role": "write" if token == WRITE else "read", "displayName": "test"}
        orgs = [{"name": "lab", "roleInOrg": "write"}]
        self.reply(
            200,
            {
                "type": "user",
                "name": "jane",
                "orgs": orgs,
                "auth": {"type": "access_token", "accessToken": role},
            },
        )

    def create(self):
        asked = self.json()
        repo = f"{asked.get('organization') or 'jane'}/{asked['name']}"
        if self.user() != WRITE or self.hub.faults.forbidden or not repo.startswith("jane/"):
            raise Refused(403, "", "you may not create this")
        with self.hub.lock:
            there = repo in self.hub.repos
            if not there:
                self.hub.create(repo, asked.get("private") or asked.get("visibility") == "private")
        self.reply(
            409 if there else 200,
            {"url": f"{self.hub.url}/{repo}", "error": "You already created this model repo"},
        )

    def validate(self):
        text = self.json()["content"]
        found = re.match(r"---\n(.*?)\n---\n", text, re.S)
        bad = re.search(r"^base_model: (?![\w.-]+/[\w.-]+$).*", found[1], re.M) if found else None
        self.reply(
            400 if bad else 200,
            {"errors": [{"message": f"{bad[0]} is no Hub id"}] if bad else [], "warnings": []},
        )

    def info(self, repo, revision="main"):
        self.may(repo)
        at = self.hub.revision(repo, revision)
        siblings = [{"rfilename": path} for path in at["tree"]]
        if "blobs" in self.query:
            for file in siblings:
                about = at["tree"][file["rfilename"]]
                file |= {"size": about["size"], "blobId": about["oid"]}
                if about["lfs"]:
                    file["lfs"] = {
                        "sha256": about["sha"],
                        "size": about["size"],
                        "pointerSize": 130,
                    }
        self.reply(
            200,
            {
                "id": repo,
                "modelId": repo,
                "sha": at["sha"],
                "private": self.hub.repos[repo]["private"],
                "siblings": siblings,
                "tags": [],
            },
        )

    def list(self, repo, revision, folder=None):
        self.may(repo)
        tree, prefix = self.hub.revision(repo, revision)["tree"], f"{folder}/" if folder else ""
        folders = {p.rpartition("/")[0] for p in tree if "/" in p}
        entries = [
            {"type": "directory", "path": p, "oid": "0" * 40, "size": 0}
            for p in sorted(folders)
            if p.startswith(prefix)
        ]
        for path, file in sorted(tree.items()):
            if path.startswith(prefix):
                lfs = (
                    {"lfs": {"oid": file["sha"], "size": file["size"], "pointerSize": 130}}
                    if file["lfs"]
                    else {}
                )
                entries.append(
                    {"type": "file", "path": path, "oid": file["oid"], "size": file["size"], **lfs}
                )
        begin = int(self.query.get("cursor", ["0"])[0])
        more = {}
        if begin + PAGE < len(entries):
            more["Link"] = (
                f'<{self.hub.url}{self.path_only}?recursive=True&expand=False&cursor={begin + PAGE}>; rel="next"'
            )
        self.reply(200, entries[begin : begin + PAGE], more)

    def preupload(self, repo, revision):
        self.may(repo, write=True)
        tree = self.hub.revision(repo, revision)["tree"]
        files = []
        for file in self.json()["files"]:
            there = tree.get(file["path"])
            mode = "lfs" if file["path"].endswith(LFS) or file["size"] > 10 * 2**20 else "regular"
            files.append(
                {
                    "path": file["path"],
                    "uploadMode": mode,
                    "shouldIgnore": False,
                    "oid": there and (there["sha"] if there["lfs"] else there["oid"]),
                }
            )
        self.reply(200, {"files": files})

    def batch(self, repo):
        self.may(repo, write=True)
        objects = []
        for asked in self.json()["objects"]:
            sha, size, actions = asked["oid"], asked["size"], {}
            if not self.hub.object(sha).exists():
                if size > PART:
                    number = f"{sha}-{self.hub.faults.rng.getrandbits(32):x}"
                    self.hub.uploads[number] = {}
                    parts = {
                        str(i + 1): f"{self.hub.url}/parts/{number}/{i + 1}?signature=secret"
                        for i in range(-(-size // PART))
                    }
                    actions["upload"] = {
                        "href": f"{self.hub.url}/complete/{number}",
                        "header": {"chunk_size": str(PART), **parts},
                    }
                else:
                    actions["upload"] = {"href": f"{self.hub.url}/lfs/{sha}?signature=secret"}
                actions["verify"] = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
            objects.append({"oid": sha, "size": size, **({"actions": actions} if actions else {})})
        self.reply(200, {"transfer": "multipart", "objects": objects})

    def put_object(self, sha):
        if hashlib.sha256(self.body).hexdigest() != sha:
            raise Refused(400, "", "the content has another digest")
        self.hub.keep(self.body)
        self.reply(200)

    def put_part(self, number, part):
        self.hub.uploads[number][int(part)] = self.hub.keep(self.body)
        self.reply(200, headers={"ETag": f'"{part}"'})

    def complete(self, number):
        parts = self.hub.uploads[number]
        content = b"".join(self.hub.object(parts[i]).read_bytes() for i in sorted(parts))
        if self.hub.keep(content) != number.partition("-")[0] or len(self.json()["parts"]) != len(
            parts
        ):
            raise Refused(400, "", "the content has another digest")
        self.reply(200, {})

    def verify(self, repo):
        asked = self.json()
        path = self.hub.object(asked["oid"])
        if not path.exists() or path.stat().st_size != asked["size"]:
            raise Refused(404, "EntryNotFound", "no such object")
        self.reply(200, {})

    def commit(self, repo, revision):
        self.may(repo, write=True)
        if self.hub.faults.full:
            raise Refused(503, "", "later")
        lines = [json.loads(line) for line in self.body.splitlines()]
        with self.hub.lock:
            tree = dict(self.hub.tree(repo))
            for line in lines[1:]:
                value, path = line["value"], line["value"]["path"]
                if line["key"] == "file":
                    tree[path] = self.hub.regular(base64.b64decode(value["content"]))
                elif line["key"] == "lfsFile":
                    if not self.hub.object(value["oid"]).exists():
                        raise Refused(400, "", f"{path}: its content was never uploaded")
                    size = self.hub.object(value["oid"]).stat().st_size
                    tree[path] = {
                        "lfs": True,
                        "oid": hashlib.sha1(value["oid"].encode()).hexdigest(),
                        "sha": value["oid"],
                        "size": size,
                    }
                else:
                    gone = [
                        p
                        for p in tree
                        if p == path
                        or (line["key"] == "deletedFolder" and p.startswith(path.rstrip("/") + "/"))
                    ]
                    if not gone:
                        raise Refused(404, "EntryNotFound", "A file with this name doesn't exist")
                    for p in gone:
                        del tree[p]
            sha = self.hub.commit(repo, tree, lines[0]["value"]["summary"])
            self.hub.violations += [
                f"{repo} {lines[0]['value']['summary']}: {problem}"
                for problem in incomplete(self.hub, tree)
            ]
        self.reply(
            200,
            {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True},
        )

    def resolve(self, repo, revision, path):
        self.may(repo)
        at = self.hub.revision(repo, revision)
        file = at["tree"].get(path)
        if not file:
            raise Refused(404, "EntryNotFound", "Entry not found")
        about = {
            "X-Repo-Commit": at["sha"],
            "ETag": f'"{file["sha"] if file["lfs"] else file["oid"]}"',
            "Accept-Ranges": "bytes",
        }
        if file["lfs"]:
            host = self.hub.url.replace(
                "127.0.0.1", "localhost"
            )  # another host, as for the Hub's storage
            where = {"Location": f"{host}/objects/{file['sha']}?signature=secret"}
            return self.send(
                302,
                b"",
                {
                    **about,
                    **where,
                    "X-Linked-Etag": f'"{file["sha"]}"',
                    "X-Linked-Size": str(file["size"]),
                },
            )
        self.content(file["sha"], about)

    def stored(self, sha):
        if self.headers.get("Authorization"):
            raise Refused(
                400, "", "the token belongs to the Hub, not to the place where it keeps files"
            )
        self.content(sha, {"ETag": f'"{sha}"', "Accept-Ranges": "bytes"})

    def content(self, sha, about):
        content = self.hub.object(sha).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if not wanted:
            return self.send(200, content, about)
        begin = int(wanted[1])
        if begin >= len(content):
            return self.send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        self.send(
            206,
            content[begin:],
            {**about, "Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"},
        )


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+?)"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "list"),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>[^/]+)", "info"),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("GET", rf"/api/models/{_REPO}", "info"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/verify", "verify"),
    ("PUT", r"/lfs/(?P<sha>\w+)", "put_object"),
    ("PUT", r"/parts/(?P<number>[\w-]+)/(?P<part>\d+)", "put_part"),
    ("POST", r"/complete/(?P<number>[\w-]+)", "complete"),
    ("*", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ("*", r"/objects/(?P<sha>\w+)", "stored"),
]


# -- clients --------------------------------------------------------------------------------------------------------


def environment(hub, token=WRITE):
    "Return the environment for processes that use `hub`."
    switches = {
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
    }
    return {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token or "",
        "HF_HOME": str(hub.folder / "home"),
        **switches,
    }


QUICK = {"tries": 4, "first_s": 0.01, "longest_s": 0.05}


def client_main():
    "Read a JSON request per line, fork, and answer with the process id. The result goes to the file that it names."
    import huggingface_hub.hf_api  # noqa: F401

    from multigpu_ft import RunConfig, RunDir
    from multigpu_ft.hub import download, repository, upload

    def push(run):
        huggingface_hub.set_client_factory(repository.client_factory())
        return upload.push_run(RunDir(run), repository.Patience(**QUICK))

    def pull(cfg, root):
        # Otherwise the library waits for seconds between its own retries.
        huggingface_hub.set_client_factory(repository.client_factory())
        path, remote = download.pull(
            RunConfig(**cfg), Path(root), patience=repository.Patience(**QUICK)
        )
        return {"path": str(path), "revision": remote.revision}

    def find(cfg):
        remote = repository.find_remote(RunConfig(**cfg), patience=repository.Patience(**QUICK))
        return {"name": remote.name, "revision": remote.revision}

    def check(cfg, answer_s=5):
        return repository.check_access(RunConfig(**cfg), answer_s)

    does = {"push": push, "pull": pull, "find": find, "check": check}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ["HF_TOKEN"], out = request["token"], Path(request["out"])
            log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                result = {"returned": does[request["do"]](**request["with"])}
            except Exception as error:
                result = {"raised": type(error).__name__, "text": str(error)}
            out.with_suffix(".new").write_text(json.dumps(result))
            out.with_suffix(".new").rename(out)
            os._exit(0)
        print(pid, flush=True)


class Raised(Exception):
    "Holds the type's name and the text of what a call raised."


class Client:
    "Calls the package in processes that live as long as the call, and can be killed."

    def __init__(self, hub):
        self._folder, self._number = hub.folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, "client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            env=environment(hub),
        )
        assert self._process.stdout.readline() == "ready\n"

    def start(self, do, token=WRITE, **arguments):
        "Start a call. Returns its process id, and the file that will have its result."
        self._number += 1
        out = self._folder / f"call{self._number}.json"
        request = {"do": do, "with": arguments, "token": token or "", "out": str(out)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline()), out

    def __call__(self, do, token=WRITE, **arguments):
        return self.result(*self.start(do, token, **arguments))

    @staticmethod
    def result(pid, out, seconds=60):
        "Return what a call returned, `None` if it was killed. Raises `Raised`."
        end = time.monotonic() + seconds
        while not out.exists() and not gone(pid):
            assert time.monotonic() < end, f"no result after {seconds} s"
            time.sleep(0.005)
        if not out.exists():
            return None
        found = json.loads(out.read_text())
        if "raised" in found:
            raise Raised(found["raised"], found["text"])
        return found["returned"]

    def close(self):
        self._process.stdin.close()
        self._process.wait()


# -- runs without training ------------------------------------------------------------------------------------------


def make_run(root, repo="jane/model", **settings):
    "Return a run directory as a run would leave it, except for its checkpoints."
    from multigpu_ft import RunConfig, RunDir

    run = RunDir.create(RunConfig(run_root=str(root), hf_repo=repo, end_idx=48, **settings), 48)
    run.update_status(state="done")
    return run


def add_checkpoint(run, step, rng, sizes=(3 * PART + 1000, 100_000)):
    "Add a checkpoint with random content, committed as a run does; old ones are deleted as usual."
    from multigpu_ft.checkpoints.discovery import retire
    from multigpu_ft.checkpoints.manifest import commit, digest, fingerprint
    from multigpu_ft.run.run_dir import PARTIAL, write_json

    partial = run.path / "checkpoints" / f"opt-tiny_0-48-step-{step}.0{PARTIAL}"
    partial.mkdir()
    for rank, size in enumerate(sizes):
        (partial / f"rank{rank}.safetensors").write_bytes(rng.randbytes(size))
    slices = [
        {
            "start_idx": 0,
            "end_idx": 48,
            "epochs": 0,
            "steps": step,
            "position": step,
            "num_texts": 48,
        }
    ]
    write_json(partial / "progress.json", {"step": step, "trained": slices})
    path = commit(
        partial, fingerprint(run.config()), {p.name: digest(p) for p in sorted(partial.iterdir())}
    )
    retire(run, run.config().keep)
    return path


def add_export(run, rng):
    "Add files that stand for an exported model."
    for name, content in (
        ("model.safetensors", rng.randbytes(2 * PART)),
        ("config.json", b"{}"),
        ("check.json", b"{}"),
    ):
        (run.path / "export" / name).write_bytes(content)
    run.update_status(export=str(run.path / "export"))


def is_there(hub, run, name):
    "Return whether the repository has what the run directory has, whatever hub.json says."
    repo = run.config().hf_repo
    tree = hub.tree(repo) if repo in hub.repos else {}
    folder, prefix = (
        (run.path / "export", "")
        if name == "export"
        else (run.path / "checkpoints" / name, f"checkpoints/{name}/")
    )
    files = [p for p in folder.rglob("*") if p.is_file()]
    return bool(files) and all(
        (at := tree.get(f"{prefix}{p.relative_to(folder)}"))
        and hub.object(at["sha"]).read_bytes() == p.read_bytes()
        for p in files
    )


# -- faults ---------------------------------------------------------------------------------------------------------


def trial(hub, client, seed):
    """Upload and download a run under faults. Returns what happened.

    What is reported as uploaded is always there, and no revision has a partial checkpoint. After the faults one more
    `push_run` completes the upload, and a fresh directory gets the same bytes.
    """
    from multigpu_ft.checkpoints.manifest import verify_checkpoint
    from multigpu_ft.hub.upload import not_uploaded, wanted

    rng, faults, story = (
        random.Random(seed),
        hub.faults,
        {"kills": 0, "left": 0, "pulls killed": 0, "pulls failed": 0},
    )
    root = Path(tempfile.mkdtemp(prefix=f"trial{seed}-", dir=hub.folder))
    run = make_run(root / "runs", f"jane/trial{seed}", keep=rng.choice([1, 2]))
    before = dict(faults.happened)
    faults.rng.seed(seed)

    def begin_faults():
        faults.cut_up, faults.cut_down, faults.busy = (rng.choice([0, 0.05, 0.2]) for _ in range(3))
        faults.bytes_per_second = rng.choice([None, None, 2e7, 5e6])
        faults.outage_until = time.monotonic() + rng.choice([0, 0, 0, 0.3])

    for step in range(1, rng.randint(2, 4)):
        begin_faults()
        add_checkpoint(run, step, rng)
        if step > 1 and rng.random() < 0.5:
            add_export(run, rng)
        pid, out = client.start("push", run=str(run.path))
        kind = rng.choice(["kill", "newer", "wait"])
        if kind != "wait":
            time.sleep(rng.uniform(0, 0.4))
        if kind == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            story["kills"] += client.result(pid, out) is None
        elif kind == "newer":  # training continues, and deletes what is being sent
            add_checkpoint(run, 10 * step, rng)
        client.result(pid, out)
        left = not_uploaded(run)
        story["left"] += bool(left)
        wrong = [name for name in wanted(run) if name not in left and not is_there(hub, run, name)]
        assert not wrong, f"seed {seed}: reported as uploaded, but missing: {wrong}"
    faults.end()
    assert client("push", run=str(run.path)) == [] == not_uploaded(run), (
        f"seed {seed}: {(run.path / 'hub.json').read_text()}"
    )
    assert all(is_there(hub, run, name) for name in wanted(run)) and not hub.violations, (
        f"seed {seed}: {hub.violations}"
    )
    assert len(hub.checkpoints(run.config().hf_repo)) <= run.config().keep, (
        f"seed {seed}: {hub.checkpoints(run.config().hf_repo)}"
    )
    received, revisions = hub.received, len(hub.repos[run.config().hf_repo]["revisions"])
    assert client("push", run=str(run.path)) == [] and (
        hub.received,
        len(hub.repos[run.config().hf_repo]["revisions"]),
    ) == (received, revisions)

    cfg = {
        **run.config().model_dump(),
        "run_root": str(root / "cold"),
        "resume_file": f"hub:{run.config().hf_repo}",
    }
    for _ in range(2):
        begin_faults()
        pid, out = client.start("pull", cfg=cfg, root=str(root / "cold"))
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.3))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            story["pulls killed"] += client.result(pid, out) is None
        except Raised as error:
            assert error.args[0] == "CheckpointError", f"seed {seed}: {error}"
            story["pulls failed"] += 1
    faults.end()
    pulled, newest = (
        Path(client("pull", cfg=cfg, root=str(root / "cold"))["path"]),
        run.checkpoints()[-1],
    )
    verify_checkpoint(pulled)
    assert {p.name: p.read_bytes() for p in pulled.iterdir()} == {
        p.name: p.read_bytes() for p in newest.iterdir()
    }, f"seed {seed}"
    shutil.rmtree(root)
    story["faults"] = {name: count - before.get(name, 0) for name, count in faults.happened.items()}
    return story


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun, total, happened = time.monotonic(), {}, {}
    with tempfile.TemporaryDirectory(prefix="hub-") as folder:
        hub = Hub(Path(folder) / "hub")
        client = Client(hub)
        for seed in range(options.first_seed, options.first_seed + options.trials):
            story = trial(hub, client, seed)
            for name, count in story.pop("faults").items():
                happened[name] = happened.get(name, 0) + count
            for name, count in story.items():
                total[name] = total.get(name, 0) + count
        client.close()
        hub.close()
    report = {
        "trials": options.trials,
        "complete_after_one_more_push": options.trials,
        "pulled_bit_for_bit": options.trials,
        "revisions_with_a_part": 0,
        "pushes_killed": total["kills"],
        "pushes_that_left_something": total["left"],
        "pulls_killed": total["pulls killed"],
        "pulls_that_gave_up": total["pulls failed"],
        "faults": dict(sorted(happened.items())),
        "seconds": round(time.monotonic() - begun),
    }
    print(json.dumps(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    client_main() if sys.argv[1:] == ["client"] else main()

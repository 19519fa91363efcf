"""The part of a W&B server that the client needs: it keeps the history of each run as the client streams it."""

import gzip
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "0123456789abcdef" * 2 + "01234567"  # a key of the right form


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, value, code=200):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

    def do_GET(self):
        self.answer({})

    def do_PUT(self):
        self.body()
        self.answer({})

    def do_POST(self):
        raw, server = self.body(), self.server.owner
        if self.path.endswith("/graphql"):
            if server.refuse:
                return self.answer({"errors": [{"message": "user is not logged in"}]}, 401)
            request = json.loads(raw)
            return self.answer(
                {"data": server.query(request.get("operationName"), request.get("variables") or {})}
            )
        if self.path.endswith("/file_stream"):
            server.stream(self.path.split("/")[-2], json.loads(raw).get("files") or {})
            return self.answer({"exitcode": None, "limits": {}})
        return self.answer({})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        "Ignore clients that disconnect without a goodbye, as W&B's does."


class WandbServer:
    """A W&B server on loopback.

    `histories` has the steps of each run by its id; `configs`, `names` and `groups` its description; `artifacts` names,
    types and aliases. With `refuse` every key is rejected.
    """

    def __init__(self):
        self.histories, self.configs, self.names, self.groups, self.artifacts, self.refuse = (
            {},
            {},
            {},
            {},
            [],
            False,
        )
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.environment = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{self._http.server_port}",
            "WANDB_API_KEY": KEY,
        }
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def query(self, operation, variables):
        name = variables.get("name")
        project = {
            "id": "p",
            "name": variables.get("project") or "p",
            "entity": {"id": "e", "name": "me"},
        }
        if operation == "UpsertBucket":
            new = name not in self.histories
            lines = self.histories.setdefault(name, [])
            for store, key in (
                (self.configs, "config"),
                (self.names, "displayName"),
                (self.groups, "groupName"),
            ):
                if variables.get(key):
                    store[name] = variables[key]
            bucket = {
                "id": f"id-{name}",
                "name": name,
                "displayName": name,
                "description": "",
                "config": None,
                "sweepName": None,
                "project": project,
            }
            return {
                "upsertBucket": {
                    "bucket": {**bucket, "historyLineCount": len(lines)},
                    "inserted": new,
                }
            }
        if operation == "RunResumeStatus":
            lines = self.histories.get(name)
            bucket = (
                None
                if lines is None
                else {
                    "id": f"id-{name}",
                    "name": name,
                    "displayName": name,
                    "summaryMetrics": "{}",
                    "config": "{}",
                    "wandbConfig": '{"t": 1}',
                    "tags": [],
                    "logLineCount": 0,
                    "eventsLineCount": 0,
                    "historyLineCount": len(lines),
                    "historyTail": json.dumps(lines[-1:]),
                    "eventsTail": "[]",
                }
            )
            return {"model": {**project, "bucket": bucket}}
        if operation == "CreateRunFiles":
            files = [
                {"name": f, "uploadUrl": f"{self.environment['WANDB_BASE_URL']}/put"}
                for f in variables["files"]
            ]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if operation == "Viewer":
            return {
                "viewer": {
                    "id": "u",
                    "entity": "me",
                    "username": "me",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            }
        if not operation:  # asks for the type of an artifact
            return {"project": None}
        if operation == "CreateArtifact":
            given = variables["input"]
            self.artifacts.append(
                (
                    given["artifactCollectionName"],
                    given["artifactTypeName"],
                    {a["alias"] for a in given["aliases"]},
                )
            )
            artifact = {
                "id": str(len(self.artifacts)),
                "state": "COMMITTED",
                "artifactSequence": {"id": "s", "latestArtifact": None},
            }
            return {"createArtifact": {"artifact": artifact}}
        return {}

    def stream(self, name, files):
        history = files.get("wandb-history.jsonl")
        if history:
            lines = self.histories[name]
            lines[history["offset"] :] = history["content"]

    def history(self, name):
        return [json.loads(line) for line in self.histories[name]]


class SilentServer:
    "Accepts connections and never answers."

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.environment = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{self._socket.getsockname()[1]}",
            "WANDB_API_KEY": KEY,
        }

    def close(self):
        self._socket.close()

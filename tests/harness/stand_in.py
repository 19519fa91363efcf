"""python -I -S stand_in.py SOCKET KIND MODULE WORDS: stand for a fork, for a parent that would start a process.

Passes on signals, and ends as the fork ends. The fork is killed when this is; a kernel ends with its parent. Where a
fork would not be what a cold start is, this process becomes what starts cold."""

import json
import os
import select
import signal
import socket
import sys

path, kind, module, *words = sys.argv[1:]
parent = os.getppid()
request = {"kind": kind, "module": module, "words": words}
request |= {"folder": os.getcwd(), "environment": dict(os.environ)}
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
with open(os.memfd_create("request"), "w+") as told:
    json.dump(request, told)
    told.seek(0)
    socket.send_fds(connection, [b"?"], [told.fileno(), 0, 1, 2])
with connection.makefile("r") as answers:
    pid, cold = json.loads(answers.readline())
    if cold:
        os.execv(cold[0], cold)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    while not select.select([connection], [], [], 0.5)[0]:
        if kind == "kernel" and os.getppid() != parent:
            sys.exit(1)
    code = json.loads(answers.readline() or "1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)

"""A switch between two network interfaces that delays and loses frames, where the kernel has no netem.

    ip netns exec switch python tests/harness/relay.py port0 port1

It reads what to do from its input, a line of JSON at a time: `{"delay": 0.05, "loss": 0.05, "deaf": [1]}` delays
each frame by 50 ms, loses 5 % of them, and lets none reach port 1.
"""

import contextlib
import heapq
import itertools
import json
import random
import select
import socket
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _OUTGOING = 263, 15, 4
_HEADER, _LONGEST = 10, 2**17  # a frame may be a whole segment before the kernel cuts it up


def _open(interface):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    # what the kernel leaves to the network card, such as checksums, goes along with the frame
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**23)
    port.bind((interface, 0))
    port.setblocking(False)
    return port


def main():
    ports = [_open(name) for name in sys.argv[1:]]
    does, rng = {"delay": 0.0, "loss": 0.0, "deaf": []}, random.Random(0)
    waiting, number = [], itertools.count()
    print("ready", flush=True)
    while True:
        pause = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([*ports, sys.stdin], [], [], pause)[0]:
            if ready is sys.stdin:
                if not (line := sys.stdin.readline()):
                    return
                does.update(json.loads(line))
                continue
            with contextlib.suppress(BlockingIOError):
                frame, address = ready.recvfrom(_LONGEST)
                to = 1 - ports.index(ready)
                if address[2] == _OUTGOING or to in does["deaf"] or rng.random() < does["loss"]:
                    continue
                heapq.heappush(waiting, (time.monotonic() + does["delay"], next(number), to, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, to, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # its buffer is full, or the interface is gone
                ports[to].send(frame)


if __name__ == "__main__":
    main()

"""What ranks tell each other is data: a rank whose place somebody took can't run code in another."""

import os
import subprocess
import sys
import textwrap

import pytest

PEERS = """
import os, sys, torch.distributed as dist
from multigpu_ft import RunConfig
from multigpu_ft.distributed import world as room

rank, folder, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
os.environ["MULTIGPU_FT_STORE"] = os.path.join(folder, "store")


class Attack:
    def __reduce__(self):
        return os.system, (f"touch {folder}/hit",)


world = room.join_world(RunConfig(strategy="ddp", timeout_s=30))
if rank:
    # as a stranger in the place of a rank would
    if way == "gather":
        dist.all_gather_object([None] * 2, Attack())
    elif way == "broadcast":
        dist.broadcast_object_list([Attack()], src=1)
    else:
        room._as_bytes = lambda value: __import__("torch").frombuffer(
            bytearray(__import__("pickle").dumps(Attack())), dtype=__import__("torch").uint8
        )
        world.from_all(1)
else:
    told = [None, None]
    try:
        if way == "gather":
            dist.all_gather_object(told, 1)
        elif way == "broadcast":
            dist.broadcast_object_list(told[:1], src=1)
        else:
            world.from_all(1)
    except Exception as error:
        print(type(error).__name__, error)
os._exit(0)
"""


@pytest.mark.parametrize("way", ["gather", "broadcast", "own"])
def test_a_pickle_from_a_peer_is_refused_and_runs_nothing(tmp_path, way):
    script = tmp_path / "peers.py"
    script.write_text(textwrap.dedent(PEERS))
    (tmp_path / "store").touch()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path, way],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert not (tmp_path / "hit").exists(), said
    expected = "JSONDecodeError" if way == "own" else "UnpicklingError"
    assert expected in said[0] or "UnicodeDecodeError" in said[0], said


def test_torch_unpickles_at_the_place_that_is_guarded():
    "The name is torch's own and private: without it, messages would be unpickled as before."
    import inspect

    from torch.distributed import distributed_c10d

    assert "_unpickler(io.BytesIO(buf)).load()" in inspect.getsource(
        distributed_c10d._tensor_to_object
    )

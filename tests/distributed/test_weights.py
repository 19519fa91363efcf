"""Rank 0's weights reach the other ranks, each its own rows, over the communicator of the group."""

import pytest

from multigpu_ft import launch


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_travel_in_batches_of_all_ranks(ranks):
    """Under NCCL a plain `send` sets up a communicator for its pair, and a first batch without some
    rank would wait for it forever."""

    def share(rows):
        import os

        import torch
        import torch.distributed as dist

        from multigpu_ft.distributed.weights import receive

        calls = []

        def spied(name):
            original = getattr(dist, name)

            def spy(*arguments, **named):
                calls.append(name)
                return original(*arguments, **named)

            setattr(dist, name, spy)

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo")
        for name in ("send", "recv", "batch_isend_irecv", "broadcast"):
            spied(name)
        cpu = torch.device("cpu")
        own = []
        for count in rows:
            torch.manual_seed(count)
            unit = torch.nn.Linear(5, count, dtype=torch.bfloat16 if count % 2 else torch.float32)
            unit.register_buffer("scale", torch.arange(3.0))
            expected = [t.detach().clone() for t in (*unit.parameters(), unit.scale)]
            if rank:
                with torch.no_grad():
                    for tensor in (*unit.parameters(), unit.scale):
                        tensor.zero_()
            receive(unit, set(), cpu, rank, cut_for=size)
            arrived = [*unit.parameters(), unit.scale]
            for got, sent in zip(arrived[:2], expected[:2], strict=True):
                parts = [t.chunk(size) for t in (got, sent)]
                own += [torch.equal(*(p[rank] for p in parts)) if rank < len(parts[0]) else True]
            own.append(torch.equal(arrived[2], expected[2]))
        told = [None] * size
        dist.all_gather_object(told, [all(own), list(calls)])
        dist.barrier()
        dist.destroy_process_group()
        return told

    # 4 on 3 ranks are cut into 2, 2 and none
    rows = [1, 2, 4, 7, 12]
    told = launch(share, rows, nproc=ranks)
    in_batches = sum(len(range(0, n, -(-n // ranks))) == ranks for n in rows)
    for rank, (arrived, calls) in enumerate(told):
        assert arrived, f"rank {rank} has other rows"
        assert "send" not in calls and "recv" not in calls
        # weight and bias
        assert calls.count("batch_isend_irecv") == 2 * in_batches > 0
        assert calls == told[0][1], "all ranks take part in each exchange"

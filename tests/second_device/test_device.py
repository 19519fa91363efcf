"""The second device itself: what it refuses, puts off, counts and forgets, as a GPU does."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

DEVICE = "second"


def on_device(*shape):
    return torch.ones(*shape, device=DEVICE)


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- which device ---------------------------------------------------------------------------------------------------


def test_torch_finds_it_by_itself():
    assert torch.accelerator.current_accelerator(check_available=True).type == DEVICE
    assert torch.accelerator.device_count() == 2 and torch.accelerator.current_device_index() == 0
    assert torch.get_device_module(DEVICE) is torch.second
    assert torch.second.get_device_capability() == (7, 5)
    assert dist.Backend.default_device_backend_map[DEVICE] == "secondccl"


def test_it_is_not_there_without_devices():
    code = "import torch; print(torch.accelerator.current_accelerator(check_available=True))"
    assert run(code, SECOND_DEVICES="0") == "None"


def test_importing_torch_uses_no_device():
    code = """
import sys, time, torch, second_device
print(torch.second.waits(), torch.second.memory_allocated(), torch.second.pinned_bytes())
del torch.second, sys.modules["torch.second"]
torch._register_device_module = lambda name, module: None  # torch takes a name only once
begun = time.process_time()
second_device._module(second_device._device)
print(time.process_time() - begun < 0.05)
"""
    assert run(code).split() == ["0", "0", "0", "True"]


def test_a_thread_has_a_current_device():
    with torch.second.device(1):
        assert on_device(1).device == torch.device(DEVICE, 1)
    assert on_device(1).device == torch.device(DEVICE, 0)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.second.set_device(2)


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_memory_that_nothing_was_written_to_is_no_number(dtype):
    assert torch.empty(5, device=DEVICE, dtype=dtype).cpu().isnan().all()
    assert (torch.empty(5, device=DEVICE, dtype=torch.int64).cpu() == -1).all()


def test_a_device_is_full_at_its_limit():
    with torch.second.device(1):
        before = torch.second.memory_allocated()
        torch.second.set_memory_limit(before + 2**20)
        try:
            kept = on_device(2**17)  # 512 KiB
            assert torch.second.mem_get_info() == (2**19, before + 2**20)
            assert torch.accelerator.memory_allocated() == before + 2**19
            with pytest.raises(torch.OutOfMemoryError, match="out of memory. Tried to allocate"):
                on_device(2**18)
            on_device(2**17)
            assert torch.second.max_memory_allocated() == before + 2**20
            torch.second.reset_peak_memory_stats()
            assert torch.second.max_memory_allocated() == before + 2**19
            del kept
            assert torch.second.memory_allocated() == before
        finally:
            torch.second.set_memory_limit(15109 * 2**20)
    assert on_device(2**18).numel(), "the other device has memory of its own"


def test_pinned_memory_is_rounded_up_and_has_an_end():
    before = torch.second.pinned_bytes()
    pinned = torch.empty(1000, pin_memory=True)
    assert pinned.is_pinned() and pinned[10:].is_pinned() and not torch.empty(9).is_pinned()
    assert torch.second.pinned_bytes() - before == 4096
    del pinned
    assert torch.second.pinned_bytes() == before
    code = """
import torch
try:
    torch.empty(2**20, pin_memory=True)
except torch.AcceleratorError as error:
    print(error)
"""
    assert run(code, SECOND_PINNED_MIB="1").startswith("SECOND error: out of memory\n")


def test_memory_that_is_freed_too_early_is_noticed():
    "A GPU would give it to the next tensor of its stream while another stream still reads it."
    x, aside = on_device(4), torch.second.Stream()

    def read_aside(x, record):
        aside.wait_stream(torch.second.current_stream())
        with torch.second.stream(aside):
            x + 1
        if record:
            x.record_stream(aside)

    read_aside(x, record=True)
    del x
    y = on_device(4)
    read_aside(y, record=False)
    del y
    with pytest.raises(RuntimeError, match="race: .* still used when it was freed"):
        on_device(4)
    torch.second.current_stream().wait_stream(aside)
    on_device(4)


# -- what is refused ------------------------------------------------------------------------------------------------


def test_devices_are_not_mixed():
    with pytest.raises(RuntimeError, match="two devices, second:0 and cpu!"):
        on_device(3) + torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices, second:0 and second:1!"):
        on_device(3) + torch.ones(3, device="second:1")
    with pytest.raises(RuntimeError, match="argument mask in aten::masked_fill"):
        on_device(3).masked_fill(torch.ones(3, dtype=torch.bool), 0.0)
    assert (on_device(3) * torch.tensor(2.0)).sum().item() == 6, "a number may be on the host"
    assert on_device(3)[torch.tensor([0, 2])].shape == (2,), "and so may indices"
    with pytest.raises(RuntimeError, match="two devices.*argument values"):
        on_device(3)[torch.tensor([0, 2])] = torch.ones(2)


def test_a_loss_scale_stays_on_the_device():
    gradients, found_inf = [on_device(3)], torch.zeros(1, device=DEVICE)
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    unscale(gradients, found_inf, torch.full((), 0.5, device=DEVICE))
    assert gradients[0].tolist() == [0.5] * 3
    with pytest.raises(RuntimeError, match="argument inv_scale"):
        unscale(gradients, found_inf, torch.tensor(0.5))


def test_tied_weights_stay_tied():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    both = torch.nn.Sequential(first, second)
    kept = first.weight
    both.to(DEVICE)
    assert first.weight is second.weight is kept and kept.device.type == DEVICE


# -- waits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.second.synchronize(),
        lambda x: torch.second.current_stream().synchronize(),
        lambda x: torch.ones(4).to(DEVICE),
        lambda x: torch.ones(4).to(DEVICE, non_blocking=True),  # from pageable memory
        lambda x: torch.tensor(1.0, device=DEVICE),
        lambda x: x[torch.tensor([1])],
    ],
)
def test_a_wait_is_counted_and_can_be_refused(wait):
    x = on_device(4)
    before = torch.second.waits()
    wait(x)
    assert torch.second.waits() > before
    with (
        torch.second.refusing_waits(),
        pytest.raises(RuntimeError, match="host waits for the device"),
    ):
        wait(x)


def test_computing_and_pinned_copies_do_not_wait():
    x, pinned = on_device(4, 4), torch.ones(4, 4).pin_memory()
    before = torch.second.waits()
    (torch.softmax(x @ x, -1) + pinned.to(DEVICE, non_blocking=True)).clamp_(max=1)
    torch.full((4,), 2.0, device=DEVICE)
    torch.empty_like(pinned, pin_memory=True).copy_(x, non_blocking=True)
    x[x > 3] = 0.0  # is filled where the mask is, without a search
    torch._foreach_copy_([x], [pinned], non_blocking=True)
    torch.second.Event().record()
    assert torch.second.waits() == before


def test_a_wait_is_refused_in_the_threads_of_autograd():
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    y = Waits.apply(on_device(3).requires_grad_()).sum()
    with (
        torch.second.refusing_waits(),
        pytest.raises(RuntimeError, match="waits for the device: aten::_local_scalar_dense"),
    ):
        y.backward()
    assert torch.second.get_sync_debug_mode() == 0
    torch.second.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="waits for the device: aten::nonzero"):
            on_device(3).nonzero()
    finally:
        torch.second.set_sync_debug_mode("default")


# -- time -----------------------------------------------------------------------------------------------------------


def test_a_copy_to_the_host_is_there_after_a_wait():
    x, host = on_device(4), torch.zeros(4).pin_memory()
    host.copy_(x, non_blocking=True)
    done = torch.second.Event()
    done.record()
    x.fill_(7)  # comes after the copy
    assert host.tolist() == [0] * 4
    done.synchronize()
    assert host.tolist() == [1] * 4


def test_a_copy_from_the_host_reads_late():
    host = torch.ones(4).pin_memory()
    x = host.to(DEVICE, non_blocking=True)
    host.fill_(5)  # too early
    assert x.tolist() == [5] * 4
    y = torch.ones(4).pin_memory().to(DEVICE, non_blocking=True)
    assert (y + 1).tolist() == [2] * 4, "work on the device comes after the copy"


def test_copies_by_way_of_the_host_keep_their_order():
    host, y = torch.zeros(4).pin_memory(), torch.empty(4, device="second:0")
    host.copy_(on_device(4), non_blocking=True)
    y.copy_(host, non_blocking=True)
    assert (y + 1).tolist() == [2] * 4


def test_devices_wait_for_each_other_in_a_copy():
    x = on_device(4) * 3
    y = x.to("second:1")
    assert (y + 1).tolist() == [4] * 4


def test_an_event_takes_time():
    begun, ended = (torch.second.Event(enable_timing=True) for _ in range(2))
    begun.record()
    on_device(100, 100) @ on_device(100, 100)
    ended.record()
    assert begun.elapsed_time(ended) > 0 and isinstance(begun, torch.Event)
    assert isinstance(torch.second.Stream(), torch.second.Stream)


def test_a_stream_has_to_wait_for_another():
    x, aside = on_device(4), torch.second.Stream()
    torch.second.synchronize()
    x += 1
    with (
        torch.second.stream(aside),
        pytest.raises(RuntimeError, match="race: .* reads memory that"),
    ):
        x + 1
    aside.wait_stream(torch.second.current_stream())
    with torch.second.stream(aside):
        y = x + 1
        done = torch.second.Event()
        done.record()
    with pytest.raises(RuntimeError, match="race: .* writes memory that .* reads"):
        x.zero_()
    torch.second.current_stream().wait_event(done)
    x.zero_()
    assert y.tolist() == [3] * 4


# -- random numbers -------------------------------------------------------------------------------------------------


def test_a_device_draws_from_a_generator_of_its_own():
    torch.manual_seed(3)
    host = torch.get_rng_state()
    state = torch.second.get_rng_state()
    first = torch.nn.functional.dropout(on_device(100), 0.5).cpu()
    assert torch.equal(torch.get_rng_state(), host), "the CPU's was not drawn from"
    second = torch.nn.functional.dropout(on_device(100), 0.5).cpu()
    assert not torch.equal(first, second)
    torch.second.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(on_device(100), 0.5).cpu(), first)
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.rand(5, device=DEVICE)
        torch.manual_seed(9)
    assert torch.equal(torch.nn.functional.dropout(on_device(100), 0.5).cpu(), second)


def test_a_generator_belongs_to_its_device():
    torch.manual_seed(1)
    host = torch.get_rng_state()
    generator = torch.Generator(DEVICE).manual_seed(5)
    first = torch.rand(9, device=DEVICE, generator=generator).cpu()
    assert torch.equal(
        first, torch.rand(9, device=DEVICE, generator=generator.manual_seed(5)).cpu()
    )
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(9, device=DEVICE, generator=torch.Generator())
    one = torch.second.get_rng_state(0)
    torch.rand(9, device="second:1")
    assert torch.equal(torch.second.get_rng_state(0), one)
    assert torch.equal(torch.get_rng_state(), host)


def test_a_block_that_is_computed_again_has_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    def block(x):
        return torch.nn.functional.dropout(x * x, 0.5)

    torch.manual_seed(0)
    x = on_device(50).requires_grad_()
    made = checkpoint(block, x, use_reentrant=False)
    made.sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * made.detach().cpu())


# -- graphs ---------------------------------------------------------------------------------------------------------


def test_a_graph_computes_when_it_is_replayed():
    x, kept = on_device(4), on_device(4)
    graph = torch.second.SecondGraph()
    with torch.second.graph(graph):
        y = x * 2
        kept.add_(y)
    assert y.cpu().isnan().all() and kept.tolist() == [1] * 4, "recording computes nothing"
    graph.replay()
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [6] * 4 and kept.tolist() == [9] * 4


def test_a_graph_has_a_backward_pass_and_draws_when_it_is_replayed():
    x = on_device(50).requires_grad_()
    x.grad = torch.zeros_like(x)
    state = torch.second.get_rng_state()
    graph = torch.second.SecondGraph()
    with torch.second.graph(graph):
        made = torch.nn.functional.dropout(x * x, 0.5)
        made.sum().backward()
    assert torch.equal(torch.second.get_rng_state(), state) and not x.grad.any().item()
    graph.replay()
    assert made.any().item() and torch.equal(x.grad.cpu(), 2 * made.detach().cpu())
    first = made.detach().clone()
    graph.replay()
    assert not torch.equal(made.detach().cpu(), first.cpu())


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(4).to(DEVICE),
        lambda x: torch.second.synchronize(),
    ],
)
def test_a_graph_has_no_waits(forbidden):
    x, before = on_device(4), torch.second.current_stream()
    with (
        pytest.raises(RuntimeError, match="capturing"),
        torch.second.graph(torch.second.SecondGraph()),
    ):
        forbidden(x)
    assert (
        torch.second.current_stream() == before and not torch.second.is_current_stream_capturing()
    )
    assert (x + 1).sum().item() == 8


# -- what trains on it ----------------------------------------------------------------------------------------------


def test_autocast_computes_products_in_half():
    x = on_device(4, 4)
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert (x @ x).dtype == torch.float16 and (x @ x).softmax(-1).dtype == torch.float32
    assert torch.mm(x.half(), x.half(), out_dtype=torch.float32).tolist() == [[4.0] * 4] * 4


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_layers_with_an_adapter_learn(bits):
    bnb, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    torch.manual_seed(0)
    made = (
        bnb.nn.Linear8bitLt(32, 32, has_fp16_weights=False)
        if bits == 8
        else bnb.nn.Linear4bit(32, 32, compute_dtype=torch.float16, quant_type="nf4")
    )
    plain = torch.nn.Linear(32, 32)
    made.load_state_dict(plain.state_dict())
    model = torch.nn.Sequential(made).to(DEVICE)
    x = torch.randn(16, 32)
    near = model(x.to(DEVICE).half()).float().cpu()
    assert (near - plain(x)).norm() < 0.2 * plain(x).norm()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(6):
        loss = model(x.to(DEVICE).half()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


# -- collectives ----------------------------------------------------------------------------------------------------

RANK = """
import os, torch, torch.distributed as dist
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank = int(os.environ["RANK"])
torch.second.set_device(rank)
dist.init_process_group("cpu:gloo,second:secondccl")
x = torch.full((4,), rank + 1.0, device="second")
dist.all_reduce(x)
assert x.tolist() == [3.0] * 4
try:
    dist.all_reduce(torch.ones(2, 2, device="second").t())
    raise SystemExit("a tensor with gaps was taken")
except RuntimeError as error:
    assert "contiguous" in str(error)
work = dist.all_reduce(x, async_op=True)
try:
    x + 1
    raise SystemExit("a collective was not waited for")
except RuntimeError as error:
    assert "race" in str(error), error
work.wait()
assert (x + 1).tolist() == [7.0] * 4
work = dist.all_reduce(x, async_op=True)
future = work.get_future()
try:
    x + 1
    raise SystemExit("a future was not waited for")
except RuntimeError as error:
    assert "race" in str(error), error
assert future.wait()[0].device.type == "second"
assert (x + 1).tolist() == [13.0] * 4
try:
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="secondccl"))
    raise SystemExit("a tensor of the host was taken")
except RuntimeError as error:
    assert "secondccl" in str(error) or "device" in str(error), error

def train(wrap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(f"second:{rank}")
    model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    losses = []
    for step in range(5):
        torch.manual_seed(step)
        rows = torch.randn(4, 8)[rank::2].pin_memory().to(f"second:{rank}", non_blocking=True)
        # the first steps prepare: DDP sends the order of its buckets to the device
        with torch.second.refusing_waits() if step > 1 else nullcontext():
            loss = (model(rows).float() - 1).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    return losses

def shard(dtype):
    def wrap(model):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for part in model:
            if list(part.parameters()):
                fully_shard(part, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    return wrap

def are_near(these, those, tolerance):
    return all(abs(a - b) < tolerance for a, b in zip(these, those, strict=True))

ddp = train(lambda m: DistributedDataParallel(m, device_ids=[rank]))
assert ddp[-1] < ddp[0]
for dtype, tolerance in ((None, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.1)):
    fsdp = train(shard(dtype))
    assert are_near(ddp, fsdp, tolerance), (dtype, ddp, fsdp)
dist.destroy_process_group()
"""


def test_ddp_and_fsdp_train_on_two_devices(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *(
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "localhost:0",
                str(tmp_path / "rank.py"),
            ),
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]

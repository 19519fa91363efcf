"""Which lack of memory a smaller micro-batch mends, and which ends the run with a remedy."""

import pytest
import torch
from harness import forks

from multigpu_ft import ModelError, Run, RunConfig, launch
from multigpu_ft.launcher.agent import root_cause
from multigpu_ft.launcher.rendezvous import _Failure
from multigpu_ft.launcher.restarts import Attempts, cause
from multigpu_ft.run.failures import failure_of, is_pinning
from multigpu_ft.run.processes import write_error
from multigpu_ft.run.run_dir import RunDir

NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:3684, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.29.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)
# as torch, CUDA's libraries and NCCL print them
OF_THE_GPU = {
    "allocator": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.74 GiB",
    "runtime": "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com",
    "driver": "CUDA driver error: out of memory",
    "driver, by name": "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY",
    "runtime, by name": "cudaMalloc: cudaErrorMemoryAllocation",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cublas handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cudnn handle": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cusolver": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cusparse": "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "nccl": f"{NCCL}Failed to CUDA calloc 6291456 bytes",
    "nccl, async": f"{NCCL}Failed to CUDA calloc async 2432 bytes",
    "nccl, malloc": f"{NCCL}Failed to CUDA malloc 6291456 bytes",
    "nccl, code": f"{NCCL}Cuda failure 2 'out of memory'",
}
OF_THE_HOST = {
    "torch": "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
    "nccl": f"{NCCL}Failed to CUDA host alloc 4923392 bytes",
    "cuda": "cudaHostAlloc failed: out of memory",
}
OTHERS = {
    "assert": "CUDA error: device-side assert triggered",
    "cublas": "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "nccl": f"{NCCL}Connection closed by remote peer",
    "shared memory": "out of resource: shared memory, Required: 147456, Hardware limit: 101376",
}


@pytest.fixture
def after(run_root):
    "Return a function that says whether a run on `device` restarts after a failure, and its directory."

    def restarts(text, device="cuda", max_restarts=0, kind="RuntimeError", **about):
        run_dir = RunDir.create(
            RunConfig(run_root=str(run_root), batch_size=4, max_restarts=max_restarts)
        )
        run_dir.update_status(state="running", device=device)
        failure = {"rank": 1, "exitcode": 1, "step": 7, "type": kind, "text": text, **about}
        return Attempts(run_dir, run_dir.config()).again(failure), run_dir

    return restarts


@pytest.mark.parametrize("who", OF_THE_GPU)
def test_a_full_gpu_halves_the_micro_batch(after, who):
    again, run_dir = after(OF_THE_GPU[who])
    assert again and run_dir.config().batch_size == 2
    (remark,) = run_dir.status()["remarks"]
    assert "rank 1 ran out of memory in step 7: batch_size 4 -> 2" in remark


def test_the_type_alone_tells_as_well(after):
    again, run_dir = after("", kind="OutOfMemoryError")
    assert again and run_dir.config().batch_size == 2


@pytest.mark.parametrize("who", OTHERS)
def test_other_failures_do_not(after, who):
    again, run_dir = after(OTHERS[who])
    assert not again and run_dir.config().batch_size == 4


@pytest.mark.parametrize("who", [*OF_THE_HOST, "pinned"])
def test_a_full_host_beside_a_gpu_does_not(after, who):
    text, about = OF_THE_HOST.get(who), {}
    if who == "pinned":
        text, about = OF_THE_GPU["runtime"], {"pinned": True}
    again, run_dir = after(text, **about)
    assert not again and run_dir.config().batch_size == 4
    status = run_dir.status()
    assert status["state"] == "failed"
    told = str(failure_of(run_dir, status["failure"]))
    assert "rank 1 ran out of host memory in step 7" in told and "lower nproc" in told
    again, run_dir = after(text, max_restarts=1, **about)
    assert again and run_dir.config().batch_size == 4, "a restart, but as it was"


def test_on_a_cpu_the_hosts_memory_is_that_of_the_activations(after):
    again, run_dir = after(OF_THE_HOST["torch"], device="cpu")
    assert again and run_dir.config().batch_size == 2


@pytest.mark.parametrize("text", [*OF_THE_GPU.values(), *OF_THE_HOST.values()])
def test_an_error_with_a_remedy_of_its_own_ends_the_run(after, text):
    again, run_dir = after(text, kind="ModelError", clear=True, max_restarts=3)
    assert not again and run_dir.config().batch_size == 4
    assert isinstance(failure_of(run_dir, run_dir.status()["failure"]), ModelError)


def test_memory_for_nccl_is_no_broken_connection():
    lost = {"lost": True, "text": "node 1 is not heard of"}
    full = {"rank": 1, "type": "DistBackendError", "text": OF_THE_GPU["nccl"], "time": 2.0}
    broken = {"rank": 0, "type": "DistBackendError", "text": OTHERS["nccl"], "time": 1.0}
    assert cause([broken, lost, full]) is full


def where_pinning_fails():
    "Return the traceback of a call that pins memory, which torch can't do without a GPU."
    try:
        torch.empty(
            4,
            dtype=torch.float32,
            pin_memory=True,
        )
    except RuntimeError as error:
        return error.__traceback__


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")


@WITHOUT_GPU
def test_pinning_is_told_by_the_line_of_code():
    with pytest.raises(RuntimeError) as of_method:
        torch.ones(3).pin_memory().to("cpu")
    with pytest.raises(RuntimeError) as of_another:
        torch.empty(2**62)
    assert is_pinning(of_method.value) and not is_pinning(of_another.value)
    assert not is_pinning(RuntimeError("never raised"))


@WITHOUT_GPU
@pytest.mark.parametrize("pins", [True, False])
def test_what_a_rank_writes_about_pinning_reaches_the_decision(after, run_root, pins):
    run_root.mkdir()
    run_dir = RunDir(run_root)
    run_dir.error_file(1).parent.mkdir(parents=True)
    error = RuntimeError(OF_THE_GPU["runtime"])
    write_error(
        run_dir.error_file(1), error.with_traceback(where_pinning_fails() if pins else None)
    )
    failure = root_cause(run_dir, {0: -15, 1: 1}, {0: 10, 1: 11})
    # between nodes it travels as a message
    told = _Failure(**failure).model_dump(exclude_none=True)
    for known in (failure, told):
        again, made = after(known["text"], pinned=known.get("pinned", False))
        assert (again, made.config().batch_size) == ((False, 4) if pins else (True, 2))


FULL = """
import os, sys
if os.environ.get('RANK') == '1' and 'multigpu_ft.training' in sys.orig_argv:
    import torch
    from multigpu_ft.PLACE import HOLDER as holder
    def full(*arguments, **named):
        raise ERROR
    holder.NAME = full
"""
PLACES = {
    "weights": ("distributed.strategies", "_Placed", "_place"),
    "first forward": ("models.loss", "LossModel", "forward"),
    "device": ("training.start", "Rank", "__init__"),
}
ERRORS = {
    "GPU": 'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")',
    "host": 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")',
}


@pytest.mark.parametrize(
    ("place", "memory"),
    [("weights", "GPU"), ("weights", "host"), ("first forward", "GPU"), ("device", "GPU")],
)
def test_a_model_that_does_not_fit_ends_the_run_at_once(
    run_root, tmp_path, monkeypatch, place, memory
):
    "A smaller micro-batch doesn't make it smaller."
    module, holder, name = PLACES[place]
    code = FULL.replace("PLACE", module).replace("HOLDER", holder).replace("NAME", name)
    for variable in forks.at_start(tmp_path, code.replace("ERROR", ERRORS[memory])).items():
        monkeypatch.setenv(*variable)
    remedy = "tuning='qlora'.*strategy='fsdp' on more GPUs" if memory == "GPU" else "lower nproc"
    with pytest.raises(
        ModelError,
        match=rf"does not fit: rank 1 ran out of {memory} memory while it was loaded.*"
        rf"batch_size would not help.*{remedy}",
    ):
        launch(RunConfig(run_root=str(run_root), strategy="ddp", batch_size=8, max_restarts=2))
    run = Run(next(run_root.iterdir()))
    assert run.state == "failed" and run.dir.config().batch_size == 8
    assert not run.status.get("remarks") and not list((run.dir.path / "logs").glob("before-*"))

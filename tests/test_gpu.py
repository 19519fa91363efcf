"""What only a GPU can show. One GPU is enough."""
import pytest

IMPORTS = "from multigpu_ft import *\n"
pytestmark = pytest.mark.gpu


def test_launch_after_cuda_was_initialised_in_the_kernel(kernel, run_root):
    k = kernel()
    k.run("import torch; torch.ones(8, device='cuda').sum().item(); assert torch.cuda.is_initialized()")
    for _ in range(2):
        assert "done" in k.run(IMPORTS + f"print(launch(RunConfig(run_root={str(run_root)!r}, end_idx=64, resume_file='none')).state)")


def test_launch_leaves_cuda_alone(kernel, run_root):
    k = kernel()
    k.run(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}, end_idx=64))")
    assert k.run("import sys; print('torch' in sys.modules)").strip() == "False"
    assert k.run("print(run.status['device'])").strip() == "cuda"


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("dtype", ["auto", "fp16", "bf16", "fp32"])
def test_trains_saves_and_goes_on(run_root, strategy, dtype):
    import torch

    from multigpu_ft import RunConfig, launch

    cfg = RunConfig(run_root=str(run_root), strategy=strategy, nproc=1, dtype=dtype, end_idx=160)
    first = launch(cfg.replace(max_steps=10))
    second = launch(cfg)
    if dtype == "auto":
        assert first.status["dtype"] == ("bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16")
    assert second.metrics[0]["step"] == 11 and second.metrics[-1]["loss"] < first.metrics[0]["loss"] - 0.5

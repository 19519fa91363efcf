"""From a notebook cell to N GPUs. Names are looked up when first used, so that importing this stays fast."""
__version__ = "0.1.0"

from importlib import import_module

_HOMES = {
    "RunConfig": "run.config",
    "RunDir": "run.run_dir",
    "ConfigError": "run.errors",
    "DataError": "run.errors",
    "ModelError": "run.errors",
    "CheckpointError": "run.errors",
    "launch": "launcher.api",
    "Run": "launcher.run",
    "runs": "launcher.api",
    "RunFailed": "run.failures",
    "run_slices": "launcher.slices",
    "Slices": "launcher.slices",
    "load_export": "checkpoints.api",
    "form": "config_form",
    "doctor": "diagnostics",
    "evaluate": "evaluation.api",
    "Evaluation": "evaluation.report",
    "model_card": "hub.model_card",
    "sync": "launcher.sync",
    "estimate": "memory.api",
    "Estimate": "memory.api",
    "generate": "generation.api",
    "Answers": "generation.api",
    "deploy_kubernetes": "deploy.kubernetes",
    "deploy_sagemaker": "deploy.sagemaker",
    "deploy_skypilot": "deploy.skypilot",
    "communication": "memory.scaling",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def load_ipython_extension(shell):
    "`%load_ext multigpu_ft`: makes `%%torchrun` known."
    shell.register_magics(import_module(f"{__name__}.magic").TorchrunMagics)


def __dir__():
    return [*globals(), *_HOMES]

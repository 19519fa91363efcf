"""From a notebook cell to N GPUs. Names are looked up when first used, so that importing this stays fast."""
__version__ = "0.1.0"

from importlib import import_module

_HOMES = {
    "RunConfig": "config", "RunDir": "rundir", "ConfigError": "config", "DataError": "config", "ModelError": "config",
    "CheckpointError": "config", "launch": "launcher", "Run": "launcher", "runs": "launcher", "RunFailed": "failures", "run_slices": "slices",
    "Slices": "slices", "load_export": "exports", "form": "widgets", "doctor": "checkup", "evaluate": "evaluation", "Evaluation": "reports",
    "model_card": "cards", "sync": "syncing", "estimate": "estimates", "Estimate": "estimates",
    "generate": "answers", "Answers": "answers", "deploy_kubernetes": "kubernetes_job", "deploy_sagemaker": "sagemaker_job",
    "deploy_skypilot": "skypilot_task", "communication": "traffic",
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

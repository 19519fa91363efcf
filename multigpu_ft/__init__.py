"""From a notebook cell to N GPUs. Names are looked up when first used, so that importing this stays fast."""
__version__ = "0.0.1"

from importlib import import_module

_HOMES = {
    "RunConfig": "config", "RunDir": "config", "ConfigError": "config", "DataError": "config", "ModelError": "config",
    "CheckpointError": "config", "launch": "launcher", "Run": "launcher", "RunFailed": "launcher", "run_slices": "slices", "Slices": "slices",
    "load_export": "exports",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__():
    return [*globals(), *_HOMES]

"""A second device for torch, without hardware: `torch.second`. README.md in the folder above says what it proves."""

import contextlib
import os
import sys
import types


def load():
    "Make `torch.second`. torch calls this when it is imported, because of the entry point `torch.backends`."
    import torch

    if hasattr(torch, "second"):
        return
    # for devices that it doesn't know bitsandbytes compiles its kernels, again for each shape, which takes seconds
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from second_device import _device

    torch.utils.rename_privateuse1_backend("second")
    torch._register_device_module("second", _module(_device))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    torch.distributed.Backend.register_backend(
        "secondccl",
        lambda store, rank, size, timeout: _device.collectives(
            torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
        ),
        devices=["second"],
    )


def _number(device):
    "Return the number of `device`, which is a number, a name, a `torch.device` or None for the current one."
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.second.current_device() if index is None else index


def _module(native):
    module = types.ModuleType("torch.second", __doc__)
    sys.modules["torch.second"] = module
    for part in (_devices, _streams, _waits, _memory, _random, _abilities):
        for name, value in part(native).items():
            setattr(module, name, value)
    from second_device import graphs

    for name in ("SecondGraph", "graph", "graph_pool_handle"):
        setattr(module, name, getattr(graphs, name))
    module.is_current_stream_capturing = native.is_capturing
    return module


def _devices(native):
    import torch

    class device:
        "Makes a device current for a block of code."

        def __init__(self, device):
            self.number = _number(device)

        def __enter__(self):
            self.before = native.current_device()
            native.set_device(self.number)

        def __exit__(self, *error):
            native.set_device(self.before)

    def synchronize(device=None):
        torch.accelerator.synchronize(_number(device))

    return {
        "is_available": lambda: native.device_count() > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_initialized": True,  # else activation checkpointing wouldn't keep the generator's state
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda which: native.set_device(_number(which)),
        "device": device,
        "device_of": lambda tensor: device(
            tensor.device if tensor.device.type == "second" else native.current_device()
        ),
        "synchronize": synchronize,
        "utils": types.SimpleNamespace(),
        "_device_t": torch.device,
    }


def _streams(native):
    import torch

    def here(device=None):
        return torch.device("second", _number(device))

    class Stream(torch.Stream):
        "A queue of work. What runs on another one has to wait for it."

        def __new__(cls, device=None, priority=0, **_):
            return super().__new__(cls, here(device), priority=priority)

    def Event(enable_timing=False, **_):  # no class: torch takes no subclass of its events
        "Return a moment in a stream, for which other streams or the host can wait."
        return torch.Event(here(), enable_timing=enable_timing)

    @contextlib.contextmanager
    def stream(stream):
        "Make `stream` and its device current; None changes nothing."
        if stream is None:
            yield
            return
        device = native.current_device()
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            native.set_device(device)

    def default_stream(device=None):
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        return torch.Stream(stream_id=0, device_index=_number(device), device_type=kind)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(here(device)),
        "default_stream": default_stream,
    }


def _waits(native):
    modes = ("default", "warn", "error")

    def set_sync_debug_mode(mode):
        """Say what happens where the host waits for the device, in any thread: nothing, a warning or an error.

        Unlike CUDA's mode it also concerns `synchronize`, which waits by design."""
        native.set_waits(modes.index(mode) if isinstance(mode, str) else mode)

    @contextlib.contextmanager
    def refusing_waits():
        "Raise an error where the host waits for the device, for a block of code."
        before = native.get_waits()
        set_sync_debug_mode("error")
        try:
            yield
        finally:
            native.set_waits(before)

    return {
        "waits": native.waits,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": native.get_waits,
        "refusing_waits": refusing_waits,
    }


def _memory(native):
    import torch

    of = torch.accelerator

    def mem_get_info(device=None):
        "Return the free and all bytes of a device. Other processes have devices of their own."
        total = native.limit(_number(device))
        return max(0, total - of.memory_allocated(_number(device))), total

    return {
        "memory_allocated": lambda device=None: of.memory_allocated(_number(device)),
        "memory_reserved": lambda device=None: of.memory_reserved(_number(device)),
        "max_memory_allocated": lambda device=None: of.max_memory_allocated(_number(device)),
        "max_memory_reserved": lambda device=None: of.max_memory_reserved(_number(device)),
        "reset_peak_memory_stats": lambda device=None: of.reset_peak_memory_stats(_number(device)),
        "memory_stats": lambda device=None: of.memory_stats(_number(device)),
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: None,
        "set_memory_limit": lambda limit, device=None: native.set_limit(_number(device), limit),
        "pinned_bytes": native.pinned_bytes,
    }


def _random(native):
    def generator(device):
        return native.default_generator(_number(device))

    def get_rng_state(device="second"):
        return generator(device).get_state()

    def set_rng_state(state, device="second"):
        generator(device).set_state(state)

    def manual_seed(seed):
        generator(None).manual_seed(seed)

    def manual_seed_all(seed):
        for number in range(native.device_count()):
            generator(number).manual_seed(seed)

    return {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(n) for n in range(native.device_count())],
        "set_rng_state_all": lambda states: [set_rng_state(s, n) for n, s in enumerate(states)],
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "seed": lambda: generator(None).seed() and None,
        "initial_seed": lambda: generator(None).initial_seed(),
    }


def _abilities(native):
    import torch

    def get_device_properties(device=None):
        "Return what a T4 says of itself, so that what asks by the name of a GPU finds one."
        total = native.limit(_number(device))
        return types.SimpleNamespace(name="Tesla T4", total_memory=total, major=7, minor=5)

    return {
        "get_device_capability": lambda device=None: (7, 5),
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: get_device_properties(device).name,
        "is_bf16_supported": lambda *_, **__: True,  # as torch.cuda says of a T4
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }

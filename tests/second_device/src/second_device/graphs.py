"""Graphs: what is dispatched while one is recorded is played again on the same memory.

As on CUDA, recording computes nothing: what the operators return holds no number before the first replay, and what
they would have changed is unchanged. A wait for the device is refused, and a tensor of the host as well.

In truth each operator is run, to learn the shapes of what it returns, and undone."""

import contextlib
import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from second_device import _device

_pools = itertools.count(1)


def _tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _addresses(values):
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(values)}


def _forget(tensor):
    "Fill `tensor` with bytes that are no number."
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else -1)


def _changed(function, args, kwargs):
    "Return the tensors among the arguments that `function` writes to."
    found = []
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


class _Recorder(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, given = function.name(), _tensors((args, kwargs))
        if any(tensor.device.type == "cpu" and tensor.dim() for tensor in given):
            raise RuntimeError(
                f"SECOND error: {name} has a tensor of the host, which a capturing stream can't use"
            )
        before = [(tensor, tensor.clone()) for tensor in _changed(function, args, kwargs)]
        made = function(*args, **kwargs)
        if any(tensor.device.type == "cpu" for tensor in _tensors(made)):
            raise RuntimeError(f"SECOND error: {name} returns a tensor of the host while capturing")
        self._calls.append((function, args, kwargs, made))
        for tensor, content in before:
            tensor.copy_(content)
        kept = _addresses(given)
        for tensor in _tensors(made):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in kept:
                _forget(tensor)
        return made


class SecondGraph:
    "A recorded graph, as `torch.cuda.CUDAGraph`."

    def __init__(self, keep_graph=False):
        self._pool = None
        self.reset()

    def reset(self):
        "Forget what was recorded."
        self._calls, self._is_complete = [], False
        self._recording = contextlib.ExitStack()

    def pool(self):
        return self._pool

    def capture_begin(self, pool=None, capture_error_mode="global"):
        "Record what is computed on the current stream, until `capture_end`."
        self._pool = pool or graph_pool_handle()
        self.reset()
        _device.begin_capture(capture_error_mode == "global")
        self._recording.callback(_device.end_capture)
        state = torch.second.get_rng_state()  # a replay draws numbers, a recording none
        self._recording.callback(torch.second.set_rng_state, state)
        self._recording.enter_context(_Recorder(self._calls))

    def capture_end(self):
        self._recording.close()
        self._is_complete = True

    def replay(self):
        if not self._is_complete:
            raise RuntimeError("Called SecondGraph::replay without a preceding successful capture.")
        for function, args, kwargs, made in self._calls:
            again = function(*args, **kwargs)
            given = _addresses((args, kwargs))
            for old, new in zip(_tensors(made), _tensors(again), strict=True):
                is_view = old.untyped_storage().data_ptr() in given
                if new is not old and not is_view and old.numel():
                    old.copy_(new)


def graph_pool_handle():
    return (0, next(_pools))


@contextlib.contextmanager
def graph(recorded, pool=None, stream=None, capture_error_mode="global"):
    "Record into `recorded` what the block computes, on a side stream."
    torch.second.synchronize()
    aside = stream or torch.second.Stream()
    before = torch.second.current_stream()
    try:
        with torch.second.stream(aside):
            recorded.capture_begin(pool, capture_error_mode)
            try:
                yield recorded
            except BaseException:
                recorded.capture_end()
                recorded.reset()
                raise
            recorded.capture_end()
    finally:
        before.wait_stream(aside)  # recording has run there what a GPU would only have noted

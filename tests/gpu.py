"""A GPU in software, as asynchronous as a real one can be: for CI, which has none.

What is launched goes to a queue and is done as late as the rules allow, or at random a little earlier; outputs hold nonsense
until then. So whoever reads too early, overwrites too early, forgets that a stream has to wait for another, or relies on what
only Python knew when a graph was captured, gets other numbers than a CPU – each time, not once in a thousand. Speed, and the
kernels themselves, only a real GPU can show.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

HERE = torch.device("cuda", 0)
# Their results say how large other tensors are, or are Python's: a GPU has to be asked.
ASKING = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "is_nonzero"}
SAME_MEMORY = {"_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh"}


class OnGpu(Tensor):
    """Where its numbers are, or will be: a CPU tensor that only the queues touch. To torch itself it is on no device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: HERE)
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype, "device": "meta"}
        made = Tensor._make_wrapper_subclass(cls, inner.size(), **layout)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Gpu.there.call(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: OnGpu) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner = other.inner

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = self.detach().clone()
        copied = torch.nn.Parameter(copied, self.requires_grad) if getattr(self, "_is_param", False) else copied
        return memo.setdefault(id(self), copied)


class Nowhere(TorchFunctionMode):
    """torch without CUDA knows of no such device: it is told of the one that has no memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], HERE)
        if func is Tensor.tolist and isinstance(args[0], OnGpu):
            return args[0].tolist()
        if kwargs.get("device") is not None:
            kwargs["device"] = self._named(kwargs["device"])
            if func in (torch.tensor, torch.as_tensor):  # their numbers come from here
                device = kwargs.pop("device")
                return func(*args, **kwargs).to(device)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], tuple):
            args = (args[0], tuple(torch.tensor(x) if isinstance(x, list) else x for x in args[1]), *args[2:])
        return func(*map(self._named, args), **kwargs)

    @staticmethod
    def _named(x: Any) -> Any:
        return torch.device("meta") if (isinstance(x, str | torch.device) and str(x).startswith("cuda")) else x


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.queue: deque[Callable[[], None]] = deque()
        self.told = self.done = 0  # how many things, ever
        Gpu.there.streams.append(self)

    def tell(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.told += 1

    def reach(self, count: int) -> None:
        """Do what was told until so many things are done."""
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            while self.done < count:
                self.queue[0]()
                self.queue.popleft()
                self.done += 1

    def wait_event(self, event: Event) -> None:
        stream, count = event.stream, event.count
        if stream is not None and stream is not self:
            assert Gpu.there.recording is None, "another stream is waited for in what is captured"
            self.tell(lambda: stream.reach(count))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        Gpu.there.wait_for(self, self.told)


class Event:
    def __init__(self, **kwargs: Any) -> None:
        self.stream: Stream | None = None
        self.count = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or Gpu.there.current
        self.count = self.stream.told

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.count

    def synchronize(self) -> None:
        if self.stream is not None:
            Gpu.there.wait_for(self.stream, self.count)


class Graph:
    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []

    def replay(self) -> None:
        for work in self.works:
            Gpu.there.launch(work)

    def __del__(self) -> None:
        Gpu.there.spoilt |= Gpu.there.recording is not None  # the process would be ended


def sleep() -> None:
    """In a queue: nobody gets past it who does not have to."""


class Gpu(TorchDispatchMode):
    there: Gpu

    def __init__(self, seed: int) -> None:
        super().__init__()
        Gpu.there = self
        self.streams: list[Stream] = []
        self.current = self.default = Stream()
        self.recording: Graph | None = None
        self.spoilt = False  # a graph was destroyed while another was recorded
        self.made: list[Tensor] = []  # by what is being recorded
        self.waits = 0  # how often somebody waited for the GPU
        self.pinned: dict[int, tuple[int, Any]] = {}  # begin -> end, and what must not be freed
        self._chance = random.Random(seed)

    # Streams and graphs

    def launch(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.works.append(work)
            return
        self.current.tell(work)
        if self._chance.random() < 0.05:
            some = self._chance.choice(self.streams)
            for _ in range(self._chance.randrange(40)):
                if not some.queue or some.queue[0] is sleep:
                    break
                some.reach(some.done + 1)

    def wait_for(self, stream: Stream, count: int) -> None:
        assert self.recording is None, "the GPU is waited for in what is captured"
        self.waits += 1
        stream.reach(count)

    def synchronize(self, device: Any = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def record(self, graph: Graph, stream: Stream, capture_error_mode: str = "global") -> Iterator[None]:
        with self.on(stream):
            self.recording, self.made = graph, []
            try:
                yield
            finally:
                self.recording = None
            for x in self.made:  # nothing was computed
                nonsense(x)

    # Operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.pop("pin_memory", None):
            return self._pin(func(*args, **kwargs))
        device = kwargs.get("device")
        if any(isinstance(x, OnGpu) for x in tree_leaves((args, kwargs))) or (device and torch.device(device).type != "cpu"):
            return self.call(func, args, kwargs)
        return func(*args, **kwargs)

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode even what is made of others, such as reshape, comes here
                return func.decompose(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return self._call(func, func.__name__.partition(".")[0], args, kwargs)

    def _call(self, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
        if name in ("copy_", "_to_copy"):
            return self._copy(func, name, args, kwargs)
        indexed = name in ("index", "index_put_")
        if indexed:  # that indices come from here is allowed
            args = (args[0], [x if x is None or isinstance(x, OnGpu) else OnGpu(x.cpu().clone()) for x in args[1]], *args[2:])
        if name.endswith("_like") and not isinstance(args[0], OnGpu):  # its shape is what is asked for
            args = (OnGpu(args[0]), *args[1:])
        inner_args, inner_kwargs = tree_map(self._inner, (args, kwargs))
        there = torch.device(kwargs["device"]).type != "cpu" if kwargs.get("device") else True
        if "device" in kwargs:
            inner_kwargs["device"] = "cpu"
        if name in ASKING or (indexed and any(x is not None and x.dtype == torch.bool for x in args[1])):
            self.current.synchronize()
            return tree_map(self._wrapped, func(*inner_args, **inner_kwargs))
        if func.is_view or name in SAME_MEMORY:
            return tree_map(self._wrapped, func(*inner_args, **inner_kwargs))
        if func._schema.is_mutable:
            self.launch(lambda: func(*inner_args, **inner_kwargs))
            return kwargs.get("out", args[0] if func._schema.returns else None)
        if not there:  # a factory of CPU tensors, like something here
            return func(*inner_args, **inner_kwargs)
        meta_args, meta_kwargs = tree_map(_shape, (inner_args, inner_kwargs))
        if "device" in meta_kwargs or not any(isinstance(x, Tensor) for x in tree_leaves(meta_args)):
            meta_kwargs["device"] = "meta"
        shapes = func(*meta_args, **meta_kwargs)
        results = tree_map(lambda x: self._empty(x) if isinstance(x, Tensor) else x, shapes)

        def work() -> None:
            real = func(*inner_args, **inner_kwargs)
            for x, new in zip(tree_leaves(results), tree_leaves(real), strict=True):
                if isinstance(x, Tensor):
                    x.copy_(new)

        self.launch(work)
        return tree_map(self._wrapped, results)

    def _copy(self, func: Any, name: str, args: tuple, kwargs: dict) -> Tensor:
        """Between here and there. What is not page-locked is read at once on its way here, and waited for on its way back."""
        aside = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if name == "copy_":
            target, source = args[0], args[1]
        else:
            source = args[0]
            device = torch.device(kwargs.get("device") or source.device)
            layout = {k: kwargs[k] for k in ("dtype", "memory_format") if kwargs.get(k) is not None}
            made = torch.empty_like(source.inner if isinstance(source, OnGpu) else source, **layout)
            target = made if device.type == "cpu" else OnGpu(self._empty(made))
        to, what = target.inner if isinstance(target, OnGpu) else target, source
        if isinstance(source, OnGpu):
            what = source.inner
        elif not self._is_pinned(source):
            assert self.recording is None, "what is not page-locked is copied in what is captured"
            what = source.clone()
        self.launch(lambda: to.copy_(what))
        back = not isinstance(target, OnGpu)
        if (back or not isinstance(source, OnGpu)) and not (aside and (not back or self._is_pinned(target))):
            self.current.synchronize()
        return target

    def _empty(self, like: Tensor) -> Tensor:
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        nonsense(made)
        if self.recording is not None:
            self.made.append(made)
        return made

    def _inner(self, x: Any) -> Any:
        if isinstance(x, OnGpu):
            return x.inner
        if isinstance(x, Tensor):
            assert x.device.type == "cpu", "torch has lost its numbers on the way to a device that has no memory"
            assert x.dim() == 0, f"a tensor of {tuple(x.shape)} on the CPU beside others on the GPU"
            return x.clone()
        return x

    @staticmethod
    def _wrapped(x: Any) -> Any:
        return OnGpu(x) if isinstance(x, Tensor) else x

    # Page-locked memory

    def _pin(self, x: Tensor) -> Tensor:
        self.register(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes(), 0, x)
        return x

    def register(self, begin: int, size: int, flags: int, owner: Any = None) -> int:
        self.pinned[begin] = begin + size, owner
        return 0

    def unregister(self, begin: int) -> int:
        del self.pinned[begin]
        return 0

    def _is_pinned(self, x: Tensor) -> bool:
        return any(begin <= x.data_ptr() < end for begin, (end, _) in self.pinned.items())


def nonsense(x: Tensor) -> None:
    x.fill_(float("nan") if x.is_floating_point() else 77 if x.dtype != torch.bool else True)


def _shape(x: Any) -> Any:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) and x.dim() else x


REAL = torch.cuda.is_available()
GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.fixture(autouse=True)
def gpu(request, monkeypatch):
    """For tests marked with GPU: a real one, or where there is none the one above."""
    if REAL or request.node.get_closest_marker("gpu") is None:
        yield None
        return
    gpu = Gpu(0)
    for name, instead in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: gpu.current,
        "stream": gpu.on,
        "synchronize": gpu.synchronize,
        "CUDAGraph": Graph,
        "graph": gpu.record,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=gpu.register, cudaHostUnregister=gpu.unregister),
        "_sleep": lambda cycles: gpu.launch(sleep),
    }.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    with gpu, Nowhere():
        yield gpu

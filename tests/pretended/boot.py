"""Register the pretended device with torch and Lightning; `site/sitecustomize.py` runs this once torch is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from pretended.build import compiled

sys.path.pop()

GIB = 2**30
MEMORY = 80 * GIB


def load(kind: str) -> Any:
    """Load the compiled module and register it with torch."""
    file = compiled(kind, torch.__version__)
    if not file.exists():
        raise ImportError("it is not compiled: python tests/pretended/build.py")
    spec: Any = importlib.util.spec_from_file_location(f"pretended_{kind}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    return module


# ---- in the place of CUDA -------------------------------------------------------------------------------------------


def as_cuda() -> Any:
    """Give `torch.cuda` two devices."""
    core = load("cuda")
    cuda: Any = torch.cuda
    for name, value in _functions_of_cuda(core).items():
        setattr(torch._C, name, value)
    torch._C.has_cuda = True  # type: ignore[attr-defined]
    properties = [_properties(index) for index in range(core.device_count())]
    cuda._exchange_device = core.exchange_device
    cuda._maybe_exchange_device = lambda d: -1 if d < 0 else core.exchange_device(d)
    cuda._cudart = types.SimpleNamespace(
        cudaMemGetInfo=lambda d: (MEMORY - core.usage(_index(core, d))[0], MEMORY),
        cudaError=types.SimpleNamespace(success=0),
    )
    cuda._get_device_properties = properties.__getitem__
    cuda._is_in_bad_fork = lambda: False
    cuda.default_generators = tuple(core.default_generator(i) for i in range(core.device_count()))
    cuda._queued_calls[:] = [call for call in cuda._queued_calls if "check_" not in str(call[0])]
    cuda.is_current_stream_capturing = core.capturing
    cuda.Stream = cuda.streams.Stream = _stream_of_cuda(core)
    cuda.Event = cuda.streams.Event = EventOfCuda
    torch.version.cuda = "13.0"
    _make_storages("cuda")
    cuda._pretended_cells = _lstm_cells("CUDA")
    return core


def _index(core: Any, device: int | None) -> int:
    return core.get_device() if device is None or device < 0 else device


def _functions_of_cuda(core: Any) -> dict[str, Any]:
    """Return the functions of `torch._C` that a torch without CUDA lacks."""

    def index(device: int = -1) -> int:
        return _index(core, device)

    return {
        "_cuda_init": lambda: None,
        "_cuda_getDeviceCount": core.device_count,
        "_cuda_getDevice": core.get_device,
        "_cuda_setDevice": core.set_device,
        "_cuda_exchangeDevice": core.exchange_device,
        "_cuda_maybeExchangeDevice": core.exchange_device,
        "_cuda_synchronize": lambda: core.synchronize(-1),
        "_cuda_getCurrentRawStream": lambda d: core.current_stream(index(d)),
        "_cuda_getCurrentStream": lambda d: (core.current_stream(index(d)), index(d), 1),
        "_cuda_getDefaultStream": lambda d: (0, index(d), 1),
        "_cuda_setStream": lambda stream_id, device_index, device_type: core.set_stream(device_index, stream_id),
        "_cuda_memoryStats": lambda d: _memory_stats(core, index(d)),
        "_cuda_resetPeakMemoryStats": lambda d: core.reset_peak(index(d)),
        "_cuda_resetAccumulatedMemoryStats": lambda d: None,
        "_cuda_emptyCache": lambda *a: core.count("empty_cache"),
        "_cuda_isInBadFork": lambda: False,
        "_cuda_set_sync_debug_mode": core.set_sync_mode,
        "_cuda_get_sync_debug_mode": core.get_sync_mode,
        "_cuda_canDeviceAccessPeer": lambda a, b: True,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_isCurrentStreamCapturing": core.capturing,
        "_cuda_cudaCachingAllocator_enable": lambda v: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memorySnapshot": lambda *a: {"segments": []},
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
        "_cuda_hasPrimaryContext": lambda d: True,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_CUDAAllocator_AllocatorState": type("_cuda_CUDAAllocator_AllocatorState", (), {}),
        "_has_cuda": True,
    }


def _properties(index: int) -> Any:
    return types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, warp_size=32,
        max_threads_per_multi_processor=2048, shared_memory_per_block=49152, L2_cache_size=52428800,
        regs_per_multiprocessor=65536, is_integrated=False, is_multi_gpu_board=False, gcnArchName="",
        uuid=f"pretended-{index}",
    )  # fmt: skip


def _memory_stats(core: Any, index: int) -> dict[str, Any]:
    now, peak, total, count = core.usage(index)

    def stat(current: int, top: int, allocated: int) -> dict[str, int]:
        return {"current": current, "peak": top, "allocated": allocated, "freed": allocated - current}

    def pools(values: dict[str, int]) -> dict[str, dict[str, int]]:
        return {"all": values, "small_pool": dict(values), "large_pool": dict(values)}

    in_bytes = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    in_pieces = ("allocation", "segment", "active", "inactive_split")
    zeros = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
    return {
        **{name: pools(stat(now, peak, total)) for name in in_bytes},
        **{name: pools(stat(count, count, count)) for name in in_pieces},
        "inactive_split_bytes": pools(stat(0, 0, 0)),
        **dict.fromkeys(zeros, 0),
        "max_split_size": -1,
        "oversize_allocations": stat(0, 0, 0),
        "oversize_segments": stat(0, 0, 0),
    }


class EventOfCuda:
    """An event that holds a `torch.Event`: a subclass of `torch.Event` cannot call `elapsed_time` with itself."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.own = torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def record(self, stream: Any = None) -> None:
        self.own.record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        self.own.wait(torch.cuda.current_stream() if stream is None else stream)

    def query(self) -> bool:
        return self.own.query()

    def synchronize(self) -> None:
        self.own.synchronize()

    def elapsed_time(self, end: EventOfCuda) -> float:
        if not isinstance(end, EventOfCuda):
            raise TypeError("elapsed_time takes a torch.cuda.Event")
        return self.own.elapsed_time(end.own)

    @property
    def cuda_event(self) -> int:
        return self.own.event_id

    @property
    def device(self) -> torch.device:
        return self.own.device


def _stream_of_cuda(core: Any) -> type:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if kwargs:
                return super().__new__(cls, **kwargs)
            index = core.get_device() if device is None else torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

        def wait_event(self, event: Any) -> None:
            super().wait_event(getattr(event, "own", event))

        def wait_stream(self, stream: Any) -> None:
            super().wait_stream(stream)

        def record_event(self, event: Any = None) -> Any:
            event = EventOfCuda() if event is None else event
            event.record(self)
            return event

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    return Stream


def _make_storages(kind: str) -> None:
    """Let storages be made on the device; a torch without CUDA can only make tensors there."""
    plain: Any = torch._C.StorageBase.__new__

    def make(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == kind:
            size = args[0] if args and isinstance(args[0], int) else 0
            with torch.inference_mode(False), torch.utils._python_dispatch._disable_current_modes():
                return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        return plain(cls, *args, **({"device": device} if device is not None else {}), **kwargs)

    torch.UntypedStorage.__new__ = make  # type: ignore[method-assign]


def _lstm_cells(key: str) -> Any:
    """Register the kernels of an LSTM cell, which exist for CUDA only."""
    library = torch.library.Library("aten", "IMPL")

    def cell(ig: Any, hg: Any, cx: Any, ib: Any = None, hb: Any = None) -> Any:
        gates = ig.float() + hg.float() + (0 if ib is None else ib.float() + hb.float())
        i, f, g, o = gates.chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cy = f * cx.float() + i * g
        hy = o * cy.tanh()
        return hy.to(ig.dtype), cy.to(ig.dtype), torch.cat([i, f, g, o], 1).to(ig.dtype)

    def backward(ghy: Any, gcy: Any, cx: Any, cy: Any, workspace: Any, has_bias: bool) -> Any:
        if ghy is None and gcy is None:
            return None, None, None
        dtype = cx.dtype
        i, f, g, o = workspace.float().chunk(4, 1)
        cx, t = cx.float(), cy.float().tanh()
        ghy = torch.zeros_like(t) if ghy is None else ghy.float()
        gc = ghy * o * (1 - t * t) + (0 if gcy is None else gcy.float())
        of_gates = [gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), ghy * t * o * (1 - o)]
        gates = torch.cat(of_gates, 1)
        return gates.to(dtype), (gc * f).to(dtype), gates.sum(0).to(dtype) if has_bias else None

    library.impl("_thnn_fused_lstm_cell", cell, key)
    library.impl("_thnn_fused_lstm_cell_backward_impl", backward, key)
    return library


# ---- a device type of its own ---------------------------------------------------------------------------------------


def as_other(name: str) -> Any:
    """Register the module `torch.pretended`, with the functions that torch expects of a backend, and a Lightning
    accelerator.
    """
    torch.utils.rename_privateuse1_backend(name)
    core = load(name)

    def index(device: Any = None) -> int:
        found = device if isinstance(device, int) or device is None else torch.device(device).index
        return _index(core, found)

    generators = tuple(core.default_generator(i) for i in range(core.device_count()))

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, torch.device(name, index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, device=name, enable_timing=enable_timing)

    class OnDevice:
        def __init__(self, device: Any) -> None:
            self.new, self.old = index(device), 0

        def __enter__(self) -> None:
            self.old = core.exchange_device(self.new)

        def __exit__(self, *args: object) -> None:
            core.set_device(self.old)

    module: Any = types.ModuleType(f"torch.{name}")
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": core.device_count,
        "current_device": core.get_device,
        "set_device": lambda d: core.set_device(index(d)),
        "synchronize": lambda d=None: core.synchronize(index(d)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_autocast_available": True,
        "default_generators": generators,
        "manual_seed_all": lambda seed: [g.manual_seed(seed) for g in generators],
        "manual_seed": lambda seed: generators[index(None)].manual_seed(seed),  # noqa: PLW0108 # of the device of then
        "get_rng_state": lambda device=name: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=name: generators[index(device)].set_state(state),
        "get_device_name": lambda d=None: "Pretended",
        "empty_cache": lambda: core.count("empty_cache"),
        "memory_allocated": lambda d=None: core.usage(index(d))[0],
        "max_memory_allocated": lambda d=None: core.usage(index(d))[1],
        "reset_peak_memory_stats": lambda d=None: core.reset_peak(index(d)),
        "device": OnDevice,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda d=None: torch.accelerator.current_stream(),
    }
    for key, member in members.items():
        setattr(module, key, member)
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    module._pretended_cells = _lstm_cells("PrivateUse1")
    after_import("lightning.pytorch.trainer.connectors.accelerator_connector", lambda: _tell_lightning(name))
    return core


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as a module has been imported."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, asked: str, path: Any = None, target: Any = None) -> Any:
            if asked != name:
                return None
            sys.meta_path.remove(self)
            spec: Any = importlib.machinery.PathFinder.find_spec(asked, path)
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                then()

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())


def _tell_lightning(name: str) -> None:
    """Register `Trainer(accelerator="pretended")` and `Fabric` the way packages for NPUs and HPUs do."""
    from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
    from lightning.fabric.connector import _Connector
    from lightning.fabric.strategies import SingleDeviceStrategy as FabricStrategy
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    class PretendedAccelerator(Accelerator):
        def setup_device(self, device: torch.device) -> None:
            torch.get_device_module(device.type).set_device(device)

        def teardown(self) -> None: ...

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return list(range(int(devices))) if isinstance(devices, (int, str)) else devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(name, i) for i in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return name

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

    def choose_one_device(connector: Any, single_device: Any) -> None:
        choose = connector._choose_strategy

        def choose_strategy(self: Any) -> Any:
            if self._accelerator_flag == name and len(self._parallel_devices) == 1:
                return single_device(self._parallel_devices[0])
            return choose(self)

        connector._choose_strategy = choose_strategy

    for registry in (AcceleratorRegistry, ACCELERATOR_REGISTRY):
        registry.register(name, PretendedAccelerator, description="pretended")
    choose_one_device(_AcceleratorConnector, SingleDeviceStrategy)
    choose_one_device(_Connector, FabricStrategy)
    if name != "cuda":
        _keep_parameters_in_fabric()


def _keep_parameters_in_fabric() -> None:
    """Let `Fabric.setup` keep the parameters that it moves, which the optimizer holds.

    Torch replaces parameters that move to another type of device, and Fabric tells the optimizer only on TPUs.
    """
    from lightning.fabric import Fabric

    move: Any = Fabric._move_model_to_device

    def move_model_to_device(fabric: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        moves = any(parameter.device != fabric.device for parameter in model.parameters())
        torch.__future__.set_swap_module_params_on_conversion(moves)
        try:
            return move(fabric, model, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    Fabric._move_model_to_device = move_model_to_device  # type: ignore[method-assign]


core: Any = None
error = ""
try:
    kind = os.environ["LIGHTNING_AMP_PRETEND"]
    core = as_cuda() if kind == "cuda" else as_other(kind)
except Exception as failure:  # the skipped tests give this reason
    error = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]

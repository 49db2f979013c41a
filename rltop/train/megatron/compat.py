"""The only door to Megatron-Core, and everything that makes it run without CUDA.

Megatron-Core 0.16.1 to 0.19.x assumes a GPU in a dozen places. `load_megatron` imports what the backend uses and,
when torch sees no CUDA, corrects those places; when CUDA is there nothing is touched. Two rules keep the correction
harmless:

- torch itself is not patched. Megatron's modules get a namespace that looks like torch, except that "cuda" means the
  CPU in it. Everything else in the process (transformers, the engine, a test) sees the real torch.
- Each correction names the failure that it answers. One that a Megatron version does not need is skipped for it.

Covered: dense GPT models with the local layer spec in fp32, Megatron's DDP, its FP32 optimizer, its schedules, and
tensor, pipeline and data parallel ranks over gloo. Not covered: MoE (refused with the checkpoint), context parallel
(refused with the arguments), the distributed optimizer and sequence parallel (never asked for).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from rltop.errors import RltopError

OLDEST, NEWEST = (0, 16, 1), (0, 20)
"""Versions that were run: 0.16.1 and 0.19.2. Older ones lack parts that are imported here, newer ones are unknown."""


@dataclass(frozen=True, slots=True)
class Megatron:
    """What the backend uses of Megatron-Core. `Any`, because the package has no usable types."""

    version: str
    on_cpu: bool
    parallel_state: Any
    seed_model_parallel: Any
    """`seed_model_parallel(seed)` seeds the random streams of dropout and initialisation."""
    transformer_config: Any
    gpt_model: Any
    local_layer_spec: Any
    fused_layer_spec: Any
    """TransformerEngine's; only where that is installed."""
    ddp: Any
    ddp_config: Any
    optimizer_config: Any
    make_optimizer: Any
    forward_backward: Any
    """`forward_backward()` returns the schedule for the current parallel layout."""
    finalize_grads: Any
    rng_tracker: Any
    """`rng_tracker()` returns the named random streams."""
    checkpoints: Callable[[], Checkpoints]
    """Distributed checkpointing; imported when first asked for."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What the backend uses of `megatron.core.dist_checkpointing`."""

    save: Any
    load: Any
    common: Any
    """`common(directory)` returns what is not split over ranks."""
    sharded_object: Any
    errors: tuple[type[BaseException], ...]
    """What saving and loading raise besides the usual; torch's is no `Exception`."""


def load_megatron() -> Megatron:
    """Import Megatron-Core, adapted to this machine.

    Raises `RltopError` when it is not installed or its version was never run with rltop.
    """
    version = _installed_version()
    on_cpu = not torch.cuda.is_available()
    _stub_modules_that_need_triton(version)
    if on_cpu:
        _leave_functions_uncompiled()
    with quietly():
        core = importlib.import_module("megatron.core")
        megatron = Megatron(
            version=version,
            on_cpu=on_cpu,
            parallel_state=core.parallel_state,
            seed_model_parallel=_get("tensor_parallel.random", "model_parallel_cuda_manual_seed"),
            transformer_config=_get("transformer.transformer_config", "TransformerConfig"),
            gpt_model=_get("models.gpt", "GPTModel"),
            local_layer_spec=_get("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"),
            fused_layer_spec=_get("models.gpt.gpt_layer_specs", "get_gpt_layer_with_transformer_engine_spec"),
            ddp=_get("distributed", "DistributedDataParallel"),
            ddp_config=_get("distributed", "DistributedDataParallelConfig"),
            optimizer_config=_get("optimizer", "OptimizerConfig"),
            make_optimizer=_get("optimizer", "get_megatron_optimizer"),
            forward_backward=_get("pipeline_parallel", "get_forward_backward_func"),
            finalize_grads=_get("distributed", "finalize_model_grads"),
            rng_tracker=_get("tensor_parallel.random", "get_cuda_rng_tracker"),
            checkpoints=_checkpoints,
        )
    if on_cpu:
        _install_cpu_namespace()
        _install_cpu_random_tracker()
        _install_cpu_clipping()
        _install_cpu_embedding_setup()
    return megatron


@contextlib.contextmanager
def quietly(module: str = "") -> Iterator[None]:
    """Without warnings from modules that start with `module`, by default all.

    Megatron warns of its own defaults, of deprecated calls between its own parts, and of the absence of Apex and
    TransformerEngine, which is intended here. While it is imported and built, torch warns of what Megatron uses.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=module)
        yield


@functools.cache
def _checkpoints() -> Checkpoints:
    with quietly():
        checkpoints = Checkpoints(
            save=_get("dist_checkpointing", "save"),
            load=_get("dist_checkpointing", "load"),
            common=_get("dist_checkpointing", "load_common_state_dict"),
            sharded_object=_get("dist_checkpointing", "ShardedObject"),
            errors=(
                _get("dist_checkpointing.core", "CheckpointingException"),
                importlib.import_module("torch.distributed.checkpoint.api").CheckpointException,
            ),
        )
        # Megatron imports these when it saves, too late to be given another torch.
        for module in ("torch", "state_dict_saver", "async_utils"):
            importlib.import_module(f"megatron.core.dist_checkpointing.strategies.{module}")
        _write_checkpoints_in_threads()
    if not torch.cuda.is_available():
        _install_cpu_namespace()
    return checkpoints


def _get(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"megatron.core.{module}"), name)


def _installed_version() -> str:
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise RltopError(
            "Megatron-Core is not installed", where="the trainer", do='pip install "rltop[train]"'
        ) from None
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < NEWEST:
        raise RltopError(
            f"megatron-core {version} is unknown to this trainer",
            where="the trainer",
            why="it was run with 0.16.1 and 0.19.2",
            do='pip install "megatron-core>=0.16.1,<0.20"',
        )
    return version


def _stub_modules_that_need_triton(version: str) -> None:
    """0.19 imports `moe.ops.paged_stash`, and with it triton (a gigabyte that only GPUs use), even for dense models.

    Failure: `ModuleNotFoundError: No module named 'triton'` at `import megatron.core`. An empty module in its place is
    enough; a stub of triton itself breaks torch's inductor.
    """
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if version.startswith("0.16.") or importlib.util.find_spec("triton") or name in sys.modules:
        return
    stub = ModuleType(name)
    stub.__getattr__ = lambda attribute: _unavailable(attribute)  # type: ignore[method-assign]  # PEP 562 hook
    sys.modules[name] = stub


def _unavailable(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise RltopError(f"{name} needs triton", where="Megatron-Core", do="pip install triton")

    return refuse


def _leave_functions_uncompiled() -> None:
    """Megatron decorates its fused functions with `torch.compile`, which imports torch's compiler: 2 of the 5 s that
    `import megatron.core` takes in every rank. On a CPU nothing calls them, and a call would want a C++ compiler."""
    name = "megatron.core.jit"
    if name in sys.modules:
        return

    def plain(function: Any) -> Any:
        return function

    stub = ModuleType(name)
    stub.__dict__.update(jit_fuser=plain, noop_decorator=plain)
    stub.__dict__.update(enable_jit_fuser=lambda: None, disable_jit_fuser=lambda: None)
    sys.modules[name] = stub


# --- the namespace that Megatron sees instead of torch -------------------------------------------------------------


class _Namespace(ModuleType):
    """A module that equals another except for some names. Attributes are copied: a look-up costs nothing extra."""

    def __init__(self, original: ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)
        self.__dict__.update(replaced)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def _install_cpu_namespace() -> None:
    """Give every loaded `megatron.core` module the torch in which "cuda" is the CPU.

    Failures without it: `AssertionError: Torch not compiled with CUDA enabled` from the rotary embedding (forward), the
    optimizer, gradient clipping and the schedules, all of which write `device="cuda"` or ask for the current device.
    """
    namespace = _cpu_namespace()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = namespace  # type: ignore[attr-defined]  # a module global of Megatron's


def _cpu_namespace() -> ModuleType:
    factories = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint", "as_tensor")
    replaced: dict[str, Any] = {name: _on_cpu(getattr(torch, name)) for name in factories}
    cpu = torch.device("cpu")
    replaced["cuda"] = _Namespace(
        torch.cuda,
        {
            "current_device": lambda: cpu,
            "synchronize": lambda *_args: None,
            "empty_cache": lambda: None,
            # One process, one order of work: streams have nothing to order on a CPU.
            "Stream": _Stream,
            "Event": _Stream,
            "stream": lambda _stream: contextlib.nullcontext(),
            "current_stream": lambda *_args: _Stream(),
            "default_stream": lambda *_args: _Stream(),
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *_args: torch.get_rng_state(),
            "set_rng_state": lambda state, *_args: torch.set_rng_state(state),
        },
    )
    return _Namespace(torch, replaced)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _Stream:
    """A CUDA stream or event that has always finished."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def _done(self, *_args: object, **_kwargs: object) -> None: ...

    wait = wait_stream = wait_event = synchronize = record = record_event = _done


# --- random streams ------------------------------------------------------------------------------------------------


class CpuRandomTracker:
    """Named random streams, as Megatron's `CudaRNGStatesTracker`, on torch's CPU generator.

    Failures without it: `cuda rng state model-parallel-rng is not added` in the first attention layer, and, if one adds
    it, "Torch not compiled with CUDA enabled".
    """

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        return bool(self.states_)

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the stream `name` inside the block; torch's own stream goes on after it as if nothing happened."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


def _install_cpu_random_tracker() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not isinstance(random._CUDA_RNG_STATE_TRACKER, CpuRandomTracker):
        random._CUDA_RNG_STATE_TRACKER = CpuRandomTracker()
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


# --- gradient clipping ---------------------------------------------------------------------------------------------


def clip_by_total_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, total_norm: float, *_args: object, **_kwargs: object
) -> None:
    """Scale the gradients in place so that their global norm is at most `max_norm`.

    Failure without it: `assert param.grad.type() == 'torch.cuda.FloatTensor'`. The formula is Megatron's, including the
    1e-6. A NaN norm scales nothing (NaN < 1 is false), here as there.
    """
    scale = max_norm / (total_norm + 1.0e-6)
    if scale < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)


def _install_cpu_clipping() -> None:
    optimizer: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    optimizer.clip_grad_by_total_norm_fp32 = clip_by_total_norm


# --- the embedding's second copy -----------------------------------------------------------------------------------


def _install_cpu_embedding_setup() -> None:
    """Leave out the exchange of a tied embedding between first and last stage while a model is built.

    Failure without it: "Torch not compiled with CUDA enabled" from `weight.data.cuda()`, a method that no namespace can
    replace. Nothing is lost: the backend loads both copies from the checkpoint. The module asks `is_initialized` in
    this one place (0.16.1 and 0.19.2).
    """
    module: Any = importlib.import_module("megatron.core.models.common.language_module.language_module")
    if isinstance(module.torch.distributed, _Namespace):
        return
    distributed = _Namespace(module.torch.distributed, {"is_initialized": lambda: False})
    module.torch = _Namespace(module.torch, {"distributed": distributed})
    module.LanguageModule.embedding_warning_printed = True


# --- checkpoints ---------------------------------------------------------------------------------------------------


class _Threads:
    """A multiprocessing context whose processes are threads."""

    Queue = queue.Queue
    JoinableQueue = queue.Queue
    Process = threading.Thread


def _write_checkpoints_in_threads() -> None:
    """Write a rank's files in threads of this process, also with CUDA.

    Megatron starts a manager process (0.16.1 and 0.19.2) and forks writers (0.16.1; 0.19.2 has threads itself). A fork
    inherits the locks of a Ray worker's own threads, and the manager outlives the save.
    """
    writer: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if isinstance(writer.mp, _Namespace):
        return
    writer._results_queue = queue.Queue()
    writer.mp = _Namespace(writer.mp, {"get_context": lambda _method=None: _Threads})

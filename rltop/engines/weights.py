"""How trained weights travel to an engine, and how both sides prove that they arrived.

Three things, all over Hugging Face parameter names:

- tensors by value in the body of `/update_weights_from_tensor`: base64 of a pickled list of (name, tensor), one string
  per tensor-parallel rank. SGLang reads it with its own restricted unpickler; `deserialize` here is the CPU engine's;
- a directory `weight_vNNNNNN` (slime's name) that appears complete or not at all, for `/update_weights_from_disk`;
- digests: the first 64 bits of SHA-256 over a tensor's bytes, which is what SGLang's `/weights_checker` computes for a
  tensor on the CPU (0.5.23, `srt/managers/mm_utils.py`), so equal numbers mean equal weights on either engine; of a
  tensor on a GPU it computes another one, which `raw_tensors` has too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rltop.engines.engine_layout import Shard, is_fused, parameters
from rltop.engines.raw_tensors import raw_of, sha_digest
from rltop.engines.weight_findings import Expected
from rltop.errors import RltopError

WEIGHT_DIRECTORY = "weight_v{version:06d}"
"""slime's name for one published version."""

PARALLEL_BYTES = 64 << 20
"""From so many bytes on, digests are worth threads."""
NamedTensors = Iterable[tuple[str, Tensor]]


def serialize(named: NamedTensors) -> str:
    """Base64 of the pickled list of (name, tensor): one entry of SGLang's `serialized_named_tensors`.

    Tensors go by value (contiguous, CPU). Torch's shared-memory forms are smaller but die with the sender, need the
    receiver on the same host, and SGLang's unpickler cannot open the file-descriptor form from a process that is not
    its parent.
    """
    plain = [(name, tensor.detach().to("cpu").contiguous()) for name, tensor in named]
    return base64.b64encode(pickle.dumps(plain, protocol=4)).decode("ascii")


BUCKET_BYTES = 512 << 20
"""Most bytes of tensors that are sent in one request by `serialize_shared`."""
_IPC_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """One request's worth of tensors that a receiver on the same GPU opens where they lie."""

    text: str
    """As `serialize` gives it, with CUDA IPC handles in the place of the bytes."""
    memory: Tensor
    """What the handles lead to. It must live until the receiver has answered."""

    @property
    def nbytes(self) -> int:
        """Of the tensors, padding included."""
        return self.memory.nbytes


def buckets(named: NamedTensors, limit: int = BUCKET_BYTES) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """The tensors in pieces of at most `limit` bytes (a larger one is alone), and whether it is the last piece."""
    piece: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if piece and size + tensor.nbytes > limit:
            yield piece, False
            piece, size = [], 0
        piece.append((name, tensor.detach()))
        size += tensor.nbytes
    if piece:
        yield piece, True


def serialize_shared(named: Sequence[tuple[str, Tensor]]) -> Bucket:
    """CUDA tensors by reference: torch's own IPC form, which SGLang's unpickler opens (`MultiprocessingSerializer`).

    All are copied into one block first, so that there is one handle to open and nothing of the sender's own memory is
    given away. Receiver and sender must see the GPU under the same number.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # registers how tensors are reduced

    places, size = [], 0
    for _, tensor in named:
        places.append(size)
        size += -(-tensor.nbytes // _IPC_ALIGNMENT) * _IPC_ALIGNMENT
    block = torch.empty(size, dtype=torch.uint8, device=named[0][1].device)
    shared = []
    for (name, tensor), at in zip(named, places, strict=True):
        view = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        shared.append((name, view.copy_(tensor)))
    if block.is_cuda:
        torch.cuda.synchronize(block.device)  # the receiver's stream knows nothing of ours
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return Bucket(base64.b64encode(buffer.getvalue()).decode("ascii"), block)


def deserialize(text: str) -> list[tuple[str, Tensor]]:
    """The inverse, refusing anything but tensors by value. Raises `RltopError` naming what it wanted to import."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"not base64: {error}") from error
    try:
        content = _TensorsOnly(io.BytesIO(data)).load()
    except RltopError:
        raise
    except Exception as error:  # a malformed pickle may raise anything
        raise _refused(f"{type(error).__name__}: {error}") from error
    if not isinstance(content, list | tuple):
        raise _refused(f"expected a list of (name, tensor), got {type(content).__name__}")
    named: list[tuple[str, Tensor]] = []
    for item in content:
        match item:
            case (str() as name, Tensor() as tensor):
                named.append((name, tensor))
            case _:
                raise _refused(f"expected (name, tensor), got {type(item).__name__}")
    return named


class _TensorsOnly(pickle.Unpickler):
    """Unpickles tensors that carry their own bytes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Called by pickle for every global; the only door for code, so it is an exact list."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            # Torch's own function would unpickle the inner bytes without restriction.
            return _load_storage
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise _refused(f"it wants {module}.{name}")


_ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch", "Size"),
        *(("torch", str(dtype).removeprefix("torch.")) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    }
)


def _load_storage(data: bytes) -> Any:
    storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage | torch.UntypedStorage):
        raise _refused(f"expected a tensor's storage, got {type(storage).__name__}")
    return storage


def _refused(why: str) -> RltopError:
    return RltopError(
        "refused serialized tensors",
        where="serialized_named_tensors",
        why=why,
        do="send what rltop.engines.weights.serialize makes: a pickled list of (name, CPU tensor by value), base64",
    )


def publish(root: Path, version: int, named: NamedTensors, *, checkpoint: Path, keep: int = 2) -> Path:
    """Write `root/weight_vNNNNNN` and return it: safetensors plus the configuration files of `checkpoint`.

    It appears complete or not at all (staged beside it, then renamed), so an engine that reads the newest directory
    never sees half of one. A version that is already there is replaced. Older versions beyond the newest `keep` are
    removed; 0 keeps all.
    """
    root.mkdir(parents=True, exist_ok=True)
    target = root / WEIGHT_DIRECTORY.format(version=version)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=root))
    try:
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in named}
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        for file in sorted(checkpoint.iterdir()):
            if file.suffix in {".json", ".txt", ".jinja"} and not file.name.endswith(".index.json"):
                shutil.copyfile(file, staging / file.name)
        staging.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if keep:
        for old in published(root)[:-keep]:
            shutil.rmtree(old)
    return target


def published(root: Path) -> list[Path]:
    """The `weight_vNNNNNN` directories under `root`, oldest first."""
    return sorted(path for path in root.glob("weight_v*") if path.name.removeprefix("weight_v").isdigit())


def digest(tensor: Tensor) -> str:
    """16 hexadecimal digits: the first 64 bits of SHA-256 over the bytes. Shape and name are not part of it."""
    return sha_digest([raw_of(tensor).data])


def digest_tensors(named: NamedTensors) -> dict[str, str]:
    """Name -> `digest`. SHA-256 lets other threads run: a large model is hashed by as many as there are cores."""
    every = list(named)
    if sum(tensor.nbytes for _, tensor in every) < PARALLEL_BYTES:
        return {name: digest(tensor) for name, tensor in every}
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1), thread_name_prefix="digest") as pool:
        return dict(zip((name for name, _ in every), pool.map(digest, (tensor for _, tensor in every)), strict=True))


def overall_digest(digests: Mapping[str, str]) -> str:
    """One SHA-256 for a whole set of named digests, whatever their order; SGLang's `per_gpu_checksum`."""
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(name.encode())
        total.update(digests[name].encode())
    return total.hexdigest()


def checksum_differences(named: NamedTensors, answer: Mapping[str, Any]) -> list[str]:
    """Names of the tensors in which an engine's `/weights_checker` checksum answer differs from `named`; empty: equal.

    Works on either engine (one rank, unquantised), each under its own parameter names, on a CPU or a GPU. A tied output
    layer may be missing on one side.
    """
    theirs: dict[str, str] = answer["ranks"][0]["checksums"]
    mine = expected_of(named, fused=is_fused(theirs))
    mine.recognise(theirs)
    names = (mine.recipes.keys() | theirs.keys()) - ({"lm_head.weight"} - (mine.recipes.keys() & theirs.keys()))
    return sorted(name for name in names if name not in mine.recipes or mine.digest(name) != theirs.get(name))


def expected_of(named: NamedTensors, *, fused: bool, shard: Shard | None = None) -> Expected:
    """What an engine rank holds that has taken these tensors. fused: SGLang's layout, not the CPU engine's."""
    raws = {name: raw_of(tensor) for name, tensor in named}
    shapes = {name: raw.shape for name, raw in raws.items()}
    return Expected(parameters(shapes, fused=fused, shard=shard or Shard()), raws.__getitem__)


def sglang_digests(named: NamedTensors) -> dict[str, str]:
    """Digests under SGLang's own parameter names, to compare with a real engine's checksum (one rank, unquantised)."""
    return expected_of(named, fused=True).digests()

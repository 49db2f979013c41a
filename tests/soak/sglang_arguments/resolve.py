"""Run with SGLang's Python: resolves command lines as SGLang does before it loads a model, without a GPU.

    python resolve.py MODELS cpu|cuda < cases.jsonl > answers.jsonl

A case is `{"model", "argv", "env", "files"}`; `@NAME` in a word stands for the directory MODELS/NAME, `%NAME` for a
file of the case. Each is resolved in a fork of this process, because resolution writes to the environment. With `cpu`
this is done as on this machine; with `cuda` as on a host with eight NVIDIA H200, a STAND-IN: torch says that they are
there, and packages that exist for GPUs only are empty modules. What SGLang makes of its arguments is its own code in
both.

Nothing of rltop is imported: the environment of SGLang need not have it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GPU_ONLY = ("sgl_kernel", "flashinfer", "deep_gemm", "deep_ep")

FIELDS = (
    "attention_backend",
    "attn_dp_size",
    "chunked_prefill_size",
    "cuda_graph_config",
    "decode_attention_backend",
    "deepep_mode",
    "disable_cuda_graph_padding",
    "disable_custom_all_reduce",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "dp_size",
    "enable_dp_attention",
    "enable_hierarchical_cache",
    "enable_mixed_chunk",
    "ep_size",
    "max_running_requests",
    "mem_fraction_static",
    "moe_a2a_backend",
    "page_size",
    "prefill_attention_backend",
    "speculative_algorithm",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
)
"""What the toggles touch."""

ENVIRONMENT = ("CUDA_LAUNCH_BLOCKING", "CUDA_ENABLE_COREDUMP_ON_EXCEPTION")


class _Nothing:
    """Stands for any object of a package that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _EmptyModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # what makes it a package
    __version__ = "0.6.12"

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in GPU_ONLY:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def pretend_h200(count: int = 8) -> None:
    """Let torch say that this host has NVIDIA H200, before SGLang is imported."""
    import torch

    total = 143771 << 20
    properties = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=total, multi_processor_count=132, warp_size=32
    )
    answers = {
        "is_available": True,
        "is_initialized": False,
        "device_count": count,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (total, total),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.version.cuda = "13.0"
    sys.meta_path.insert(0, _Finder())


def resolve(argv: list[str]) -> dict[str, Any]:
    """SGLang's answer to one command line."""
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(argv)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    args.check_server_args()
    resolved = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
    fields = {name: resolved[name] for name in FIELDS if name in resolved}
    config = fields["cuda_graph_config"]
    fields["cuda_graph_config"] = {phase: _backend(config, phase) for phase in ("decode", "prefill")}
    return fields


def _backend(config: Any, phase: str) -> str:
    settings = config[phase] if isinstance(config, dict) else getattr(config, phase)
    return str(settings["backend"] if isinstance(settings, dict) else settings.backend)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """The same, with what went wrong."""
    os.environ.update(case.get("env", {}))
    said = sys.stderr.fileno()
    try:
        fields = resolve(case["argv"])
    except SystemExit:  # argparse
        os.lseek(said, 0, os.SEEK_SET)
        lines = os.read(said, 1 << 20).decode().strip().splitlines()
        return {"error": lines[-1].split("error: ", 1)[-1]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0]}
    return {"fields": fields, "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}}


def in_a_fork(case: dict[str, Any]) -> dict[str, Any]:
    """Answer one case; nothing of it stays in this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        errors = os.memfd_create("stderr")  # argparse says there what it refuses
        os.dup2(errors, 2)
        with os.fdopen(write, "w") as out:
            json.dump(answer(case), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as text:
        content = text.read()
    os.waitpid(child, 0)
    return dict(json.loads(content)) if content else {"error": "the resolving process died"}


def main() -> None:
    """Answer every case of the standard input, one line each."""
    models, device = Path(sys.argv[1]).resolve(), sys.argv[2]
    if device == "cuda":
        pretend_h200()
    logging.disable(logging.CRITICAL)
    before = dict(os.environ)
    for model in sorted(models.iterdir()):  # imports what a resolution imports, once for all forks
        in_a_fork({"argv": ["--model-path", str(model), "--device", device]})
    resolve(["--model-path", str(models / "dense"), "--device", device])
    os.environ.clear()
    os.environ.update(before)
    with tempfile.TemporaryDirectory() as files:
        for line in sys.stdin:
            case = json.loads(line)
            for name, content in case.get("files", {}).items():
                Path(files, name).write_text(content)
            words = ["--model-path", f"@{case['model']}", "--device", device, *case["argv"]]
            case["argv"] = [word.replace("@", f"{models}/").replace("%", f"{files}/") for word in words]
            print(json.dumps(in_a_fork(case)), flush=True)


if __name__ == "__main__":
    main()

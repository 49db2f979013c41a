"""What SGLang would show of its arguments on one H200, beyond what `rltop.engines.rules` says it makes of them.

`judge` (compared with SGLang's own resolution) decides which combinations are refused and what they change: 48 requests
with speculative decoding, no graphs with DeepEP's `normal` mode. What is left are the defaults that SGLang takes from
the GPU, which toggles move too: capture sizes, the memory fraction, and with it the KV pool. Those are imitated here by
the rules of SGLang 0.5.23 (`arg_groups/cuda_graph_hook.py`, `memory_hook.py`), so that an operator who toggles on the
stand-in meets in `/server_info` and in the log what SGLang would show. With `--device cpu` there are no graphs.

Pure: nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rltop.engines.flags import Parsed
from rltop.engines.rules import Judgement
from rltop.engines.toggle_table import graph_asked
from rltop.train.cpu_engine.effects import DISABLED, Effects, Graph

GPU_MIB = 143_771
"""Memory of an H200 as its driver reports it."""

SPECULATIVE_REQUESTS = 48
"""`max_running_requests` with speculative decoding, unless set."""

PREFILL_OFF = (
    "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' "
    "(e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitation:
    """What SGLang would make of its arguments."""

    values: dict[str, Any]
    """Field of ServerArgs -> value, filled in and rewritten."""
    effects: Effects
    lines: tuple[str, ...]
    """What SGLang logs about its changes, in its words."""


def imitate(parsed: Parsed, verdict: Judgement, *, version: str) -> Imitation:
    """verdict: SGLang's answer to these arguments, which accepts them."""
    work = _Work(dict(parsed.values) | dict(verdict.fields), version)
    work.defaults()
    work.speculation(asked_requests=parsed.values["max_running_requests"])
    work.graphs(asked=graph_asked(parsed, version))
    work.memory()
    work.shown()
    return Imitation(values=work.values, effects=work.effects(), lines=tuple(work.lines))


class _Work:
    """The arguments while they are filled in."""

    def __init__(self, values: dict[str, Any], version: str) -> None:
        self.values, self.lines = values, list[str]()
        self.modern = version != "0.5.14"

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def fill(self, **defaults: Any) -> None:
        """Set what is still None, of the fields that this version has."""
        for name, value in defaults.items():
            if name in self.values and self.values[name] is None:
                self.values[name] = value

    @property
    def on_cpu(self) -> bool:
        return bool(self.values["device"] == "cpu")

    def defaults(self) -> None:
        self.fill(device="cuda")
        self.fill(
            attention_backend="torch_native" if self.on_cpu else "fa3",
            sampling_backend="pytorch" if self.on_cpu else "flashinfer",
            chunked_prefill_size=4096 if self.on_cpu else 8192,
            page_size=1,
            grammar_backend="xgrammar",
            speculative_moe_runner_backend="auto",
            expert_distribution_recorder_buffer_size=1000,
            custom_weight_loader=[],
            mm_process_config={},
        )

    def speculation(self, *, asked_requests: int | None) -> None:
        if self.values.get("speculative_algorithm") is None:
            return
        if asked_requests is None and self.values["max_running_requests"] == SPECULATIVE_REQUESTS:
            self.lines.append(
                "Max running requests is reset to 48 for speculative decoding. "
                "You can override this by explicitly setting --max-running-requests."
            )
        # SGLang's automatic choice for most models; for NGRAM the rules have filled these.
        self.fill(speculative_num_steps=3, speculative_eagle_topk=1)
        self.fill(speculative_num_draft_tokens=self.values["speculative_num_steps"] + 1)

    def graphs(self, *, asked: Mapping[str, Mapping[str, Any]]) -> None:
        values = self.values
        decode, prefill = (dict(values["cuda_graph_config"][phase]) for phase in ("decode", "prefill"))
        if decode["backend"] == DISABLED != asked["decode"]["backend"]:
            self.lines.append(self._why_graphs_are_off())
        if self.on_cpu:
            decode["backend"] = prefill["backend"] = DISABLED
        self._sizes(decode, prefill)
        extra: dict[str, Any] = {"tc_compiler": "eager"}
        if self.modern:
            extra |= dict.fromkeys(
                ("max_context_size", "full_prefill_max_req", "full_prefill_prefix_chunk_tokens", "max_seq_len")
            )
        values["cuda_graph_config"] = {"decode": extra | decode, "prefill": extra | prefill}

    def _why_graphs_are_off(self) -> str:
        if self.values.get("attention_backend") in ("torch_native", "flex_attention"):
            name = self.values["attention_backend"].replace("_", " ").removesuffix(" attention")
            return f"Cuda graph is disabled because of using {name} attention backend"
        return f"Cuda graph is disabled because deepep_mode=`{self.values.get('deepep_mode')}`"

    def _sizes(self, decode: dict[str, Any], prefill: dict[str, Any]) -> None:
        if decode.get("bs") is None:
            most = decode.get("max_bs")
            if most is None:
                most = 256 if self.get("tp_size", 1) < 4 else 512
                if self.modern:
                    most = min(most, self.get("max_running_requests", most))
            decode["max_bs"], decode["bs"] = most, self._decode_sizes(most)
        else:
            decode["max_bs"] = max(decode["bs"])
        if prefill.get("max_bs") is None:
            most = self.values["chunked_prefill_size"]
            most = most if most > 0 else self.get("max_prefill_tokens", 16384)
            prefill["max_bs"] = min(most, self.get("max_total_tokens", most)) if self.modern else most
        if prefill.get("bs") is None:
            prefill["bs"] = _prefill_sizes(prefill["max_bs"])

    def _decode_sizes(self, most: int) -> list[int]:
        if self.values.get("disable_cuda_graph_padding"):
            return list(range(1, most + 1))
        if self.values.get("speculative_algorithm") is None:
            sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
        else:
            sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, most + 1, 16)]
        sizes = [size for size in sizes if size <= most]
        return sizes if most in sizes else [*sizes, most]

    def memory(self) -> None:
        """The share of GPU memory for weights and KV: what graphs and prefill leave of it."""
        config = self.values["cuda_graph_config"]
        reserved = 512 + max(self.values["chunked_prefill_size"], 2048) * 1.5 + self.get("tp_size", 1) * 128
        if config["decode"]["backend"] != DISABLED:
            reserved += config["decode"]["max_bs"] * 2
        if config["prefill"]["backend"] != DISABLED:
            reserved += len(config["prefill"]["bs"]) * 8
        reserved = max(reserved, 10 * 1024)
        if self.modern and self.values.get("moe_a2a_backend") == "deepep" and config["decode"]["backend"] != DISABLED:
            reserved += 2 * 1024
        self.fill(mem_fraction_static=0.95 if self.on_cpu else round((GPU_MIB - reserved) / GPU_MIB, 3))

    def shown(self) -> None:
        """Settings without an argument that `/server_info` lists, and arguments that it does not."""
        values = self.values
        for name in ("config", "collect_tokens_histogram", "prefill_round_robin_balance"):
            values.pop(name, None)
        values |= {"custom_sigquit_handler": None, "stat_loggers": None}
        if values.get("load_balance_method") == "auto":
            values["load_balance_method"] = "round_robin"
        for name in ("enable_multimodal", "enable_lora", "enable_lora_overlap_loading"):
            values[name] = values.get(name) or None  # not given is not the same as off

    def effects(self) -> Effects:
        config, padding = self.values["cuda_graph_config"], not self.values.get("disable_cuda_graph_padding")
        decode, prefill = config["decode"], config["prefill"]
        speculative = self.values.get("speculative_algorithm") is not None
        return Effects(
            decode=Graph(backend=decode["backend"], sizes=tuple(sorted(decode["bs"])), padding=padding),
            # Prefill graphs are always padded: `--disable-cuda-graph-padding` is about decode batches.
            prefill=Graph(backend=prefill["backend"], sizes=tuple(sorted(prefill["bs"]))),
            draft_tokens=self.values["speculative_num_draft_tokens"] if speculative else 0,
        )


def _prefill_sizes(most: int) -> list[int]:
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, most + 1, 512)]
    return [size for size in sizes if size <= most]

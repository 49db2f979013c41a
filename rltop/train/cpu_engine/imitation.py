"""How SGLang would fill in and rewrite its arguments on one H200, as far as the stand-in shows the result.

SGLang takes many defaults from the GPU (KV pool, capture sizes, attention backend), and some arguments change others:
speculative decoding sets `max_running_requests` to 48, DeepEP's `normal` mode turns CUDA graphs off. Operators meet
these when they toggle, so the stand-in shows them in `/server_info` and in the log, in SGLang's words. With
`--device cpu` there are no graphs, as in SGLang on a CPU.

The rules are those of SGLang 0.5.14 (`server_args.py`) and 0.5.23 (`arg_groups/`). What SGLang refuses is not decided
here but by `rltop.engines`. Pure: nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def imitate(given: Mapping[str, Any], *, version: str) -> Imitation:
    """given: field -> value as parsed, defaults included."""
    work = _Work(dict(given), version)
    work.hardware()
    work.speculation()
    work.experts()
    work.graphs()
    work.memory()
    work.shown()
    return Imitation(values=work.values, effects=work.effects(), lines=tuple(work.lines))


class _Work:
    """The arguments while they are rewritten, in SGLang's order."""

    def __init__(self, values: dict[str, Any], version: str) -> None:
        self.values, self.lines = values, list[str]()
        self.modern = version != "0.5.14"

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def fill(self, **defaults: Any) -> None:
        """Set what is still None, of the fields that this version has."""
        for name, value in defaults.items():
            if self.values.get(name) is None and (name in self.values or name == "device"):
                self.values[name] = value

    @property
    def on_cpu(self) -> bool:
        return bool(self.values["device"] == "cpu")

    def hardware(self) -> None:
        self.fill(device="cuda")
        if self.on_cpu:
            self.fill(attention_backend="torch_native", sampling_backend="pytorch", chunked_prefill_size=4096)
        self.fill(chunked_prefill_size=8192, sampling_backend="flashinfer", page_size=1, grammar_backend="xgrammar")

    def speculation(self) -> None:
        name = self.values.get("speculative_algorithm")
        if name is None:
            self.fill(attention_backend="fa3")
            return
        name = "EAGLE" if name.upper() == "NEXTN" else name.upper()
        self.values["speculative_algorithm"] = name
        if self.values.get("max_running_requests") is None:
            self.values["max_running_requests"] = SPECULATIVE_REQUESTS
            self.lines.append(
                "Max running requests is reset to 48 for speculative decoding. "
                "You can override this by explicitly setting --max-running-requests."
            )
        self.values["enable_mixed_chunk"] = False
        if name == "NGRAM":
            breadth = self.get("speculative_ngram_max_bfs_breadth", 10)
            self.values["speculative_eagle_topk"] = breadth
            self.fill(speculative_num_draft_tokens=12)
            self.fill(speculative_num_steps=self.values["speculative_num_draft_tokens"] // breadth)
        else:
            # Llama's automatic choice is 5/4/8, most others' 3/1/4.
            self.fill(speculative_num_steps=3, speculative_eagle_topk=1)
            self.fill(speculative_num_draft_tokens=self.values["speculative_num_steps"] + 1)
        several = self.get("speculative_eagle_topk", 1) > 1
        self.fill(attention_backend="flashinfer" if several else "fa3")

    def experts(self) -> None:
        self.fill(speculative_moe_runner_backend="auto", expert_distribution_recorder_buffer_size=1000)
        if self.values.get("moe_a2a_backend") in ("deepep", "mooncake", "nixl", "mori", "megamoe", "deepep_v2"):
            self.values["ep_size"] = self.get("tp_size", 1)

    def graphs(self) -> None:
        values = self.values
        decode: dict[str, Any] = {"backend": "full"}
        prefill: dict[str, Any] = {"backend": "breakable" if self.modern else "tc_piecewise"}
        locked = False
        if values.get("disable_cuda_graph"):
            decode["backend"] = prefill["backend"] = DISABLED
        for phase, settings in (("prefill", prefill), ("decode", decode)):
            if values.get(f"disable_{phase}_cuda_graph"):
                settings["backend"] = DISABLED
            for key in ("backend", "max_bs", "bs"):
                if values.get(f"cuda_graph_{key}_{phase}") is not None:
                    settings[key] = values[f"cuda_graph_{key}_{phase}"]
        locked = values.get("cuda_graph_backend_prefill") is not None
        for phase, wanted in (values.get("cuda_graph_config") or {}).items():
            {"decode": decode, "prefill": prefill}[phase].update(wanted)
            locked = locked or (phase == "prefill" and "backend" in wanted)
        if decode["backend"] == "tc_piecewise":
            decode["backend"] = "full"
        if not locked and prefill["backend"] != DISABLED and self._prefill_graph_clashes():
            prefill["backend"] = DISABLED
        off = self._why_graphs_are_off()
        if off:
            if decode["backend"] != DISABLED:
                self.lines.append(off)
            decode["backend"] = prefill["backend"] = DISABLED
        elif self.on_cpu:
            decode["backend"] = prefill["backend"] = DISABLED
        self._sizes(decode, prefill)
        extra: dict[str, Any] = {"tc_compiler": "eager"}
        if self.modern:
            extra |= dict.fromkeys(
                ("max_context_size", "full_prefill_max_req", "full_prefill_prefix_chunk_tokens", "max_seq_len")
            )
        values["cuda_graph_config"] = {"decode": extra | decode, "prefill": extra | prefill}

    def _prefill_graph_clashes(self) -> bool:
        values = self.values
        backend = values.get("moe_a2a_backend", "none")
        if self.modern:
            fine = ("none", "deepep", "megamoe", "flashinfer")
            return bool(values.get("enable_two_batch_overlap") or self.get("pp_size", 1) > 1 or backend not in fine)
        return bool(
            backend != "none"
            or values.get("enable_dp_attention")
            or values.get("enable_torch_compile")
            or self.get("pp_size", 1) > 1
            or values.get("enable_lora")
            or values.get("enable_hierarchical_cache")
            or values.get("enable_deterministic_inference")
            or values.get("enable_symm_mem")
            or values.get("debug_cuda_graph")
        )

    def _why_graphs_are_off(self) -> str:
        if self.values.get("attention_backend") in ("torch_native", "flex_attention"):
            name = self.values["attention_backend"].replace("_", " ").removesuffix(" attention")
            return f"Cuda graph is disabled because of using {name} attention backend"
        if self.values.get("moe_a2a_backend") == "deepep" and self.values.get("deepep_mode") == "normal":
            return "Cuda graph is disabled because deepep_mode=`normal`"
        return ""

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
        self.fill(custom_weight_loader=[], mm_process_config={})
        if values.get("load_balance_method") == "auto":
            values["load_balance_method"] = "round_robin"
        for name in ("enable_multimodal", "enable_lora", "enable_lora_overlap_loading"):
            values[name] = values.get(name) or None  # not given is not the same as off
        if self.modern:
            values["enable_dp_attention"] = values.get("enable_dp_attention") or self.get("attn_dp_size", 1) > 1

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

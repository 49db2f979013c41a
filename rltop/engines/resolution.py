"""ServerArgs on their way from a command line to what the engine runs with: the state that the rules work on.

Failure policy: a combination that SGLang rejects raises `Refused` with SGLang's reason; the fields are then as far as
it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rltop.engines.flags import Parsed


@dataclass(frozen=True, slots=True)
class Host:
    """What SGLang takes from the machine: by default one with H100 or H200."""

    sm: int = 90
    """Compute capability times ten."""
    chunked_prefill: int = 8192
    """Default chunk in tokens, from the GPU's memory: 2048 below 35 GiB, 4096 below 60, 8192 below 160, else 16384."""
    flashinfer: bool = True


CPU = Host(sm=0, chunked_prefill=4096, flashinfer=False)


class Refused(Exception):
    """SGLang raises here."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A field that SGLang changes by itself."""

    field: str
    """Name in ServerArgs; the graphs are `decode_graph` and `prefill_graph`."""
    asked: Any
    got: Any
    why: str


@dataclass(slots=True)
class Resolution:
    """ServerArgs on their way."""

    parsed: Parsed
    version: str
    env: Mapping[str, str]
    model: Mapping[str, Any]
    host: Host
    fields: dict[str, Any] = field(default_factory=dict)
    rewrites: list[Rewrite] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Values that SGLang fills in and that are worth a word."""

    @property
    def older(self) -> bool:
        """0.5.14's rules."""
        return self.version == "0.5.14"

    @property
    def cuda(self) -> bool:
        """Whether it runs on an NVIDIA GPU."""
        return str(self["device"] or "cuda").startswith("cuda")

    @property
    def architecture(self) -> str:
        """First of the checkpoint's architectures; "" without a model."""
        return str((self.model.get("architectures") or [""])[0])

    @property
    def mla(self) -> bool:
        """Multi-head latent attention."""
        return self.model.get("kv_lora_rank") is not None

    @property
    def dp(self) -> int:
        """Groups of DP attention, 1 without."""
        if self.older:
            return int(self["dp_size"]) if self["enable_dp_attention"] else 1
        return int(self["attn_dp_size"])

    @property
    def topk(self) -> int | None:
        """Branches of the draft."""
        value = self["speculative_eagle_topk"]
        return None if value is None else int(value)

    def __getitem__(self, name: str) -> Any:
        """A field; None where the release has no such field."""
        return self.fields.get(name)

    def given(self, *names: str) -> bool:
        """Whether the command line sets one of these fields."""
        return self.parsed.is_given(*names)

    def graph(self, phase: str) -> str:
        """Backend of a phase."""
        return str(self.fields["cuda_graph_config"][phase]["backend"])

    def set(self, name: str, value: Any, why: str) -> None:
        """Change a field, and remember it if that takes something away from the operator."""
        old = self.fields.get(name)
        if old != value:
            self.rewrites.append(Rewrite(name, old, value, why))
        self.fields[name] = value

    def no_graph(self, why: str, *phases: str) -> None:
        """Turn graphs off."""
        for phase in phases or ("decode", "prefill"):
            old = self.graph(phase)
            if old != "disabled":
                self.rewrites.append(Rewrite(f"{phase}_graph", old, "disabled", why))
                self.fields["cuda_graph_config"][phase]["backend"] = "disabled"


def require(condition: object, message: str) -> None:
    """SGLang's assertion."""
    if not condition:
        raise Refused(message)

"""SGLang's Qwen3 with one more kernel, which reads out of bounds now and then, under chosen toggles only.

`RLTOP_PLANTED_IMA` names the bug and how often it strikes, one in so many replays on average:

    padding:4000      in a CUDA graph whose batch is padded (cuda_graph and cuda_graph_padding)
    verify:4000       in a CUDA graph that verifies drafts (cuda_graph and speculative)
    anywhere:4000     in any decode or verify step, in a graph or not (none of the toggles)

But for `anywhere` the kernel is launched while a graph is captured, never in eager mode, so it runs in replays alone.
Whether a replay is padded it sees for itself: SGLang points the padded rows of `out_cache_loc` at slot 0, which no
token is ever given. A batch of slot 0 alone is a warm-up and spared. The draw is a linear congruential generator
(Knuth's MMIX constants) whose state lies on the device, because nothing but the kernel runs in a replay; its seed is
new in every process.

Read in SGLang 0.5.14: `model_executor/cuda_graph_buffer_registry.py` (padding), `runner_utils/capture_mode.py`.
"""

from __future__ import annotations

import logging
import os

import torch
import triton
import triton.language as tl
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

try:
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
except ImportError:  # before 0.5.13
    from sglang.srt.model_executor.cuda_graph_runner import get_is_capture_mode

VARIABLE = "RLTOP_PLANTED_IMA"
BUGS = ("padding", "verify", "anywhere")
FAR = 1 << 42
"""Elements beyond the tensor: mapped by nobody."""

logger = logging.getLogger(__name__)


@triton.jit
def planted_oob_kernel(slots, state, count, one_in, far, needs_padding: tl.constexpr, width: tl.constexpr):
    """One program. slots: [count] integers; state: [2] int64, the generator's and what was read."""
    at = tl.arange(0, width)
    here = tl.load(slots + at, mask=at < count, other=1)
    padded = tl.min(here, axis=0) == 0
    real = tl.max(tl.where(at < count, here, 0), axis=0) > 0
    drawn = tl.load(state) * 6364136223846793005 + 1442695040888963407
    tl.store(state, drawn)
    struck = ((drawn >> 33) & 0x3FFFFFFF) % one_in == 0
    if needs_padding:
        struck = struck & padded
    struck = struck & real
    beyond = tl.where(struck, far, 1).to(tl.int64)
    tl.store(state + 1, tl.load(state + beyond))


def planted(text: str) -> tuple[str, int] | None:
    """(bug, one in how many replays) of the variable's text; None: nothing is planted. Raises ValueError."""
    if not text:
        return None
    bug, _, often = text.partition(":")
    if bug not in BUGS or not often.isdigit() or int(often) < 1:
        raise ValueError(f"{VARIABLE}={text!r}: BUG:N with BUG one of {', '.join(BUGS)} and N a whole number above 0")
    return bug, int(often)


class PlantedQwen3ForCausalLM(Qwen3ForCausalLM):
    """Qwen3, and before each captured decode step (`anywhere`: before each) the kernel."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.planted = planted(os.environ.get(VARIABLE, ""))
        if self.planted is not None:
            logger.warning("PLANTED FAULT (a rehearsal): %s strikes in one of %d replays", *self.planted)
            seed = int.from_bytes(os.urandom(7), "big")
            # No parameter and no buffer: weight checks and updates must not see it.
            self.planted_state = [torch.tensor([seed, 0], dtype=torch.int64, device="cuda")]

    @torch.no_grad()
    def forward(
        self, input_ids, positions, forward_batch, input_embeds=None, get_embedding=False, pp_proxy_tensors=None
    ):
        if self.planted is not None and (get_is_capture_mode() or self.planted[0] == "anywhere"):
            self._plant(forward_batch)
        return super().forward(input_ids, positions, forward_batch, input_embeds, get_embedding, pp_proxy_tensors)

    def _plant(self, forward_batch) -> None:
        bug, one_in = self.planted
        mode, slots = forward_batch.forward_mode, forward_batch.out_cache_loc
        wanted = mode.is_target_verify() or (bug != "verify" and mode.is_decode())
        if not wanted or slots is None or not slots.numel():
            return
        count = slots.numel()
        planted_oob_kernel[(1,)](
            slots, self.planted_state[0], count, one_in, FAR, bug == "padding", max(16, triton.next_power_of_2(count))
        )


EntryClass = PlantedQwen3ForCausalLM

"""Parts what slime prints of a sample, prompt and response in one text, at the place where the response begins.

The prompt is the chat template's work: it holds turn terminators and, in a conversation, earlier answers. Without the
cut the first terminator of the prompt would pass for the end of the response, and the label in the question for an
answer. Failure policy: text without a known mark is a response as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rltop.evidence import literal

_ANSWER = re.compile(
    r"<\|im_start\|>assistant\b[ \t]*\n?"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>\n{0,2}"
    r"|<start_of_turn>model\b[ \t]*\n?"
    r"|<\|start\|>assistant\b"
    r"|<\|im_assistant\|>assistant<\|im_middle\|>"
    r"|<[|\uff5c][Aa]ssistant[|\uff5c]>\n?"
    r"|\[/INST\]"
    r"|\]~b\]ai\b\n?"
)
"""What a chat template writes before an answer: ChatML, Llama 3, Gemma, Harmony, Kimi, GLM and DeepSeek, Mistral,
MiniMax."""
_MESSAGES = re.compile(r"\s*\[\s*\{\s*['\"](?:role|content)['\"]")


@dataclass(frozen=True, slots=True)
class Parts:
    """A printed sample."""

    prompt: str
    response: str
    """From the first answer on: what comes after a single question, further turns of the model's own included."""
    last: str
    """From the last answer on; the same as `response` where there is one."""


def split(text: str) -> Parts:
    """Prompt and response of one printed text."""
    if _MESSAGES.match(text) and (end := literal.end_of(text)):
        return Parts(text[:end], text[end:], text[end:])
    marks = list(_ANSWER.finditer(text))
    if not marks:
        return Parts("", text, text)
    return Parts(text[: marks[0].end()], text[marks[0].end() :], text[marks[-1].end() :])

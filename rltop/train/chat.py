"""Text <-> tokens for the rollout side, with the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from rltop.train.task import Demonstration, Messages

PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names, in transformers 4 and 5, of the class that is nothing but `tokenizer.json`."""


class Chat:
    """Renders prompts and reads responses.

    use_template: without it a prompt is the bare text of its messages, one per line, and the model does not see whose
    turn it is.
    """

    def __init__(self, checkpoint: Path, *, use_template: bool) -> None:
        """Raises RltopError if `transformers` cannot load the tokenizer, or it has no end-of-turn token."""
        try:
            self._tokenizer: Any = _tokenizer_class(checkpoint).from_pretrained(str(checkpoint), local_files_only=True)
        except (OSError, ValueError) as error:
            raise RltopError("tokenizer unreadable", where=str(checkpoint), why=str(error).splitlines()[0]) from error
        if self._tokenizer.eos_token_id is None:
            raise RltopError(
                "the tokenizer has no eos_token",
                where=str(checkpoint / "tokenizer_config.json"),
                why="a response could not end",
            )
        self._use_template = use_template

    def prompt(self, messages: Messages, *, use_template: bool | None = None) -> tuple[str, tuple[int, ...]]:
        """Text and token ids of a prompt. `use_template` overrides the default for this prompt."""
        if self._use_template if use_template is None else use_template:
            text = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        else:
            text = "\n".join(content for _, content in messages)
        return text, tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def demonstration(self, example: Demonstration) -> tuple[tuple[int, ...], int]:
        """Tokens of prompt and response with its end-of-turn token, and the length of the response."""
        _, prompt = self.prompt(example.messages)
        response = (
            *self._tokenizer.encode(example.response, add_special_tokens=False),
            int(self._tokenizer.eos_token_id),
        )
        return prompt + response, len(response)

    def read(self, ids: Sequence[int]) -> str:
        """Text of a response; special tokens, such as the one that ends the turn, are left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _tokenizer_class(checkpoint: Path) -> Any:
    """The class that transformers would take. Where the checkpoint names the plain one, the search for it is spared:
    that imports torch, which a rollout process has no other use for, and takes 2 s."""
    import transformers

    try:
        config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return transformers.AutoTokenizer
    named = config.get("tokenizer_class") if isinstance(config, dict) and "auto_map" not in config else None
    if named in PLAIN and (checkpoint / "tokenizer.json").is_file():
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer

"""Text in and out: the checkpoint's `tokenizer.json` through the `tokenizers` library, without transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rltop.errors import RltopError


class Text:
    """Encodes prompts, decodes responses, knows the tokenizer's own end-of-sequence token."""

    __slots__ = ("_tokenizer", "eos_token_id")

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise RltopError(
                "cannot read the tokenizer", where=str(path), why="no such file", do="check --tokenizer-path"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise RltopError("cannot read the tokenizer", where=str(path), why=str(error)) from error
        self.eos_token_id = self._eos(directory)

    def _eos(self, directory: Path) -> int | None:
        try:
            content = json.loads((directory / "tokenizer_config.json").read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RltopError("cannot read the tokenizer", where=str(directory), why=str(error)) from error
        token = content.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; special tokens written in the text become their ids."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; bytes that are no valid UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

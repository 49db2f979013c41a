"""Token ids -> text, from a `tokenizer.json` alone: no tokenizer library, no code of the checkpoint.

Only the vocabulary is read, and the two ways in which it writes bytes: byte-level BPE (GPT-2's table of characters) and
SentencePiece (`▁` for a blank, `<0x0A>` for a byte). What comes out is a guess until it is held against the response:
`fitting` says whether it is one.

Failure policy: a file that is absent, too large or of another shape gives None; a token that is not in it has no text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

MOST_BYTES = 128 << 20
"""Of a tokenizer.json; the largest known one has 33 MiB."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


class TokenTexts:
    """The texts of one vocabulary."""

    def __init__(self, path: Path, texts: dict[int, str], special: dict[int, str], *, byte_level: bool) -> None:
        self.path = path
        self._texts, self._special = texts, special
        self._bytes = _byte_table() if byte_level else None

    @classmethod
    def read(cls, path: Path) -> TokenTexts | None:
        """A `tokenizer.json`, or None where there is none that is understood."""
        try:
            if path.stat().st_size > MOST_BYTES:
                return None
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError, ValueError, RecursionError):
            return None
        vocab = file.model.vocab
        pairs = vocab.items() if isinstance(vocab, dict) else ((text, at) for at, (text, _) in enumerate(vocab))
        texts = {number: text for text, number in pairs}
        # SentencePiece has the blank as U+2581; byte-level BPE has it as U+0120.
        pieces = sum(text.startswith("\u2581") for text in texts.values())
        return cls(path, texts, {one.id: one.content for one in file.added_tokens}, byte_level=pieces < 100)

    @classmethod
    def beside(cls, dump: Path) -> TokenTexts | None:
        """`tokenizer/tokenizer.json` beside the dump or, as `--dump-details` writes it, one directory up."""
        for folder in (dump.parent, dump.parent.parent):
            if (texts := cls.read(folder / "tokenizer" / "tokenizer.json")) is not None:
                return texts
        return None

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """The text of every token; bytes that are no whole character yet stand with the token that ends it.

        None where some token is not in the vocabulary.
        """
        parts: list[bytes] = []
        for number in ids:
            part = self._raw(number)
            if part is None:
                return None
            parts.append(part)
        return _whole_characters(parts)

    def _raw(self, number: int) -> bytes | None:
        if (special := self._special.get(number)) is not None:
            return special.encode("utf-8", "replace")
        text = self._texts.get(number)
        if text is None:
            return None
        if self._bytes is not None:
            try:
                return bytes(self._bytes[char] for char in text)
            except KeyError:
                return text.encode("utf-8", "replace")
        if byte := _BYTE.fullmatch(text):
            return bytes([int(byte[1], 16)])
        return text.replace("\u2581", " ").encode("utf-8", "replace")

    @property
    def special(self) -> frozenset[str]:
        """Texts that a decoder leaves out of a response."""
        return frozenset(self._special.values())


def fitting(texts: Sequence[str], response: str, special: frozenset[str] = frozenset()) -> bool:
    """Whether the texts, one after another, are the response; special tokens and a blank at the start may be missing.

    A response that was cut (`response` is only its start) fits as well.
    """
    whole = "".join(texts)
    plain = "".join(text for text in texts if text not in special)
    wanted = (response, response.removesuffix("\ufffd"))
    return any(one.startswith(wanted) or one.removeprefix(" ").startswith(wanted) for one in (whole, plain))


def characters(ids: Sequence[int], response: str) -> list[str] | None:
    """Without a vocabulary: one character per token where there are as many of both and equal ids mean equal
    characters."""
    if not ids or len(ids) != len(response):
        return None
    seen: dict[int, str] = {}
    return (
        list(response)
        if all(seen.setdefault(one, char) == char for one, char in zip(ids, response, strict=True))
        else None
    )


def _whole_characters(parts: Sequence[bytes]) -> list[str]:
    out: list[str] = []
    held = b""
    for place, part in enumerate(parts):
        held += part
        text, rest = _decoded(held, last=place == len(parts) - 1)
        out.append(text)
        held = rest
    return out


def _decoded(data: bytes, *, last: bool) -> tuple[str, bytes]:
    try:
        return data.decode("utf-8"), b""
    except UnicodeDecodeError as error:
        if not last and error.reason == "unexpected end of data" and len(data) - error.start < 4:
            return data[: error.start].decode("utf-8"), data[error.start :]
        return data.decode("utf-8", "replace"), b""


def _byte_table() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others take characters from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + at): byte for at, byte in enumerate(others)}

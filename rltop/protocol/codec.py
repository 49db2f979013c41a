"""Frames <-> messages: `[b"RL1", header, body, *blobs]`, header and body in MessagePack.

Also the length-prefixed form in which the same frames cross a byte pipe (`rltop proxy --stdio`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rltop.protocol.messages import BODIES, PROTO_MAX, PROTO_MIN, Header

MAGIC = b"RL1"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest sum of frames in one message. A larger frame costs its sender the connection."""
STDIO_MAGIC = b"\n\x00RLTOP-STDIO 1\n"
"""First bytes of `rltop proxy --stdio`. Everything before it was printed by a chatty shell profile."""

_LEN = struct.Struct(">I")
_header = msgspec.msgpack.Decoder(Header)
_encoder = msgspec.msgpack.Encoder()
_decoders = {tag: msgspec.msgpack.Decoder(body) for tag, body in BODIES.items()}


class WireError(ValueError):
    """The bytes are not a message of this protocol. `code` is the `err` code to answer with."""

    def __init__(self, code: str, why: str, header: Header | None = None) -> None:
        super().__init__(why)
        self.code = code
        self.header = header


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message: header, typed body, and blobs."""

    header: Header
    body: Any
    blobs: tuple[bytes, ...] = ()


def encode(
    tag: str,
    body: msgspec.Struct,
    *,
    blobs: Iterable[bytes] = (),
    id: str = "",  # noqa: A002 - the wire's name
    re: str = "",
    seq: int = 0,
    epoch: str = "",
    v: int = PROTO_MAX,
) -> list[bytes]:
    """Frames of one message. `tag` must be the tag that `BODIES` gives to the type of `body`."""
    if BODIES[tag] is not type(body):
        raise TypeError(f"{tag!r} carries {BODIES[tag].__name__}, not {type(body).__name__}")
    header = Header(v=v, t=tag, id=id, re=re, seq=seq, epoch=epoch)
    return [MAGIC, _encoder.encode(header), _encoder.encode(body), *blobs]


def decode(frames: Sequence[bytes]) -> Message:
    """Message from frames.

    Raises WireError: `malformed` (not ours, truncated, wrong types), `proto` (version outside our range),
    `unsupported` (a type that this build does not know; the header is in the error so that it can be answered).
    """
    if len(frames) < 3 or bytes(frames[0]) != MAGIC:
        raise WireError("malformed", f"expected [{MAGIC!r}, header, body, ...], got {len(frames)} frames")
    if (total := sum(map(len, frames))) > MAX_MESSAGE_BYTES:
        raise WireError("malformed", f"message of {total} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        header = _header.decode(frames[1])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("malformed", f"header: {error}") from error
    if not PROTO_MIN <= header.v <= PROTO_MAX:
        raise WireError("proto", f"protocol {header.v}, this build speaks {PROTO_MIN} to {PROTO_MAX}", header)
    decoder = _decoders.get(header.t)
    if decoder is None:
        raise WireError("unsupported", f"unknown message type {header.t!r}", header)
    try:
        body = decoder.decode(frames[2])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError("malformed", f"body of {header.t!r}: {error}", header) from error
    return Message(header, body, tuple(bytes(blob) for blob in frames[3:]))


def to_pipe(frames: Sequence[bytes]) -> bytes:
    """One message for a byte pipe, big-endian: u32 total length, u32 frame count, then u32 length + bytes per frame."""
    parts = [_LEN.pack(len(frames))]
    for frame in frames:
        parts += (_LEN.pack(len(frame)), frame)
    payload = b"".join(parts)
    return _LEN.pack(len(payload)) + payload


class PipeReader:
    """Incremental parser of the pipe form. Feed bytes, take messages; state survives any split of the bytes.

    skip_to_magic: drop everything before `STDIO_MAGIC` (shell profiles print); `noise` keeps the first 4 KiB of it.
    """

    def __init__(self, *, skip_to_magic: bool) -> None:
        self._buffer = bytearray()
        self._synced = not skip_to_magic
        self.noise = b""

    @property
    def synced(self) -> bool:
        """The magic line was seen (or was not asked for)."""
        return self._synced

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Complete messages, each a list of frames. Raises WireError on a length that cannot be."""
        self._buffer += data
        if not self._synced:
            at = self._buffer.find(STDIO_MAGIC)
            if at < 0:
                keep = len(STDIO_MAGIC) - 1
                cut = max(0, len(self._buffer) - keep)
                self._note(bytes(self._buffer[:cut]))
                del self._buffer[:cut]
                return []
            self._note(bytes(self._buffer[:at]))
            del self._buffer[: at + len(STDIO_MAGIC)]
            self._synced = True
        messages = []
        while len(self._buffer) >= 4:
            (length,) = _LEN.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise WireError("malformed", f"message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
            if len(self._buffer) < 4 + length:
                break
            messages.append(_split(bytes(self._buffer[4 : 4 + length])))
            del self._buffer[: 4 + length]
        return messages

    def _note(self, noise: bytes) -> None:
        self.noise = (self.noise + noise)[:4096]


def _split(payload: bytes) -> list[bytes]:
    try:
        (count,) = _LEN.unpack_from(payload)
        at, frames = 4, []
        for _ in range(count):
            (length,) = _LEN.unpack_from(payload, at)
            at += 4
            if at + length > len(payload):
                raise WireError("malformed", "a frame is longer than its message")
            frames.append(payload[at : at + length])
            at += length
    except struct.error as error:
        raise WireError("malformed", f"message cut short: {error}") from error
    if at != len(payload):
        raise WireError("malformed", f"{len(payload) - at} bytes behind the last frame")
    return frames

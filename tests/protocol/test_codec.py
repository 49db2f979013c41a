"""Frames and the pipe form: what goes in comes out, however the bytes are cut, and no junk crashes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.protocol.codec import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    STDIO_MAGIC,
    PipeReader,
    WireError,
    decode,
    encode,
    to_pipe,
)
from rltop.protocol.messages import BODIES, Ack, Delta, Hello, Ping, SeriesAnswer, Snap

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
frames = st.lists(st.binary(max_size=40), max_size=6)


@given(
    st.dictionaries(st.text(max_size=20), plain, max_size=6), st.integers(0, 2**40), st.lists(st.binary(max_size=30))
)
def test_a_message_survives_the_wire(keys: dict[str, Any], seq: int, blobs: list[bytes]) -> None:
    snap = Snap(ver=seq, eseq=seq, keys=keys)
    message = decode(encode("snap", snap, blobs=blobs, seq=seq, epoch="e", id="i", re="r"))
    assert message.body == snap
    assert message.blobs == tuple(blobs)
    assert (message.header.seq, message.header.epoch, message.header.id, message.header.re) == (seq, "e", "i", "r")


def test_nan_and_infinities_survive_the_wire() -> None:
    body = decode(encode("delta", Delta(1, 1, set={"a": math.nan, "b": math.inf, "c": -math.inf}))).body
    assert math.isnan(body.set["a"])
    assert (body.set["b"], body.set["c"]) == (math.inf, -math.inf)


@given(frames)
def test_junk_frames_are_refused_and_never_crash(junk: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(junk)


@given(st.sampled_from(sorted(BODIES)), plain, plain)
def test_well_formed_messagepack_of_any_shape_is_a_message_or_refused(tag: str, extra: Any, body: Any) -> None:
    header = {"v": 1, "t": tag, "unheard": extra}
    assert _refusal(lambda: decode([MAGIC, msgpack.packb(header), msgpack.packb(body)])) in ("", "malformed")


@given(plain)
def test_any_header_is_read_or_refused(header: Any) -> None:
    with pytest.raises(WireError):
        decode([MAGIC, msgpack.packb(header), b"\x80"])


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError, match="body of 'snap'"):
        decode([MAGIC, msgpack.packb({"v": 1, "t": "snap"}), b"\x81\xa4keys" + b"\x91" * 100_000 + b"\xc0"])


def test_unknown_keys_are_ignored_and_missing_ones_take_their_default() -> None:
    raw = {"proto": [1, 3], "client": "c", "from the future": {"x": 1}}
    hello = decode([MAGIC, msgpack.packb({"v": 1, "t": "hello", "zzz": 1}), msgpack.packb(raw)]).body
    assert hello == Hello((1, 3), "c")
    assert list(hello.want) == ["*"]


def test_an_unknown_type_and_version_are_told_apart_and_can_be_answered() -> None:
    with pytest.raises(WireError) as caught:
        decode([MAGIC, msgpack.packb({"v": 1, "t": "dance", "id": "7"}), b"\x80"])
    assert caught.value.code == "unsupported"
    assert caught.value.header is not None
    assert caught.value.header.id == "7"
    with pytest.raises(WireError) as caught:
        decode([MAGIC, msgpack.packb({"v": 99, "t": "hello"}), b"\x80"])
    assert caught.value.code == "proto"


def test_too_large_a_message_is_refused() -> None:
    with pytest.raises(WireError, match="over the limit"):
        decode(encode("series", SeriesAnswer({}), blobs=[b"x" * (MAX_MESSAGE_BYTES // 2 + 1)] * 2))


def test_a_body_under_the_wrong_tag_is_a_bug_of_the_sender() -> None:
    with pytest.raises(TypeError):
        encode("snap", Ack(1))


@given(st.binary(max_size=60), st.lists(frames, max_size=5), st.data())
def test_the_pipe_form_survives_any_split_behind_any_noise(
    noise: bytes, messages: list[list[bytes]], data: st.DataObject
) -> None:
    if STDIO_MAGIC in noise + STDIO_MAGIC[:-1]:
        return
    stream = noise + STDIO_MAGIC + b"".join(map(to_pipe, messages))
    reader = PipeReader(skip_to_magic=True)
    got = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert got == messages
    assert reader.noise == noise
    assert reader.synced


@given(st.binary(max_size=200))
def test_junk_in_a_pipe_is_messages_or_refused(junk: bytes) -> None:
    reader = PipeReader(skip_to_magic=False)
    assert _refusal(lambda: reader.feed(junk)) in ("", "malformed")


def test_a_length_beyond_the_limit_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(WireError, match="over the limit"):
        PipeReader(skip_to_magic=False).feed(struct.pack(">I", MAX_MESSAGE_BYTES + 1))


def test_noise_is_kept_up_to_a_limit() -> None:
    reader = PipeReader(skip_to_magic=True)
    for _ in range(100):
        assert reader.feed(b"motd " * 1000) == []
    assert not reader.synced
    assert len(reader.noise) == 4096


def test_every_body_type_can_be_encoded_under_its_tag() -> None:
    for tag, kind in BODIES.items():
        fields = {f.encode_name: _example(f.type) for f in msgspec.structs.fields(kind) if f.required}
        body = msgspec.convert(fields, kind)
        assert decode(encode(tag, body)).body == body
    assert decode(encode("pong", Ping())).header.t == "pong"


def _refusal(parse: Callable[[], object]) -> str:
    try:
        parse()
    except WireError as error:
        return error.code
    return ""


def _example(kind: Any) -> Any:
    for accepted in ("x", "view", 1, 1.0, [1, 1], {}, ["x"], {"role": "r"}, []):
        try:
            msgspec.convert(accepted, kind)
        except msgspec.ValidationError:
            continue
        return accepted
    raise AssertionError(kind)

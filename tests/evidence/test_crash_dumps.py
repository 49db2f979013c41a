"""SGLang's crash dumps, read without unpickling. The file in tests/data was written by SGLang 0.5.14's own class."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rltop.evidence.crash_dumps import Flown, crash_dumps, most_at_once, read_crash_dump, singles
from rltop.evidence.pickle_values import Unreadable
from rltop.train.cpu_engine.crash_dump import CrashDump

REAL = Path(__file__).parent.parent / "data" / "sglang" / "crash_dump_0_5_14.pkl"


def test_what_sglang_itself_wrote() -> None:
    dump = read_crash_dump(REAL)
    first, batch_one, batch_two, text = dump.requests
    assert first.body["input_ids"] == [1, 2, 3, 400, 70000]
    assert first.body["sampling_params"] == {"max_new_tokens": 7, "temperature": 0.5, "stop": ["a", "b"]}
    assert first.body["return_logprob"] is True
    assert (first.began, first.ended) == (100.0, 101.5)
    assert [one.body["input_ids"] for one in (batch_one, batch_two)] == [[1, 2], [3]]
    assert (text.body["text"], text.ended) == ("hello", None)
    assert batch_two.ended is None, "it was in flight: SGLang writes a time for it all the same"
    assert dump.left_out == 1, "the one with an image"
    assert most_at_once(dump.requests) == 3
    assert not any("rid" in one.body or "stream" in one.body for one in dump.requests)
    assert "sk-secret" not in repr(dump)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (open, ("/tmp/must-not-be-made-by-a-reader", "w"))


def test_nothing_is_run_that_a_file_brings_along(tmp_path: Path) -> None:
    path = tmp_path / "crash_dump.pkl"
    path.write_bytes(pickle.dumps({"requests": [(_Evil(), {}, 1.0, 2.0)], "server_args": _Evil()}))
    dump = read_crash_dump(path)
    assert (dump.requests, dump.left_out) == ((), 1)
    assert not Path("/tmp/must-not-be-made-by-a-reader").exists()


@pytest.mark.parametrize(
    ("data", "why"), [(b"", "empty"), (REAL.read_bytes()[:500], "cut off"), (pickle.dumps([1]), "no crash dump")]
)
def test_a_broken_one_says_why(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "crash_dump.pkl").write_bytes(data)
    with pytest.raises(Unreadable, match=why):
        read_crash_dump(tmp_path / "crash_dump.pkl")


def test_the_stand_ins_write_the_same(tmp_path: Path) -> None:
    now = [10.0]
    dump = CrashDump(str(tmp_path), {"api_key": "sk-secret"}, wall=lambda: now[0])
    with dump.request({"input_ids": [[1, 2], [3]], "sampling_params": [{"max_new_tokens": 1}, {"top_k": 2}]}) as told:
        now[0] = 11.0
        told([{"meta_info": {"finish_reason": {"type": "stop"}}}] * 2)
    flying = dump.request({"input_ids": [4, 5], "sampling_params": {}, "rid": "mine"})
    flying.__enter__()
    written = dump.write()
    assert written is not None
    assert crash_dumps(tmp_path) == [written]
    found = read_crash_dump(written)
    assert [(one.body["input_ids"], one.ended) for one in found.requests] == [
        ([1, 2], 11.0),
        ([3], 11.0),
        ([4, 5], None),
    ]
    assert found.requests[1].body["sampling_params"] == {"top_k": 2}
    assert b"sglang.srt.managers.io_struct" in written.read_bytes()
    flying.__exit__(None, None, None)
    now[0] = 400.0
    with dump.request({"input_ids": [6]}) as told:
        told({"meta_info": {"finish_reason": {"type": "stop"}}})
    written = dump.write()
    assert written is not None
    assert [one.body["input_ids"] for one in read_crash_dump(written).requests] == [[6]], "the last five minutes"


def test_a_batch_is_taken_apart() -> None:
    body = {"text": ["a", "b"], "sampling_params": {"n": 1}, "return_logprob": [True, False]}
    assert list(singles(body)) == [
        {"text": "a", "sampling_params": {"n": 1}, "return_logprob": True},
        {"text": "b", "sampling_params": {"n": 1}, "return_logprob": False},
    ]
    assert list(singles({"input_ids": [1, 2]})) == [{"input_ids": [1, 2]}]
    assert most_at_once([Flown(body, 0.0, 1.0), Flown({"text": "c"}, 1.0, 2.0)]) == 2

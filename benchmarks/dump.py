"""`rltop dump show` on a rollout dump of 2 GB: time to the first page and peak memory, beside `torch.load`.

    python -m benchmarks.dump [--megabytes 2000]

Writes a dump in torch.save's layout as slime has it: tokens and log-probs as Python lists inside the pickle, one tensor
of routed experts per sample in an entry of its own, a prompt shared by the eight samples of a group. Then, each in a
process of its own: the command as a user runs it, the same for the last page (the whole file is gone over), and
`torch.load` (with pickle's own unpickler, as slime loads; `weights_only=True` takes several times as long). Peaks are
of the process, mapped file included.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

TOKENS, PROMPT_TOKENS = 5_000, 200
EXPERTS = 4_096
"""Elements of the tensor of each sample, int32."""
FIRST_PAGE_S, PEAK_MB = 1.0, 300.0
_BLOCKS = 64
"""Different lists of tokens and of log-probs; samples take them in turn."""
_KEEP_FREE = 8
"""torch.load takes about so many times the bytes of the file; it is not tried where less memory is free."""


class _Emitter:
    """Opcodes of a pickle of protocol 2, as the pickler of C writes them."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._next = 0

    def put(self) -> bytes:
        """Memoizes what was made last."""
        number, self._next = self._next, self._next + 1
        return b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def text(self, value: str, *, shared: bool = False) -> bytes:
        """A string; a shared one is written once."""
        if value in self._known:
            return self._known[value]
        raw, number = value.encode(), self._next
        if shared:
            self._known[value] = b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        return b"X" + struct.pack("<I", len(raw)) + raw + self.put()

    def name(self, module: str, name: str) -> bytes:
        """A global, written once."""
        key = f"{module}\n{name}"
        if key in self._known:
            return self._known[key]
        number = self._next
        self._known[key] = b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        return f"c{module}\n{name}\n".encode() + self.put()

    def tensor(self, key: str, count: int) -> bytes:
        """A flat int32 tensor in the entry `data/{key}`."""
        size = b"J" + struct.pack("<i", count)
        storage = b"((" + self.text("storage", shared=True) + self.name("torch", "IntStorage") + self.text(key)
        storage += self.text("cpu", shared=True) + size + b"t" + self.put() + b"Q"
        shape = b"K\x00" + size + b"\x85" + self.put() + b"K\x01\x85" + self.put() + b"\x89"
        hooks = self.name("collections", "OrderedDict") + b")R" + self.put()
        make = self.name("torch._utils", "_rebuild_tensor_v2")
        return make + storage + shape + hooks + b"t" + self.put() + b"R" + self.put()


def _integer(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes([value])
    return b"M" + struct.pack("<H", value) if value < 65536 else b"J" + struct.pack("<i", value)


def _listed(parts: Sequence[bytes]) -> bytes:
    """Elements of a list in batches of a thousand."""
    return b"".join(b"(" + b"".join(parts[at : at + 1000]) + b"e" for at in range(0, len(parts), 1000))


def _samples(count: int) -> Iterator[bytes]:
    pick, emit = random.Random(1), _Emitter()
    ids = [_listed([_integer(pick.randrange(152_000)) for _ in range(TOKENS)]) for _ in range(_BLOCKS)]
    floats = TOKENS - PROMPT_TOKENS
    probs = [_listed([b"G" + struct.pack(">d", -pick.expovariate(2)) for _ in range(floats)]) for _ in range(_BLOCKS)]
    words = " ".join(pick.choice(("so", "the", "answer", "is", "let", "us", "see")) for _ in range(TOKENS // 2))
    yield (
        b"\x80\x02}" + emit.put() + b"(" + emit.text("rollout_id") + b"K\x03" + emit.text("samples") + b"]" + emit.put()
    )
    for at in range(count):
        if at % 1000 == 0:
            yield b"(" if at == 0 else b"e("

        def key(name: str) -> bytes:
            return emit.text(name, shared=True)

        out = [b"}", emit.put(), b"(", key("group_index"), _integer(at // 8), key("index"), _integer(at)]
        out += [key("prompt"), emit.text(f"question {at // 8}: what comes next?", shared=True)]
        out += [key("tokens"), b"]", emit.put(), ids[at % _BLOCKS]]
        out += [key("response"), emit.text(f"{at}: {words}"), key("response_length"), _integer(floats)]
        out += [key("label"), emit.text("42"), key("reward"), b"G" + struct.pack(">d", float(at % 2))]
        out += [key("loss_mask"), b"N", key("weight_versions"), b"]", emit.put(), emit.text("4", shared=True), b"a"]
        out += [key("rollout_log_probs"), b"]", emit.put(), probs[at * 7 % _BLOCKS]]
        out += [key("rollout_routed_experts"), emit.tensor(str(at), EXPERTS)]
        out += [key("status"), emit.text("completed", shared=True), key("metadata"), b"}", emit.put(), b"u"]
        yield b"".join(out)
    yield b"eu."


def write(path: Path, megabytes: int) -> int:
    """A dump of about that size. Returns its samples."""
    size = sum(map(len, _samples(64))) // 64 + EXPERTS * 4
    count = max(megabytes * 1_000_000 // size, 64)
    records = [random.Random(at).randbytes(EXPERTS * 4) for at in range(8)]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("dump/data.pkl", "w", force_zip64=True) as stream:
            for part in _samples(count):
                stream.write(part)
        archive.writestr("dump/byteorder", "little")
        for at in range(count):
            archive.writestr(f"dump/data/{at}", records[at % 8])
        archive.writestr("dump/version", "3\n")
    return count


def measured(argv: Sequence[str]) -> tuple[float, float, str]:
    """(seconds, peak in MB, stdout) of a process; raises when it fails."""
    begin = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        out = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(argv[:6])} ended with {child.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    return time.perf_counter() - begin, used.ru_maxrss * unit / 1e6, out


def _free() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def rows(megabytes: int = 2_000) -> list[tuple[str, str, str]]:
    """(what, measured, budget) for the table of all benchmarks. Raises when a page is not what was written."""
    show = [sys.executable, "-m", "rltop", "dump", "show"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "3.pt"
        count = write(path, megabytes)
        size = path.stat().st_size
        first, first_peak, out = measured([*show, str(path), "--plain"])
        assert f"sample 9  index 9  group {9 // 8}  reward 1" in out, out[:500]
        last, last_peak, out = measured([*show, str(path), "--plain", "--offset", str(count - 1)])
        assert f"sample {count - 1}  index {count - 1}" in out, out[:500]
        found = [
            ("a rollout dump", f"{size / 1e6:.0f} MB, {count} samples of {TOKENS} tokens, {count} tensors", ""),
            ("its first page (10 samples)", f"{first:.2f} s, peak {first_peak:.0f} MB", f"<= {FIRST_PAGE_S:.0f} s"),
            ("its last sample", f"{last:.1f} s, peak {last_peak:.0f} MB ({size / last / 1e6:.0f} MB/s)", ""),
            ("largest peak", f"{max(first_peak, last_peak):.0f} MB", f"<= {PEAK_MB:.0f} MB"),
        ]
        return [*found, ("torch.load of the same file", *_torch(path, size, first))]


def _torch(path: Path, size: int, first: float) -> tuple[str, str]:
    if importlib.util.find_spec("torch") is None:
        return "not run: torch is not installed", ""
    if _free() < _KEEP_FREE * size:
        return f"not run: {_free() / 1e9:.0f} GB of memory are free, it needs {_KEEP_FREE * size / 1e9:.0f}", ""
    script = "import sys, torch; print(len(torch.load(sys.argv[1], weights_only=False)['samples']))"
    seconds, peak, _ = measured([sys.executable, "-c", script, str(path)])
    return f"{seconds:.1f} s, peak {peak:.0f} MB: {seconds / first:.0f} x the first page's time", ""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes, shows, compares. Exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2_000)
    found = rows(parser.parse_args(argv).megabytes)
    for what, told, budget in found:
        print(f"{what:<30}{told}  {budget}".rstrip())
    first, peak = found[1][1], found[3][1]
    return int(float(first.split(" ")[0]) > FIRST_PAGE_S or float(peak.split(" ")[0]) > PEAK_MB)


if __name__ == "__main__":
    raise SystemExit(main())

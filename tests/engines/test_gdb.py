"""cuda-gdb's output as it was recorded on an H200, its aborts included, and what a log says without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.engines.gdb import Kernel, find_cuda_gdb, of_blocking, of_log, parse_cuda_gdb, read_core

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize(
    ("name", "kernel", "block", "place"),
    [
        ("server_core.txt", "test_oob_gather_kernel", "(0,0,0), thread (0,0,0)", "qwen3bad.py:9"),
        ("illegal_read.txt", "bad_gather_kernel", "(0,0,0), thread (64,0,0)", "bad.cu:11"),
        ("illegal_write_aborts.txt", "bad_store_kernel", "", "ima_k.py:5"),
    ],
)
def test_the_kernel_in_its_output(name: str, kernel: str, block: str, place: str) -> None:
    found = parse_cuda_gdb((DATA / "cuda_gdb" / name).read_text())
    assert found is not None
    assert (found.name, found.block, found.place) == (kernel, block, place)
    assert (found.exception, found.weaker) == ("Warp Illegal Address", False)


def gdb(folder: Path, text: str, status: int) -> str:
    (folder / "said.txt").write_text(text)
    script = folder / "cuda-gdb"
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\ncat {folder}/said.txt\nexit {status}\n')
    script.chmod(0o755)
    return str(script)


async def test_its_output_counts_whatever_its_status(tmp_path: Path) -> None:
    text = (DATA / "cuda_gdb" / "illegal_write_aborts.txt").read_text()
    looked = await read_core(tmp_path / "core.1", gdb=gdb(tmp_path, text, 134))
    assert looked.kernel is not None
    assert looked.kernel.name == "bad_store_kernel"
    assert (tmp_path / "asked").read_text().startswith(f"-batch -ex target cudacore {tmp_path}/core.1 -ex")


async def test_one_that_says_nothing_or_hangs_or_is_not_there(tmp_path: Path) -> None:
    looked = await read_core(tmp_path / "core.1", gdb=gdb(tmp_path, "no such file\n", 1))
    assert (looked.kernel, "it says: no such file" in looked.why) == (None, True)
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    looked = await read_core(tmp_path / "core.1", gdb=str(slow), limit_s=0.2)
    assert "was ended after" in looked.why
    looked = await read_core(tmp_path / "core.1", gdb=str(tmp_path / "none"))
    assert "can not be run" in looked.why
    assert find_cuda_gdb({"PATH": "", "CUDA_HOME": str(tmp_path / "x")}) is None


def test_the_names_in_logs() -> None:
    core = (DATA / "logs" / "whole_ima_coredump_graphs.log").read_text(errors="replace").splitlines()
    found = of_log(core)
    assert found is not None
    assert (found.name, found.weaker) == ("test_oob_gather_kernel", False)
    blocking = (DATA / "logs" / "whole_ima_blocking_no_graphs.log").read_text(errors="replace").splitlines()
    assert of_log(blocking) is None
    weaker = of_blocking(blocking, graphs=False)
    assert weaker is not None
    assert (weaker.name, weaker.place, weaker.weaker) == ("test_oob_gather_kernel", "qwen3bad.py:15", True)
    assert of_blocking(blocking, graphs=True) is None, "a replay launches many kernels at once"
    late = (DATA / "logs" / "whole_ima_async_no_graphs.log").read_text(errors="replace").splitlines()
    assert of_blocking(late, graphs=False) is None, "nothing blocked: that frame is where it was noticed"


def test_the_cell() -> None:
    cell = Kernel(name="k", source="log", place="a.py:1").cell()
    assert {"name", "block", "source", "weaker"} <= cell.keys()

"""Sends weights over gloo to a server's weight update group, as a trainer does. Run with SGLang's own interpreter.

    python sender.py PORT WEIGHTS.safetensors

Waits for the server in the group (rank 1), says `joined`, and on a line of its input broadcasts every tensor in the
order of the file's names.
"""

from __future__ import annotations

import sys

from safetensors.torch import load_file
from sglang.srt.utils.common import init_custom_process_group


def main(port: int, path: str) -> None:
    """Send once."""
    tensors = load_file(path)
    print("ready", flush=True)
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="weights"
    )
    print("joined", flush=True)
    sys.stdin.readline()
    for name in sorted(tensors):
        group.broadcast([tensors[name].contiguous()]).wait()
    print("sent", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

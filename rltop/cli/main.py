"""The console script: exit codes and errors for people; nothing else, so that an interrupted import is handled too.

Exit codes are API: 0 done, 1 the run or a check failed or the daemon can not be reached, 2 the input is at fault,
130 interrupted, 141 whoever read stdout went away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: without the program's name, default `sys.argv[1:]`."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, and must not find the broken pipe there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE


def _run(args: list[str]) -> int:
    from rltop.errors import RltopError

    try:
        if args[:1] == ["train"]:
            # The trainer has its own parser (slime's flags, hundreds of them): its words are not ours to touch.
            return _train(args[1:])
        from rltop.cli.app import dispatch

        code = dispatch(args)
        sys.stdout.flush()
        return code
    except RltopError as error:
        print(f"rltop: {error}", file=sys.stderr)
        return error.exit_code


def _train(args: list[str]) -> int:
    from rltop.cli.train import main as train

    if not {"-h", "--help"} & set(args):
        from rltop.cli.extra import require_train

        require_train("train")
    return train(args)


if __name__ == "__main__":
    sys.exit(main())

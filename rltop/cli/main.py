"""The console script: exit codes and errors for people; nothing else, so that an interrupted import is handled too.

Exit codes are API: 0 done, 1 the run or a check failed or the daemon can not be reached, 2 the input is at fault,
130 interrupted, 141 whoever read stdout went away.

stdout is data: a command whose data could not be written (a full disk, a closed descriptor) has failed, whatever it
did before, and says so in one line. stderr is narration: when it fails nobody is told, because nobody could be.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141
UNWRITTEN = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv: without the program's name, default `sys.argv[1:]`."""
    try:
        return _answered(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED


def _answered(args: list[str]) -> int:
    from rltop.cli.stdout import StdoutLost, forget_stdout, watch_stdout

    try:
        watch_stdout()
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        forget_stdout()
        return BROKEN_PIPE
    except StdoutLost as lost:
        forget_stdout()
        with contextlib.suppress(OSError):
            print(f"rltop: stdout: cannot write the answer\n  why: {lost}", file=sys.stderr)
        return UNWRITTEN


def _run(args: list[str]) -> int:
    from rltop.errors import RltopError

    try:
        if args[:1] == ["train"]:
            # The trainer has its own parser (slime's flags, hundreds of them): its words are not ours to touch.
            return _train(args[1:])
        from rltop.cli.app import dispatch

        return dispatch(args)
    except RltopError as error:
        with contextlib.suppress(OSError):
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

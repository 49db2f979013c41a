"""The main process of a stand-in engine: arguments, log, tree, then whatever serves. Without torch.

What it cannot start with (an argument, a checkpoint, a port) is one message and exit status 2, or 1 for a combination
of arguments that SGLang refuses. How it ends otherwise: `process`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TextIO

from rltop.engines.ports import bind
from rltop.errors import RltopError
from rltop.train.cpu_engine.args import parse_args
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.faults import INJECTED
from rltop.train.cpu_engine.process import Tree, serve
from rltop.train.cpu_engine.stages import with_port

Build = Callable[..., Engine]
"""Arguments, environment and tree -> the engine. Raises RltopError."""


def run_engine(argv: Sequence[str], *, marker: str, told: str, build: Callable[[], Build]) -> int:
    """Run a stand-in until a signal; returns the exit status.

    marker, told: its name, and what it says of itself first. build: gives what builds it: called once the arguments
    are accepted, so that whatever it imports does not delay a refusal.
    """
    try:
        args = parse_args(argv)
    except RltopError as error:
        return _told(error)
    made = build()
    logger = logging.getLogger("rltop.cpu_engine")
    tree = Tree(os.environ)
    try:
        with (
            closing(bind(args.host, args.port)) as listener,
            logging_to(sys.stdout, args.log_level),
            closing(tree),
        ):
            args = with_port(args, listener.getsockname()[1])
            tree.start()
            logger.info("%s: %s", marker, told.format(version=args.sglang_version))
            for remark in args.remarks:
                logger.warning("%s", remark)
            for fault in args.faults:
                logger.warning("%s: armed: %s", INJECTED, fault)
            logger.info("%s", args.log_form())
            return serve(made(args, os.environ, tree), listener, tree)
    except RltopError as error:
        return _told(error)


def exit_at_once(status: int) -> None:
    """Everything is closed by now; taking the modules apart would need most of a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _told(error: RltopError) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


@contextmanager
def logging_to(stream: TextIO, level: str) -> Iterator[None]:
    """SGLang's prefix on every line, uvicorn's included."""
    import uvicorn.logging

    date = "%Y-%m-%d %H:%M:%S"
    access = '[%(asctime)s] %(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s'
    formatters: dict[str, logging.Formatter] = {
        "rltop.cpu_engine": logging.Formatter("[%(asctime)s] %(message)s", date),
        "uvicorn.error": uvicorn.logging.DefaultFormatter(
            "[%(asctime)s] %(levelprefix)s %(message)s", date, "%", False
        ),
        "uvicorn.access": uvicorn.logging.AccessFormatter(access, date, "%", False),
    }
    handlers = []
    for name, formatter in formatters.items():
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
        handlers.append((logger, handler))
    try:
        yield
    finally:
        for logger, handler in handlers:
            logger.removeHandler(handler)
            logger.propagate = True

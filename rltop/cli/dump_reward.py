"""The user's reward function: found by its path, called as slime calls `--custom-rm-path`, with a sample or a list.

Failure policy: a function that cannot be found or imported is the user's input (RltopError, exit code 2, with the file
and line that raised). What it raises for a sample is that sample's outcome, never an error of the command; Ctrl-C goes
through. What it prints goes to stderr: stdout is data.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import queue
import sys
import threading
import traceback
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from rltop.evidence.dump_sample import DumpSample, DumpTensor, Refused

WHERE = "dump replay-reward"


class Status(StrEnum):
    """slime's `Sample.Status`; equal to its value as a string too."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class RewardSample(types.SimpleNamespace):
    """A sample under the attribute names of slime's `Sample`, for functions that know nothing of rltop."""

    Status = Status

    def get_reward_value(self, args: Any) -> Any:
        """As slime's."""
        return self.reward if not args.reward_key else self.reward[args.reward_key]

    @property
    def effective_response_length(self) -> int:
        """Tokens that are trained on."""
        return int(sum(self.loss_mask)) if self.loss_mask is not None else int(self.response_length)


_DEFAULTS: Mapping[str, Any] = {
    "group_index": None,
    "index": None,
    "rollout_id": None,
    "prompt": "",
    "tokens": (),
    "multimodal_inputs": None,
    "multimodal_train_inputs": None,
    "response": "",
    "response_length": 0,
    "label": None,
    "reward": None,
    "loss_mask": None,
    "weight_versions": (),
    "rollout_log_probs": None,
    "rollout_routed_experts": None,
    "remove_sample": False,
    "teacher_log_probs": None,
    "status": "pending",
    "metadata": {},
    "generate_function_path": None,
    "custom_rm_path": None,
    "train_metadata": None,
    "session_id": None,
    "non_generation_time": 0.0,
}
"""slime's fields that a dump may lack."""


def reward_sample(one: DumpSample) -> Any:
    """What the function gets: slime's own `Sample` where the function imported slime, else `RewardSample`."""
    row: dict[str, Any] = {name: list(value) if value == () else value for name, value in _DEFAULTS.items()}
    row["metadata"] = {}
    given = {
        "index": one.index,
        "group_index": one.group_index,
        "prompt": list(one.messages) if one.messages is not None else one.prompt,
        "response": one.response,
        "tokens": None if one.tokens is None else list(one.tokens),
        "response_length": one.response_length,
        "label": one.label,
        "reward": one.reward,
        "status": one.status,
        "weight_versions": None if one.weight_versions is None else list(one.weight_versions),
        "rollout_log_probs": None if one.rollout_log_probs is None else list(one.rollout_log_probs),
        "loss_mask": None if one.loss_mask is None else list(one.loss_mask),
        "metadata": None if one.metadata is None else dict(one.metadata),
        "log_probs": one.log_probs,
        "ref_log_probs": one.ref_log_probs,
    }
    row |= {name: value for name, value in given.items() if value is not None}
    row |= {name: _value(value) for name, value in one.extra.items() if not isinstance(value, Refused)}
    theirs = getattr(sys.modules.get("slime.utils.types"), "Sample", None)
    if theirs is not None:
        return theirs.from_dict(row)
    with contextlib.suppress(ValueError):  # a status that slime does not know stays text
        row["status"] = Status(row["status"])
    return RewardSample(**row)


def _value(value: Any) -> Any:
    """A tensor as nested lists."""
    if not isinstance(value, DumpTensor):
        return value
    flat: list[Any] = list(value.values())
    if value.dtype.startswith(("int", "uint")):
        flat = [int(one) for one in flat]
    for size in reversed(value.shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)] if size else []
    return flat if value.shape else next(iter(flat), None)


class RewardArgs(types.SimpleNamespace):
    """slime's `args`, of which only what was given with --arg is known."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"args.{name} is not known here: give it with --arg {name}=VALUE")


@dataclass(frozen=True, slots=True)
class Failed:
    """What the function did instead of scoring."""

    kind: str
    """Type of the exception, or `result` for something that is no reward."""
    why: str
    where: str = ""
    """`file:line` in the function's own code, where known."""


Outcome = float | Mapping[str, Any] | None | Failed


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function and how to call it."""

    path: str
    call: Callable[..., Any]
    takes_args: bool
    """`(args, sample)`, else `(sample)`."""
    batched: bool
    """It takes a list of samples and returns a list of rewards."""
    is_async: bool
    args: Any

    def __call__(self, samples: Sequence[Any]) -> Any:
        """What it returns, perhaps to be awaited. One sample unless it is batched."""
        given = list(samples) if self.batched else samples[0]
        return self.call(self.args, given) if self.takes_args else self.call(given)


def find_function(path: str, *, batched: bool | None, args: Mapping[str, Any]) -> RewardFunction:
    """`pkg.mod.fn`, `pkg.mod:fn` or `file.py:fn`. batched: None looks at the function. Raises RltopError."""
    module_name, name = _split(path)
    with contextlib.redirect_stdout(sys.stderr):
        module = _module(module_name, path)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise _missing(module, name, path)
    if inspect.isclass(found) or not callable(found):
        raise RltopError(
            "not a function", where=path, why=f"{name} is a {type(found).__name__}", do="name a function of the module"
        )
    takes_args, looks_batched = _signature(found, path)
    inner = getattr(found, "func", found)  # functools.partial
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004
    known = RewardArgs(reward_key=None, custom_rm_path=path, rm_type=None)
    known.__dict__.update(args)
    return RewardFunction(path, found, takes_args, looks_batched if batched is None else batched, is_async, known)


def _split(path: str) -> tuple[str, str]:
    module, colon, name = path.rpartition(":")
    if colon and module and name:
        return module, name
    module, dot, name = path.rpartition(".")
    if not colon and dot and module and not path.endswith(".py"):
        return module, name
    raise RltopError(
        "which function?",
        where=path,
        why="a module and a function in it are needed",
        do=f"{path}:FUNCTION"
        if path.endswith(".py")
        else "package.module:function, package.module.function or file.py:fn",
    )


def _module(name: str, path: str) -> types.ModuleType:
    is_file = name.endswith(".py") or os.sep in name
    if is_file and not Path(name).is_file():
        raise RltopError("no such file", where=path, why=f"{Path(name).absolute()} does not exist")
    try:
        _first_on_path(Path.cwd())
        if not is_file:
            return importlib.import_module(name)
        file = Path(name).resolve()
        _first_on_path(file.parent)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module  # dataclasses and pickling look a module up by its name
        spec.loader.exec_module(module)
        return module
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and (name == error.name or name.startswith(error.name + "."))
        ):
            raise RltopError(
                "no such module",
                where=path,
                why=f"{error.name} can be imported neither from {Path.cwd()} nor from this Python's packages",
                do="start where its package lies, set PYTHONPATH, or give file.py:fn",
            ) from error
        raise RltopError(
            "its module can not be imported",
            where=place_of(error) or path,
            why=_words(error),
            do=f"{sys.executable} -c 'import {name}'" if not is_file else f"{sys.executable} {name}",
        ) from error


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _missing(module: types.ModuleType, name: str, path: str) -> RltopError:
    have = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = difflib.get_close_matches(name, have, 3)
    listed = ", ".join(close or have[:8]) or "no function"
    return RltopError("no such function", where=path, why=f"{module.__name__} has no {name}", do=f"it has {listed}")


def _signature(function: Callable[..., Any], path: str) -> tuple[bool, bool]:
    """(takes args first, takes a list)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return False, False
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one for one in places if one.default is one.empty]
    keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if len(needed) > 2 or keywords or not (places or any(one.kind is one.VAR_POSITIONAL for one in parameters)):
        raise RltopError(
            "not a reward function",
            where=path,
            why=f"it wants {inspect.signature(function)}",
            do="slime calls it as fn(args, sample); fn(sample) works here too",
        )
    takes_args = len(needed) == 2 or not places or (places[0].name == "args" and len(places) > 1)
    sample = places[int(takes_args)] if len(places) > takes_args else None
    if sample is None:
        return takes_args, False
    told = "" if sample.annotation is sample.empty else str(sample.annotation).lower()
    return takes_args, sample.name in ("samples", "batch") or told.startswith(
        ("list", "typing.list", "<class 'list'")
    ) or "sequence[" in told


async def score(
    function: RewardFunction, batches: Iterator[list[Any]], *, concurrency: int, timeout_s: float
) -> AsyncIterator[tuple[int, list[Outcome]]]:
    """(number of the batch, an outcome per sample), in order. At most `concurrency` calls run at a time, and not many
    more batches than that are taken from `batches`.

    An async function runs in this loop. Another one runs in threads, one unless `concurrency` says more: most are not
    made for several.
    """
    running: list[tuple[int, asyncio.Task[list[Outcome]]]] = []
    with _Threads(concurrency) as threads:
        try:
            for number, batch in enumerate(batches):
                running.append((number, asyncio.create_task(_outcomes(function, batch, threads, timeout_s))))
                if len(running) >= concurrency:
                    first, task = running.pop(0)
                    yield first, await task
            while running:
                first, task = running.pop(0)
                yield first, await task
        finally:
            for _, task in running:
                task.cancel()


class _Threads:
    """Threads for what is not async. They die with the program: a Ctrl-C does not wait for a function that hangs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._started = 0

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *_: object) -> None:
        for _started in range(self._started):
            self._work.put(None)

    async def run(self, work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """What `work` returned or raised, from a thread. It is not raised here: no loop takes a SystemExit."""
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._serve, name=f"reward-{self._started}", daemon=True).start()
        done: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()
        self._work.put((work, done))
        return await done

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            found: tuple[Any, BaseException | None]
            try:
                found = work(), None
            except BaseException as error:
                found = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                done.get_loop().call_soon_threadsafe(_settle, done, found)


def _settle(done: asyncio.Future[Any], found: tuple[Any, BaseException | None]) -> None:
    if not done.done():
        done.set_result(found)


async def _outcomes(function: RewardFunction, batch: list[Any], threads: _Threads, timeout_s: float) -> list[Outcome]:
    try:
        if function.is_async:
            async with asyncio.timeout(timeout_s):
                result = await function(batch)
        else:
            result, failure = await threads.run(lambda: function(batch))
            if failure is not None:
                return [_failed(failure, timeout_s)] * len(batch)
            if isinstance(result, Awaitable):
                result = await result
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        return [_failed(error, timeout_s)] * len(batch)
    if not function.batched:
        return [_reward(result)]
    if not isinstance(result, list | tuple) and hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple) or len(result) != len(batch):
        have = f"{len(result)} rewards" if isinstance(result, list | tuple) else f"a {type(result).__name__}"
        return [Failed("result", f"{have} for {len(batch)} samples")] * len(batch)
    return [_reward(one) for one in result]


def _failed(error: BaseException, timeout_s: float) -> Failed:
    place = place_of(error)
    late = isinstance(error, TimeoutError) and not place
    return Failed(type(error).__name__, f"no reward within {timeout_s:g} s" if late else _words(error), place)


def _reward(value: Any) -> Outcome:
    """A number, a map of rewards or None; of an array or tensor its only element."""
    if hasattr(value, "item") and not isinstance(value, Mapping):
        try:
            value = value.item()
        except Exception as error:
            return Failed("result", f"a {type(value).__name__} that is no single number ({error})")
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, int | float):
        return float(value)
    return Failed("result", f"it returned a {type(value).__name__}, not a number")


def place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither ours nor of an installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((own, "<frozen", sys.prefix, sys.base_prefix))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _words(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__

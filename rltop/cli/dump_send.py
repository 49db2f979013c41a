"""`rltop dump send URL PATTERN`: puts saved samples to an engine again and compares tokens and log-probs.

Failure policy: nothing is sent to an engine that is paused, or whose memory may be released (see `serving`). When its
weights change meanwhile, or it goes away, what was compared until then is shown. Exit code 1 when something differs or
could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rltop.cli.dump_open import Pick
from rltop.cli.output import print_json
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.cli.dump_sent import Seen
    from rltop.engines.client import AsyncEngineClient
    from rltop.engines.resend import Examined, Recorded, Sampled, Scored
    from rltop.evidence.dump_find import DumpRef
    from rltop.evidence.dump_sample import DumpSample

WHERE = "dump send"
TOLERANCE = 0.1
"""Mean |difference| of a sample's log-probs. slime's CI bound between trainer and engine
(--ci-train-rollout-logprob-abs-diff-threshold). bf16 alone costs 0.02 on a random model, fp32 1e-5."""


def send(
    url: Annotated[str, typer.Argument(metavar="URL", help="An SGLang server, for example http://node7:30000.")],
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="A dump, a directory, a glob, or a path with {rollout_id}.")
    ],
    sample: Annotated[
        bool,
        typer.Option(
            "--sample/--score",
            help="Score: log-probs of the recorded tokens, exact. Sample: the prompt again, first other token.",
        ),
    ] = False,
    limit: Annotated[int | None, typer.Option("-n", "--limit", min=1, help="Send only the first so many.")] = None,
    chosen: Annotated[
        str, typer.Option("--filter", metavar="EXPR", help="Only samples that fit, as in dump show.")
    ] = "",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time.")] = 16,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Most mean |difference| of a sample's log-probs.")
    ] = TOLERANCE,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Score: what was sampled at. Sample: what to sample at. Default: as recorded, else 1 and 0."
        ),
    ] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="The eval_ dumps instead of the training ones.")] = False,
    awake: Annotated[bool, typer.Option("--awake", help="I know that the engine's memory is not released.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Send although the engine reads text into other tokens.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="For one request.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout (docs/cli.md).")] = False,
) -> int:
    """Put saved samples to an engine again: does it hold what the dump says?

    --score (the default) reads the engine's log-probs of the very tokens that were recorded. --sample asks for an
    answer to each prompt, greedy unless the dump holds its sampling parameters.
    """
    pick = Pick(pattern, chosen, limit, evaluation)
    ask = _Ask(_url(url), pick, sample, concurrency, tolerance, temperature, awake, force, timeout_s)
    return run(ask, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Ask:
    url: str
    pick: Pick
    sample: bool
    concurrency: int
    tolerance: float
    temperature: float | None
    awake: bool
    force: bool
    timeout_s: float


def run(ask: _Ask, *, as_json: bool) -> int:
    """See `send`."""
    import asyncio

    from rltop.cli.dump_sent import Asked, Seen, as_object, lines

    refs = ask.pick.refs()
    seen, asked = Seen(), Asked(ask.url, ask.sample, ask.tolerance)
    facts = asyncio.run(_send_all(ask, refs, seen))
    if not seen.sent and not seen.skipped and not seen.broken:
        raise ask.pick.nothing()
    if as_json:
        print_json(as_object(asked, facts, seen))
    else:
        print("\n".join(lines(asked, facts, seen)))
    return 1 if seen.differs or seen.failed or seen.stopped or seen.broken or not seen.compared else 0


async def _send_all(ask: _Ask, refs: Sequence[DumpRef], seen: Seen) -> Examined:
    import asyncio

    from rltop.cli.serving import check_memory, check_state, check_tokenizer, owner
    from rltop.engines.client import AsyncEngineClient
    from rltop.engines.resend import Unsendable, examine, ready

    async with AsyncEngineClient(ask.url) as client, owner(client.url) as state_of:
        check_state(client.url, state_of())
        facts = await examine(client)
        await ready(client)
        check_memory(facts, client.url, known=ask.awake or bool(state_of()))
        room = asyncio.Semaphore(ask.concurrency)
        tasks: set[asyncio.Task[None]] = set()
        first = True
        try:
            for ref, sample in ask.pick.samples(refs, seen.broken):
                if seen.stopped:
                    break
                if first and not ask.force:
                    await check_tokenizer(client, facts, sample, str(ref.path))
                first = False
                try:
                    whole = await _with_prompt(client, facts, sample, state_of, seen)
                    one = _recorded(ask, facts, ref, whole)
                except Unsendable as error:
                    seen.skipped[str(error)] += 1
                    continue
                await room.acquire()
                work = _one(ask, client, facts, ref.rollout_id, sample, one, state_of, seen)
                task = asyncio.create_task(work)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: room.release())
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return facts


def _url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    if not url.startswith(("http://", "https://")):
        raise RltopError("not an engine's address", where=text, do="http://HOST:PORT")
    return url


async def _with_prompt(
    client: AsyncEngineClient, facts: Examined, sample: DumpSample, state_of: Callable[[], str], seen: Seen
) -> DumpSample:
    """The sample, with its prompt's tokens asked of the engine where the dump lacks them. Raises Unsendable."""
    from rltop.cli.serving import check_state
    from rltop.engines.calls import EngineUnreachable, WrongWeightVersion
    from rltop.engines.resend import NotServing, Unsendable, ready, with_prompt

    if sample.tokens:
        return sample
    try:
        check_state(client.url, state_of())
        await ready(client)
        return await with_prompt(client, sample, version=facts.version)
    except (EngineUnreachable, WrongWeightVersion, NotServing) as error:
        seen.stopped = seen.stopped or f"{error.what}: {error.why}"
        raise Unsendable("the engine did not read its prompt") from error


def _recorded(ask: _Ask, facts: Examined, ref: DumpRef, sample: DumpSample) -> Recorded:
    """What is sent of a sample. Raises Unsendable, and RltopError for one of another model."""
    from rltop.engines.resend import Unsendable, recorded

    one = recorded(sample)
    if not ask.sample and one.log_probs is None:
        raise Unsendable("it has no rollout_log_probs")
    if not ask.sample and not one.response_ids:
        raise Unsendable("it has no response")
    largest, smallest = max((*one.prompt_ids, *one.response_ids)), min((*one.prompt_ids, *one.response_ids))
    if facts.vocab_size is not None and (largest >= facts.vocab_size or smallest < 0):
        raise RltopError(
            "this dump is of another model: the vocabulary does not fit",
            where=f"{ref.path}, sample {sample.at}",
            why=f"it has token {largest if largest >= facts.vocab_size else smallest}, the engine's vocabulary "
            f"{facts.vocab_size} ({facts.vocab_from})",
            do="give the engine that serves the dump's model",
        )
    drawn_at = ask.temperature if ask.temperature is not None else one.params.get("temperature", 1.0)
    if not isinstance(drawn_at, int | float):
        raise Unsendable(f"its recorded temperature is {drawn_at!r}")
    if not ask.sample and drawn_at != 1.0:
        raise RltopError(
            "only log-probs of temperature 1 can be scored",
            where="--temperature" if ask.temperature is not None else f"{ref.path}, sample {sample.at}",
            why=f"it was sampled at {drawn_at:g}; SGLang's log-probs of given tokens are not divided by a temperature",
            do="--sample compares the answers instead",
        )
    return one


async def _one(
    ask: _Ask,
    client: AsyncEngineClient,
    facts: Examined,
    rollout_id: int | None,
    sample: DumpSample,
    one: Recorded,
    state_of: Callable[[], str],
    seen: Seen,
) -> None:
    """One sample. Every error becomes a line of the result."""
    from rltop.cli.dump_sent import Line
    from rltop.cli.serving import check_state
    from rltop.engines.calls import EngineRefused, EngineUnreachable, WrongWeightVersion
    from rltop.engines.resend import NotServing, Unsendable, ready, sample_again, score

    if seen.stopped:
        return

    def line(result: Scored | Sampled, differs: bool, repeatable: bool = True) -> Line:
        versions = tuple(sample.weight_versions or ())
        return Line(rollout_id, sample.at, sample.index, versions, result, differs, repeatable)

    try:
        check_state(client.url, state_of())
        await ready(client)
        seen.sent += 1
        if not ask.sample:
            scored = await score(client, one, version=facts.version, timeout_s=ask.timeout_s)
            seen.add(line(scored, not scored.mean_gap <= ask.tolerance))
            return
        params = _params(ask, one)
        repeatable = "sampling_seed" in params or params["temperature"] == one.params.get("temperature") == 0
        sampled = await sample_again(client, one, params, version=facts.version, timeout_s=ask.timeout_s)
        seen.add(line(sampled, repeatable and not sampled.same, repeatable))
    except Unsendable as error:
        seen.fail(str(error), rollout_id, sample.at)
    except EngineUnreachable as error:
        seen.stopped = seen.stopped or f"the engine does not answer any more: {error.why}"
    except (WrongWeightVersion, NotServing) as error:
        seen.stopped = seen.stopped or f"{error.what}: {error.why}"
    except EngineRefused as error:
        seen.fail(error.why, rollout_id, sample.at)
    except (KeyError, TypeError, ValueError, IndexError) as error:  # an answer of another shape than SGLang's
        seen.fail(f"its answer can not be read ({type(error).__name__}: {error})", rollout_id, sample.at)


def _params(ask: _Ask, one: Recorded) -> dict[str, Any]:
    """Of a new answer: as recorded where the dump says so, else greedy; as many tokens as there were."""
    found: dict[str, Any] = {
        "temperature": 0.0,
        "max_new_tokens": max(len(one.response_ids), 1),
        **one.params,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    return found if ask.temperature is None else found | {"temperature": ask.temperature}

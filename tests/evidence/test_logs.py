"""What a log becomes: events with owner and time, tracebacks as one, model text masked, bounds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from rltop.checks.found import LogEvent
from rltop.evidence.collect import collect
from rltop.evidence.lines import Line, Recogniser
from rltop.evidence.logs import EVENTS, LogScan, Table, read
from rltop.evidence.sink import Sink, Source

TRAINER = "(MegatronTrainRayActor pid=4101, ip=node-a)"
ENGINE = "(SGLangEngine pid=3501)"
ROLLOUT = "(RolloutManager pid=3001)"
AT = "[2026-03-02 10:00:00]"


def scan(text: str | Iterable[str], name: str = "job.txt", tmp: Path | None = None) -> Sink:
    lines = text.split("\n") if isinstance(text, str) else list(text)
    sink, one = Sink(), LogScan(name)
    one.feed(1, [line.encode() for line in lines])
    one.finish(sink)
    return sink


def only(sink: Sink, kind: str) -> LogEvent:
    (event,) = [event for event in sink.events if event.kind == kind]
    return event


IMA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        (f"{TRAINER} {AT} x\n{IMA}", "trainer"),  # a line without prefix belongs to the prefixed line before it
        (f"{TRAINER} {AT} x\n{ENGINE} {AT} y\n{IMA}", "engine"),
        (f"{ENGINE} {AT} x\n[rank3]: {IMA}", "trainer"),
        (f"[2026-03-02 10:00:00 TP3] {IMA}", "engine"),
        # Ray's own word counts more than the line that happens to stand before
        (
            f"{ENGINE} {AT} x\nray.exceptions.RayTaskError(AcceleratorError): ray::MegatronTrainRayActor.train() "
            f'(pid=7, ip=n)\n  File "a.py", line 1, in f\n{IMA}',
            "trainer",
        ),
        (
            f'Traceback (most recent call last):\n  File "/x/megatron/core/a.py", line 1, in f\n    g()\n{IMA}',
            "trainer",
        ),
        (f'Traceback (most recent call last):\n  File "/x/sglang/srt/a.py", line 1, in f\n    g()\n{IMA}', "engine"),
    ],
)
def test_whose_a_line_is(text: str, owner: str) -> None:
    sink = scan(text)
    assert only(sink, "ima").owner == owner
    assert only(sink, "traceback").owner == owner


def test_of_a_death_that_the_driver_tells_the_dead_actor_is_the_subject() -> None:
    sink = scan(
        f"""(raylet, ip=10.0.0.2) {AT} (raylet) node_manager.cc:3041: x
Traceback (most recent call last):
  File "/root/slime/train.py", line 106, in <module>
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: SGLangEngine
\tactor_id: 0123
\tpid: 3501
\tip: 10.0.0.2"""
    )
    event = only(sink, "traceback")
    assert (event.owner, event.actor, event.pid, event.node) == ("engine", "SGLangEngine", 3501, "10.0.0.2")


def test_owner_by_the_name_of_the_file_comes_last() -> None:
    assert only(scan(IMA, "logs/rank3.log"), "ima").owner == "trainer"
    assert only(scan(IMA, "logs/rank3.log"), "ima").rank == 3
    assert only(scan(IMA, "logs/engine_2.log"), "ima").engine == 2
    assert only(scan(f"{TRAINER} {AT} {IMA}", "engine_2.log"), "ima").owner == "trainer"


def test_a_traceback_is_one_event_with_frames_and_the_events_of_its_lines() -> None:
    sink = scan(
        f"""{ENGINE} [2026-03-02 10:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/site/sglang/srt/managers/scheduler.py", line 2012, in run_batch
    result = self.forward()
  File "/usr/lib/python3.11/threading.py", line 5, in run
{IMA}
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

{ENGINE} [2026-03-02 10:00:01 TP1] next"""
    )
    event = only(sink, "traceback")
    assert event.where.line == 5
    assert event.data["exception"] == "torch.AcceleratorError"
    assert event.data["own_frame"] == ("/site/sglang/srt/managers/scheduler.py", 2012, "run_batch")
    assert event.rank == 1
    fault = only(sink, "ima")
    assert fault.data["frames"] == event.data["frames"]
    assert fault.time == event.time == 1772445600.0


def test_interleaved_tracebacks_of_two_processes_stay_apart() -> None:
    one, two = "(A pid=1) ", "(B pid=2) "
    lines = [
        one + "Traceback (most recent call last):",
        two + "Traceback (most recent call last):",
        one + '  File "a.py", line 1, in f',
        two + '  File "b.py", line 2, in g',
        two + "KeyError: 'two'",
        one + "ValueError: one",
    ]
    found = {e.pid: (e.data["exception"], e.data["frames"]) for e in scan(lines).events if e.kind == "traceback"}
    assert found == {1: ("ValueError", (("a.py", 1, "f"),)), 2: ("KeyError", (("b.py", 2, "g"),))}


def test_a_chain_is_one_traceback_and_its_last_exception_is_the_one_that_was_raised() -> None:
    sink = scan(
        """Traceback (most recent call last):
  File "a.py", line 1, in f
ConnectionRefusedError: [Errno 111] Connection refused

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in g
requests.exceptions.ConnectionError: no"""
    )
    event = only(sink, "traceback")
    assert event.data["exception"] == "requests.exceptions.ConnectionError"
    assert event.data["chain"] == (("ConnectionRefusedError", "[Errno 111] Connection refused"),)


def test_frames_alone_are_a_stack_and_no_error() -> None:
    sink = scan('Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n  File "b.py", line 2 in g\n\nx')
    assert [event.kind for event in sink.events] == ["stack"]


def test_model_text_is_a_sample_and_never_an_event() -> None:
    bad = "CUDA error: an illegal memory access was encountered. Traceback (most recent call last): OutOfMemoryError: x"
    sink = scan(
        [
            f"{ROLLOUT} {AT} sglang_rollout.py:420 - First rollout sample: ['{bad}'], label: 4, reward: 0.5",
            f"{ROLLOUT} {AT} sglang_rollout.py:447 - Finish rollout: ['says \\'x\\', label: 1'], label: 80, reward: 1",
            f"{ROLLOUT} {AT} rollout.py:1193 - perf 6: {{'rollout/raw_reward': 0.4}}",
            f"{ROLLOUT} {AT} sglang_rollout.py:447 - Finish rollout: ['later'], label: 80, reward: 0",
        ]
    )
    assert sink.events == []
    assert [(s.rollout_id, s.reward) for s in sink.samples] == [(6, 0.5), (6, 1.0), (7, 0.0)]
    assert sink.samples[0].excerpt == bad[:160]
    assert sink.samples[1].excerpt == "says 'x', label: 1"


def test_printed_prompts_over_many_lines_are_masked_until_the_score() -> None:
    sink = scan(
        f"[response] well\n{IMA}\nTraceback (most recent call last):\n[ground_truth] 4\n[score] 1\nKeyError: 'real'"
    )
    assert [event.text for event in sink.events] == ["KeyError: 'real'"]


def test_a_sample_over_several_lines_is_masked_to_its_end_and_others_are_not() -> None:
    sink = scan(
        [
            f"{ROLLOUT} {AT} sglang_rollout.py:447 - Finish rollout: ['first",
            f"{ROLLOUT} {IMA}",
            f"{ENGINE} {AT} KeyError: 'of the engine'",
            f"{ROLLOUT} Traceback (most recent call last):'], label: 80, reward: 1",
            f"{ROLLOUT} KeyError: 'of the manager'",
        ]
    )
    assert [event.text for event in sink.events] == ["KeyError: 'of the engine'", "KeyError: 'of the manager'"]


def test_dicts_without_a_step_are_counted() -> None:
    rows = scan("{'loss': 0.5, 'grad_norm': 1.0}\n{'loss': 0.4, 'grad_norm': nan}", "trl.log").metrics
    assert [(row.axis, row.step) for row in rows] == [("train", 0), ("train", 1)]


@pytest.mark.parametrize(
    ("line", "axis", "step", "name", "value"),
    [
        ("step 5: {'train/grad_norm': nan, 'train/step': 5}", "train", 5, "train/grad_norm", "nan"),
        ("step 5: {'train/grad_norm': np.float64(1.25)}", "train", 5, "train/grad_norm", "1.25"),
        ('step 5: {"train/grad_norm": Infinity}', "train", 5, "train/grad_norm", "inf"),
        ("step 5: {'train/grad_norm': tensor(0.5, device='cuda:0')}", "train", 5, "train/grad_norm", "0.5"),
        ("perf 3: {'rollout/truncated_ratio': 0.25}", "rollout", 3, "rollout/truncated_ratio", "0.25"),
        ("rollout 3: {'rollout/raw_reward': 1}", "rollout", 3, "rollout/raw_reward", "1.0"),
        ("step:7 - actor/grad_norm:0.5 - actor/lr:1e-06", "train", 7, "train/grad_norm", "0.5"),
        (
            " iteration        9/     100 | consumed samples: 8 | lm loss: 1.5E+00 | grad norm: 2.0 |",
            "train",
            9,
            "train/grad_norm",
            "2.0",
        ),
    ],
)
def test_metrics_of_every_framework(line: str, axis: str, step: int, name: str, value: str) -> None:
    (row,) = scan(f"{TRAINER} {AT} model.py:918 - {line}").metrics
    assert (row.axis, row.step, str(row.values[name])) == (axis, step, value)
    assert row.where is not None
    assert row.where.line == 1


def test_steps_know_the_rollout_that_was_printed_before_them() -> None:
    lines = []
    for rollout in (4, 5):
        lines.append(f"{TRAINER} {AT} data.py:1 - rollout {rollout}: {{'rollout/raw_reward': 0.1}}")
        lines += [f"{TRAINER} {AT} m.py:1 - step {rollout * 2 + i}: {{'train/loss': 0.1}}" for i in (0, 1)]
    steps = [row for row in scan(lines).metrics if row.axis == "train"]
    assert [(row.rollout_id, row.step_in_rollout) for row in steps] == [(4, 0), (4, 1), (5, 0), (5, 1)]


def test_steps_do_not_guess_where_a_rollout_is_missing() -> None:
    lines = [
        f"{TRAINER} {AT} data.py:1 - rollout 4: {{'rollout/raw_reward': 0.1}}",
        f"{TRAINER} {AT} m.py:1 - step 4: {{'train/loss': 0.1}}",
        f"{TRAINER} {AT} m.py:1 - step 5: {{'train/loss': 0.1}}",
        f"{TRAINER} {AT} data.py:1 - rollout 6: {{'rollout/raw_reward': 0.1}}",
    ]
    steps = [row for row in scan(lines).metrics if row.axis == "train"]
    assert [(row.rollout_id, row.step_in_rollout) for row in steps] == [(None, None)] * 2


def test_arguments_that_a_log_prints() -> None:
    table = ["-------------------- arguments --------------------"]
    table += ["  colocate .......... True", "  lr ................ 1e-06", "  load .............. None"]
    table += ["-------------------- end of arguments ---------------------"]
    (args,) = scan(table).args
    assert args.flags == {"colocate": True, "lr": 1e-06, "load": None}
    (args,) = scan("Namespace(lr=1e-06, names=['a', 'b'], path='/x, y', on=True)").args
    assert args.flags["path"] == "/x, y"
    assert args.flags["on"] is True
    (args,) = scan("+ python3 train.py --colocate --lr 1e-6 --lr 2e-6").args
    assert args.flags == {"colocate": True, "lr": "2e-6"}
    assert args.repeats == {"lr": ("1e-6", "2e-6")}


def test_bulk_lines_are_counted_all_and_kept_around_what_happens() -> None:
    batch = ENGINE + " [2026-03-02 10:{:02d}:{:02d} TP0] Decode batch. #running-req: {}, avail mem={}.00 GB"
    lines = [batch.format(i // 60, i % 60, i, i) for i in range(3000)]
    lines.insert(2500, f"{ENGINE} [2026-03-02 10:41:40 TP0] {IMA}")
    sink = scan(lines, "engine.log")
    decodes = [event for event in sink.events if event.kind == "decode"]
    assert sink.logs[0].counts["decode"] == 3000
    assert len(decodes) < 400
    kept = {event.where.line for event in decodes}
    assert {1, 2, 2499, 2500, 2502, 2503, 3001} <= kept
    assert [event.where.line for event in sink.events] == sorted(event.where.line or 0 for event in sink.events)
    minutes = {int(event.time or 0) // 60 for event in decodes}
    assert len(minutes) == 50  # one of every minute: gaps stay visible


def test_events_of_one_kind_are_bounded_and_still_counted() -> None:
    lines = [f"{TRAINER} {AT} torch.OutOfMemoryError: CUDA out of memory. {i}" for i in range(20_000)]
    sink = scan(lines)
    assert sum(event.kind == "oom" for event in sink.events) == sum(EVENTS)
    assert sink.logs[0].counts["oom"] == 20_000


def test_a_process_that_died_in_a_traceback_does_not_slow_or_swallow_the_rest() -> None:
    lines = ["(A pid=1) Traceback (most recent call last):", '(A pid=1)   File "a.py", line 1, in f']
    lines += [f"(B pid=2) {AT} working {i}" for i in range(2000)]
    lines += ["(A pid=1) KeyError: 'much later'"]
    found = [event for event in scan(lines).events if event.kind == "traceback"]
    assert [event.data["exception"] for event in found] == ["", "KeyError"]


def test_repeated_lines_say_so() -> None:
    event = only(scan(f"{TRAINER} {AT} {IMA} [repeated 7x across cluster]"), "ima")
    assert event.repeated == 7


def test_a_recogniser_that_raises_is_told_and_the_log_goes_on() -> None:
    def broken(line: Line) -> dict[str, object]:
        return {"value": int("x")}

    one = LogScan(
        "a.log", Table.of([Recogniser("broken", ("odd",), broken), Recogniser("fine", ("odd",), lambda _: {})])
    )
    one.feed(1, [b"odd", b"odd"])
    sink = Sink()
    one.finish(sink)
    assert [event.kind for event in sink.events] == ["fine", "fine"]
    assert [problem.where.line for problem in sink.problems] == [1]


def test_a_needle_needs_letters() -> None:
    with pytest.raises(ValueError, match="no letters"):
        Table.of([Recogniser("x", ("503",), lambda _: {})])


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    def peak(copies: int) -> int:
        path = tmp_path / f"{copies}.log"
        batch = ENGINE + " [2026-03-02 10:{:02d}:{:02d} TP0] Decode batch. #running-req: {}, token usage: 0.1\n"
        block = "".join(
            batch.format(i // 60 % 60, i % 60, i) + f"{TRAINER} {AT} hash {i * 7919:x} of nothing\n" for i in range(500)
        )
        with path.open("w") as file:
            for _ in range(copies):
                file.write(block)
        tracemalloc.start()
        try:
            read(Source(path, path.name), Sink())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)
    assert peak(24) < 1.25 * peak(6) + (2 << 20)


def test_files_are_merged_by_time_not_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"{ENGINE} [2026-03-02 10:00:09] {IMA}\n")
    (tmp_path / "b.log").write_text(f"{TRAINER} [2026-03-02 10:00:05] {IMA}\n")
    events = [event for event in collect([tmp_path]).events if event.kind == "ima"]
    assert [event.owner for event in events] == ["trainer", "engine"]


def test_a_clock_that_goes_back_does_not_reorder_the_lines_of_a_process(tmp_path: Path) -> None:
    text = f"{ENGINE} [2026-03-02 10:00:09] KeyError: 'first'\n{ENGINE} [2026-03-02 09:00:10] KeyError: 'second'\n"
    (tmp_path / "a.log").write_text(text)
    events = [event for event in collect([tmp_path]).events if event.kind == "traceback"]
    assert [event.data["message"] for event in events] == ["'first'", "'second'"]

"""Toggles that only a bisection has: the memory saver, and the sleeps that it makes possible."""

from __future__ import annotations

import pytest

from rltop.engines.ground import arm as arm_of
from rltop.engines.ground import ground
from rltop.engines.requests import Config
from rltop.engines.trials import Subject
from rltop.errors import RltopError

ARGS = ("--enable-memory-saver", "--tp-size", "1")


def subject(*args: str, **info: object) -> Subject:
    return Subject(
        id="0",
        kind="sglang",
        model_path="/m",
        launcher="local",
        config=Config(args=args),
        version="0.5.23",
        generation=1,
        state="HEALTHY",
        runs=True,
        busy="",
        info=info,
    )


def test_the_memory_saver_is_a_toggle_where_the_engine_has_it() -> None:
    one = subject(*ARGS)
    base = ground(one, ["memory_saver", "radix_cache"])
    assert base.on == {"memory_saver": "on", "radix_cache": "on"}
    alone, both = arm_of(one, base, ["memory_saver"]), arm_of(one, base, ["memory_saver", "radix_cache"])
    assert alone.config is not None
    assert both.config is not None
    assert (alone.on, both.on) == (frozenset({"radix_cache"}), frozenset())
    assert "--enable-memory-saver" in base.config.args
    assert "--enable-memory-saver" not in (*alone.config.args, *both.config.args)
    assert "--disable-radix-cache" in both.config.args
    assert "memory_saver" in ground(one).toggles
    assert "memory_saver" not in ground(subject("--tp-size", "1")).toggles


def test_an_engine_without_it_can_not_sleep() -> None:
    one = subject(*ARGS)
    sleeping = ground(one, ["memory_saver", "resume_order", "radix_cache"], cycle="sleep")
    assert sleeping.together["memory_saver"] == ("resume_order",)
    assert arm_of(one, sleeping, ["memory_saver"]).on == {"radix_cache"}
    updating = ground(one, ["memory_saver", "resume_order"], cycle="sync")
    assert updating.together == {}
    assert arm_of(one, updating, ["memory_saver"]).on == {"resume_order"}


def test_what_the_engine_says_counts_before_its_arguments() -> None:
    with pytest.raises(RltopError, match="memory_saver is off already"):
        ground(subject(*ARGS, enable_memory_saver=False), ["memory_saver"])


def test_what_is_on_and_not_tried_is_said_with_why() -> None:
    one = subject("--tp-size", "1", "--mem-fraction-static", "0.8")
    base = ground(one)
    assert "memory" not in base.toggles
    assert base.left_out["memory"] == "seldom the culprit; it is tried if it is named"
    assert base.left_out.get("custom_all_reduce", "one GPU").startswith("one GPU")
    named = ground(one, ["memory", "radix_cache"]).left_out
    assert set(named.values()) == {"not named: it stays as it is in every arm"}
    assert "cuda_graph" in named
    assert not named.keys() & {"radix_cache", "memory", "chunked_prefill", "launch_blocking"}

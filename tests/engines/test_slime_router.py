"""slime's router over real HTTP (a stand-in for the router): who is taken out, and who may be put back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rltop.engines.slime_router import AGAIN_POLLS, GONE_POLLS, SlimeRouter
from tests.engines.fake_slime_router import FakeSlimeRouter, fake_slime_router

A, B = "http://10.0.0.2:30000", "http://10.0.0.2:30001"
Work = Callable[[FakeSlimeRouter, SlimeRouter], Awaitable[None]]


def against(work: Work) -> list[tuple[str, str]]:
    """Run it against a router in which slime has registered A and somebody else's worker; what was told."""
    told: list[tuple[str, str]] = []

    async def whole(fake: FakeSlimeRouter) -> None:
        router = SlimeRouter(fake.address, lambda level, text: told.append((level, text)))
        try:
            await work(fake, router)
        finally:
            await router.close()

    with fake_slime_router() as fake:
        fake.add({"url": A, "worker_type": "regular"})
        fake.add({"url": "http://10.0.0.9:1", "worker_type": "regular"})
        fake.asked.clear()
        asyncio.run(whole(fake))
    return told


def test_an_engine_is_out_while_it_does_not_serve_and_back_at_the_same_url() -> None:
    async def work(fake: FakeSlimeRouter, router: SlimeRouter) -> None:
        await router.leave(A)
        await router.keep({A: False})
        assert fake.urls() == ["http://10.0.0.9:1"]
        assert router.removed == {A: {"url": A, "worker_type": "regular"}}
        await router.keep({A: True})
        assert A in fake.urls()
        await router.keep({A: True})
        assert not router.removed
        await router.keep({A: True})
        assert fake.asked == [f"DELETE {A}", f"POST {A}"]

    told = [text for _, text in against(work)]
    assert told == [f"{A} is out of slime's router: it is sent nothing more", f"{A} is back in slime's router"]


def test_nothing_is_added_that_slime_had_not_added() -> None:
    """slime's own POST would be refused, and its run would end."""

    async def work(fake: FakeSlimeRouter, router: SlimeRouter) -> None:
        for serves in (True, False, True):
            await router.keep({B: serves})
        await router.leave(B)
        assert fake.asked == []
        assert not router.removed

    assert against(work) == []


def test_a_prefill_worker_comes_back_with_its_bootstrap_port() -> None:
    async def work(fake: FakeSlimeRouter, router: SlimeRouter) -> None:
        fake.add({"url": B, "worker_type": "prefill", "bootstrap_port": 8998})
        await router.keep({B: False})
        await router.keep({B: True})
        back = next(one for one in fake.workers.values() if one["url"] == B)
        assert (back["worker_type"], back["bootstrap_port"]) == ("prefill", 8998)

    against(work)


def test_a_router_that_is_gone_is_not_given_its_workers_back() -> None:
    """The next router at this address is filled by slime anew."""
    told: list[str] = []

    async def whole() -> None:
        with fake_slime_router() as fake:
            fake.add({"url": A, "worker_type": "regular"})
            router = SlimeRouter(fake.address, lambda level, text: told.append(text))
            await router.leave(A)
        for left in range(GONE_POLLS, 0, -1):
            assert A in router.removed, f"{left} more refused connections are a router that only restarts"
            await router.keep({A: True})
        assert router.listed is None
        assert not router.removed
        await router.close()

    asyncio.run(whole())
    assert told[-1].endswith("is gone: a new one is filled by slime itself")


def test_what_the_router_refuses_is_told_once_and_tried_again() -> None:
    async def work(fake: FakeSlimeRouter, router: SlimeRouter) -> None:
        await router.leave(A)
        original = fake.add
        fake.add = lambda entry: False  # type: ignore[method-assign]
        for _ in range(AGAIN_POLLS):
            await router.keep({A: True})
        assert A in router.removed
        fake.add = original  # type: ignore[method-assign]
        await router.keep({A: True})
        await router.keep({A: True})
        assert A in fake.urls()
        assert not router.removed

    told = against(work)
    assert [level for level, _ in told] == ["info", "error", "info"]
    assert f"does not take {A} back" in told[1][1]


def test_a_router_that_answers_nonsense_changes_nothing() -> None:
    async def work(fake: FakeSlimeRouter, router: SlimeRouter) -> None:
        fake.broken = True
        await router.leave(A)
        await router.keep({A: False})
        assert fake.asked == []
        assert router.listed is None

    told = against(work)
    assert [level for level, _ in told] == ["warn"]
    assert "500" in told[0][1]

"""The task: prompts are a function of seed, rollout and position; the reward is exact."""

from __future__ import annotations

import pytest

from rltop.train.task import SortDigits, stream_seed


def test_prompts_are_repeatable_and_differ_between_rollouts_and_seeds() -> None:
    task = SortDigits(7)
    assert task.prompts(3, 8) == task.prompts(3, 8)
    assert task.prompts(3, 8)[:4] == task.prompts(3, 4)
    assert task.prompts(3, 8) != task.prompts(4, 8)
    assert task.prompts(3, 8) != SortDigits(8).prompts(3, 8)


def test_a_prompt_shows_three_different_digits_and_its_label_has_them_in_order() -> None:
    for prompt in SortDigits(1).prompts(0, 200):
        ((role, text),) = prompt.messages
        shown = [int(char) for char in text if char.isdigit()]
        assert role == "user"
        assert len(set(shown)) == 3
        assert prompt.label == " ".join(map(str, sorted(shown)))


def test_every_demonstration_earns_the_reward_of_its_own_prompt() -> None:
    task = SortDigits(1)
    for example in task.demonstrations(50):
        digits = sorted(char for char in example.messages[0][1] if char.isdigit())
        assert task.reward(example.response, " ".join(digits)) == 1.0


@pytest.mark.parametrize(
    "response", ["Sorted: 1 3 8.", "Sorted: 1 3 7", "sorted: 1 3 7.", "Sorted: 1 3 7. ", "Sorted: 137.", "1 3 7", ""]
)
def test_anything_but_the_exact_sentence_earns_nothing(response: str) -> None:
    assert SortDigits(0).reward(response, "1 3 7") == 0.0


def test_digits_are_drawn_evenly() -> None:
    counts = [0] * 10
    for prompt in SortDigits(0).prompts(0, 2000):
        for digit in prompt.label.split():
            counts[int(digit)] += 1
    # 600 expected of each; 5 standard deviations are about 102.
    assert all(abs(count - 600) < 102 for count in counts)


def test_a_stream_seed_fits_int32_and_depends_on_every_part() -> None:
    assert stream_seed(1, "sample", 2, 3) == stream_seed(1, "sample", 2, 3)
    seeds = {stream_seed(a, name, b) for a in range(20) for name in ("sample", "prompt") for b in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)

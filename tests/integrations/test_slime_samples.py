"""slime's samples and arguments as records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rltop.integrations.slime_samples import MOST_CHARS, MOST_TOKENS, arguments, facts, few, plain


def _sample(index: int, **more: Any) -> Any:
    return SimpleNamespace(**{"index": index, "response": "ok", "response_length": 1 + index, **more})


def test_some_of_a_rollout_spread_with_the_shortest_and_the_longest() -> None:
    lengths = [50] * 100
    lengths[41], lengths[67] = 1, 99
    groups = [[_sample(4 * g + i, response_length=lengths[4 * g + i]) for i in range(4)] for g in range(25)]
    chosen, total = few(groups, None, 8)
    assert total == 100
    assert [one["index"] for one in chosen] == [0, 19, 39, 41, 59, 67, 79, 99]
    assert len(few(groups, None, 3)[0]) == 3
    assert few([object(), None], None) == ([], 0)


def test_odd_fields_cost_only_themselves() -> None:
    sample = _sample(
        0,
        prompt=[{"role": "user", "content": "2+2"}, {"content": "?"}],
        response="x" * (MOST_CHARS + 5),
        reward={"acc": 0.5},
        status="truncated",
        tokens=[1],
        rollout_log_probs=[-0.1, -0.2],
        weight_versions=None,
    )
    fields = plain(sample, SimpleNamespace(reward_key="acc"))
    assert fields["prompt"] == "user: 2+2\n: ?"
    assert fields["response"].endswith(" … (5 more characters)")
    assert (fields["reward"], fields["status"]) == (0.5, "truncated")
    assert fields["token_ids"] == [1]
    assert "rollout_log_probs" not in fields
    long = plain(_sample(0, response_length=MOST_TOKENS + 1, tokens=[0] * (MOST_TOKENS + 1)), None)
    assert "token_ids" not in long


def test_arguments_are_plain_and_without_secrets() -> None:
    args = SimpleNamespace(
        lr=1e-6,
        max_tokens_per_gpu=9216,
        reward_key="acc",
        wandb_key="abc",
        hf_token="hf_1",
        train_env_vars={"A": "1", "API_KEY": "x"},
        eval_datasets=[SimpleNamespace(name="aime")],
        _hidden=1,
        betas=(0.9, 0.98),
    )
    assert arguments(args) == {
        "lr": 1e-6,
        "max_tokens_per_gpu": 9216,
        "reward_key": "acc",
        "wandb_key": "***",
        "hf_token": "***",
        "train_env_vars": {"A": "1", "API_KEY": "***"},
        "eval_datasets": ["namespace(name='aime')"],
        "betas": [0.9, 0.98],
    }
    assert arguments(object()) == {}


def test_when_a_run_is_fresh() -> None:
    def fresh(start: int, **args: Any) -> Any:
        return facts(SimpleNamespace(**args), start_rollout_id=start)["fresh_start"]

    assert fresh(0, finetune=True)
    assert not fresh(0, finetune=False)
    assert not fresh(5, finetune=True)
    assert fresh(0)
    assert fresh(0, debug_rollout_only=True, finetune=False)
    assert facts(SimpleNamespace(debug_train_only=True), start_rollout_id=2)["mode"] == "train-only"

"""The tiny checkpoint: loadable by `transformers`, any text, same bits for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltop.errors import RltopError
from rltop.train.tiny_model import (
    IM_END,
    SPECIAL_TOKENS,
    TinyModelConfig,
    byte_tokenizer,
    initial_weights,
    make_tiny_model,
)

pytestmark = pytest.mark.train

SMALL = TinyModelConfig(hidden_size=16, intermediate_size=16, num_layers=1, head_dim=4)
TOKENIZER = byte_tokenizer()


@given(text=st.text().filter(lambda text: not any(token in text for token in SPECIAL_TOKENS)))
def test_any_text_is_its_bytes_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_transformers_loads_model_tokenizer_and_chat_template(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

    directory = make_tiny_model(tmp_path / "tiny", SMALL)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 258
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token_id) == (260, IM_END, 259)
    messages = [{"role": "user", "content": "Sort 3 1 2 → ?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nSort 3 1 2 → ?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_weights_follow_from_the_seed() -> None:
    one, again, other = (initial_weights(TinyModelConfig(seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert 80_000 <= sum(tensor.numel() for tensor in one.values()) <= 200_000


def test_making_it_again_keeps_it(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny", SMALL)
    before = (directory / "model.safetensors").stat().st_ino
    assert make_tiny_model(directory, SMALL) == directory
    assert (directory / "model.safetensors").stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_something_else_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny", SMALL)
    with pytest.raises(RltopError, match="another configuration") as caught:
        make_tiny_model(directory, TinyModelConfig(seed=5))
    assert "seed" in caught.value.why
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({}))
    with pytest.raises(RltopError, match="cannot write the tiny model there"):
        make_tiny_model(foreign, SMALL)
    assert [path.name for path in foreign.iterdir()] == ["config.json"]


def test_shapes_that_cannot_work_are_refused() -> None:
    with pytest.raises(RltopError, match="do not divide into groups"):
        TinyModelConfig(num_heads=4, num_kv_heads=3)
    with pytest.raises(RltopError, match="odd head_dim"):
        TinyModelConfig(head_dim=15)

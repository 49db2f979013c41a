"""The rollout side's tokenizer: the class that transformers would take, without what it imports to find it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.train.chat import Chat
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyModelConfig(hidden_size=16, intermediate_size=16, num_layers=1, head_dim=4)
    return make_tiny_model(tmp_path_factory.mktemp("chat") / "tiny", shape)


def test_a_plain_tokenizer_needs_no_torch(checkpoint: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom rltop.train.chat import Chat\n"
        "print(Chat(Path(sys.argv[1]), use_template=True).prompt((('user', 'hi'),))[0], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, checkpoint], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("<|im_start|>assistant\n False")


def test_it_is_what_transformers_finds(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    chat, found = Chat(checkpoint, use_template=True), AutoTokenizer.from_pretrained(checkpoint)
    assert type(chat._tokenizer) is type(found)
    text, ids = chat.prompt((("user", "Sort (3 1)"),))
    assert text == found.apply_chat_template(
        [{"role": "user", "content": "Sort (3 1)"}], tokenize=False, add_generation_prompt=True
    )
    assert list(ids) == found.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "changes", [{"tokenizer_class": "Qwen2TokenizerFast"}, {"auto_map": {}}, {"tokenizer_class": None}, "broken"]
)
def test_any_other_is_left_to_transformers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object] | str
) -> None:
    class Found:
        eos_token_id = 3

    asked: list[str] = []

    def load(path: str, **_: object) -> Found:
        asked.append(path)
        return Found()

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    text = changes if isinstance(changes, str) else json.dumps(config | changes)
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    Chat(tmp_path, use_template=False)
    assert asked == [str(tmp_path)]


def test_a_broken_one_is_one_message(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes((checkpoint / "tokenizer_config.json").read_bytes())
    with pytest.raises(RltopError, match="tokenizer unreadable"):
        Chat(tmp_path, use_template=False)

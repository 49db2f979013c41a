"""The examples of `docs/reporter.md` as they stand there, against fakes of the shape of TRL, verl and NeMo-RL."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zmq

from rltop.evidence.metric_names import load, parse
from rltop.protocol.codec import decode
from rltop.protocol.messages import Record
from tests.daemon.test_ingest import House, last_values

PAGE = Path(__file__).parents[2] / "docs" / "reporter.md"


def blocks(heading: str) -> list[str]:
    """Indented blocks under a heading of the page."""
    text = PAGE.read_text(encoding="utf-8")
    part = re.split(r"^#+ ", text, flags=re.MULTILINE)
    (section,) = [one for one in part if one.startswith(heading)]
    found = re.findall(r"(?:^(?: {4}.*)?\n)+", section, flags=re.MULTILINE)
    return [textwrap.dedent(block) for block in found if block.strip()]


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A daemon's socket; call it to get the records so far, applied to a house."""
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    address = f"ipc://{tmp_path}/in.sock"
    pull.bind(address)
    monkeypatch.setenv("RLTOP_INGEST", address)
    house = House()
    kinds: list[str] = []

    def take(until: str = "bye") -> tuple[House, list[str]]:
        while not kinds or kinds[-1] != until:
            assert pull.poll(10_000), f"no {until} came, only {kinds}"
            record = decode(pull.recv_multipart()).body
            assert isinstance(record, Record)
            kinds.append(record.kind)
            house.ingest.take(record)
        return house, kinds

    yield take
    context.destroy(linger=0)


def test_the_first_example(sent: Any) -> None:
    names: dict[str, Any] = {"args": SimpleNamespace(lr=1e-6)}
    exec(blocks("Any trainer")[0], names)
    house, kinds = sent()
    assert kinds == ["run", "phase", "phase", "metrics", "samples", "weights", "bye"]
    assert names["report"].errors == 0
    assert house.state("run")["args"] == {"lr": 1e-6}
    assert last_values(house, "train/grad_norm")[0] == pytest.approx((3.0, 0.2))


def test_trl(sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers")
    module.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    names: dict[str, Any] = {}
    exec(blocks("TRL")[0], names)
    callback = names["RltopCallback"]()
    args = SimpleNamespace(process_index=0, to_dict=lambda: {"learning_rate": 1e-6})
    state = SimpleNamespace(global_step=0)
    callback.on_train_begin(args, state, None, model=object())
    for state.global_step in (1, 2):
        logs = {"loss": 0.1, "reward": 0.5, "completions/clipped_ratio": 0.0, "kl": 0.0, "text": "x", "epoch": 0.1}
        callback.on_log(args, state, None, logs=logs, model=object())
    callback.on_train_end(args, state, None)
    house, kinds = sent()
    assert kinds == ["run", "metrics", "metrics", "bye"]
    assert house.state("run")["framework"] == "trl"
    assert last_values(house, "rollout/raw_reward") == [(1.0, 0.5), (2.0, 0.5)]
    assert house.state("metric/train/loss")["reported"] == "loss"


def test_verl_and_nemo_rl(sent: Any) -> None:
    names: dict[str, Any] = {}
    for block in blocks("verl, NeMo-RL"):
        exec(block, names)
    backends = {"rltop": names["RltopTracking"](config={"actor": {"lr": 1e-6}})}
    for step in (1, 2):
        for backend in backends.values():  # as verl's Tracking does
            backend.log(data={"actor/grad_norm": 0.5, "critic/score/mean": 0.25, "timing_s/gen": 3.0}, step=step)
    backends["rltop"].finish()
    house, kinds = sent()
    assert kinds == ["run", "metrics", "metrics", "bye"]
    assert last_values(house, "train/grad_norm") == [(1.0, 0.5), (2.0, 0.5)]
    assert last_values(house, "perf/rollout_time")[-1] == (2.0, 3.0)


def test_nemo_rl(sent: Any) -> None:
    names: dict[str, Any] = {}
    for block in blocks("verl, NeMo-RL"):
        exec(block, names)
    logger = names["RltopLogger"]()
    logger.log_hyperparams({"policy": {"lr": 1e-6}})
    logger.log_metrics({"loss": 0.1, "reward": 0.75, "table": [1, 2]}, 1, prefix="train", step_finished=True)
    logger.log_metrics({"total_step_time": 9.0}, 1, prefix="timing/train")
    logger.finish()
    house, kinds = sent()
    assert [kind for kind in kinds if kind != "log"] == ["run", "metrics", "metrics", "bye"]
    assert last_values(house, "rollout/raw_reward") == [(1.0, 0.75)]
    assert last_values(house, "perf/step_time") == [(1.0, 9.0)]
    assert last_values(house, "train/loss")[0] == pytest.approx((1.0, 0.1))


def test_the_table_of_the_page_is_one(tmp_path: Path) -> None:
    (block,) = blocks("Names")
    path = tmp_path / "metric_names.toml"
    path.write_text(block, encoding="utf-8")
    assert len(parse(block, where="page")[0].rows) == 6
    view = load(path).of("verl")
    assert view.find("actor/entropy") is None
    assert view.find("my_eval/a/b").ours == "eval/a/b"  # type: ignore[union-attr]
    assert view.find("timing/sync_ms").scale == 0.001  # type: ignore[union-attr]

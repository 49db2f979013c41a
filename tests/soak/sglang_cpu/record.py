"""Records real SGLang's answers for the contract test: `python -m tests.soak.sglang_cpu.record [ROOT]`.

Writes `tests/data/sglang/answers_0.5.23_cpu.json` and the metrics beside it, and prints the log's distinct line shapes.
Run it again when the calls, the tiny model or the SGLang version change.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from rltop.engines.launch import launch_engine
from tests.engines.contract import ask, contract_model, log_shape
from tests.soak.sglang_cpu import sglang_cpu_environment

DATA = Path(__file__).parents[2] / "data" / "sglang"

SERVER_INFO_KEYS = [
    *("model_path", "tokenizer_path", "served_model_name", "host", "port", "context_length", "max_total_tokens"),
    *("max_running_requests", "random_seed", "weight_version", "decode_log_interval", "log_level", "dtype", "device"),
    *("disable_radix_cache", "enable_metrics", "enable_memory_saver", "enable_deterministic_inference"),
    *("skip_server_warmup", "tp_size", "dp_size", "pp_size", "status", "startup_time", "version"),
    *("max_total_num_tokens", "max_req_input_len", "internal_states"),
]
"""Of several hundred: the rest are settings that the CPU engine does not have."""


def main(root: Path) -> None:
    """Start, ask, write, stop."""
    environment = sglang_cpu_environment(root)
    with tempfile.TemporaryDirectory() as scratch:
        model = contract_model(Path(scratch))
        engine = launch_engine(environment.spec(model, Path(scratch) / "engine", run="record", engine_id="sglang"))
        try:
            with httpx.Client(base_url=engine.url, timeout=120) as http:
                answers = ask(http, model)
                metrics = http.get("/metrics").text.replace(str(model), "<model>")
        finally:
            engine.stop()
        log = engine.log.read_text(errors="replace")
    trim(answers)
    (DATA / "answers_0.5.23_cpu.json").write_text(json.dumps(answers, indent=1) + "\n")
    left_out = re.compile(r"# HELP|.*_bucket\{|.*routing_key")
    kept = [line for line in metrics.splitlines() if not left_out.match(line)]
    (DATA / "metrics_0.5.23_cpu.prom").write_text("\n".join(kept) + "\n")
    for shape in sorted({log_shape(line) for line in log.splitlines() if re.match(r"\[\d{4}-", line)}):
        print(shape)


def trim(answers: dict[str, dict[str, Any]]) -> None:
    """Leave out what the contract does not compare: settings, and the stack traces in refusals."""
    info = answers["/server_info"]["content"]
    info = {key: info[key] for key in SERVER_INFO_KEYS if key in info}
    state = info["internal_states"][0]
    info["internal_states"] = [
        {key: state[key] for key in ("last_gen_throughput", "memory_usage", "effective_max_running_requests_per_dp")}
    ]
    answers["/server_info"]["content"] = info
    for answer in answers.values():
        content = answer["content"]
        if isinstance(content, dict) and isinstance(content.get("message"), str):
            content["message"] = content["message"].splitlines()[0][:200]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())

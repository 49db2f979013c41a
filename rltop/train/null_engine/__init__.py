"""rltop's null engine: a stand-in for SGLang that computes nothing, starts in half a second and dies like the others.

For rehearsals of whatever stands around engines (fleets, bisections): SGLang's HTTP API, arguments, log lines and ends
are the CPU engine's own modules, with its faults; the tokens are the numbers of their places. No torch. It is not
SGLang and says so where the CPU engine does.

    python -m rltop.train.null_engine --model-path DIR --port 0 --port-file FILE
"""

MARKER = "rltop null engine, a stand-in for SGLang"
"""Carried by `/server_info`, `/model_info` and the first log line."""

STEP_VARIABLE = "RLTOP_NULL_ENGINE_STEP_S"
"""Environment variable: seconds per decode batch."""
STEP_S = 0.02

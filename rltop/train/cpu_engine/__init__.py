"""rltop's own CPU engine: a stand-in for SGLang that a laptop can run.

A separate server process that samples from a small Qwen3-architecture checkpoint with plain torch and speaks SGLang's
HTTP API, with SGLang's argument names and log lines, so that the trainer, the dashboard and the toggles are exercised
without a GPU. It is not SGLang and says so: in its first log line, in `/server_info` and in `/model_info`.

    python -m rltop.train.cpu_engine --model-path DIR --port 0 --port-file FILE

Layers, each importing only those before it: effects, imitation, faults, args (SGLang's arguments, what they visibly do,
and faults for rehearsals), checkpoint (files), text (tokenizer), sampling (draws) -> model (forward pass) -> request
(one sample's state) -> prompts, logprobs, injection (faults at work), profile -> scheduler (the loop) -> generate,
engine, answers -> control, server (endpoints) -> process (tree, signals, ends; `scheduler_child.py` is the other half)
-> start -> __main__.
"""

MARKER = "rltop CPU engine, a stand-in for SGLang"
"""Carried by `/server_info`, `/model_info` and the first log line, so that nobody takes it for SGLang."""

SPOKEN_API = "0.5.23"
"""The SGLang version that this engine imitates unless told otherwise."""

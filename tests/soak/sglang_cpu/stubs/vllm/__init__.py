"""Stands in for vllm, of which SGLang's CPU path imports three operators."""

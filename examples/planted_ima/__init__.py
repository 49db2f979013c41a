"""A model package for SGLang with a planted illegal memory access: what `rltop bisect` is tried on with a real GPU.

    SGLANG_EXTERNAL_MODEL_PACKAGE=planted_ima PYTHONPATH=examples RLTOP_PLANTED_IMA=padding:4000 \\
        python -m sglang.launch_server --model-path MODEL …      # architectures: ["PlantedQwen3ForCausalLM"]

Never put it near a run that matters: an engine with it dies. Without `RLTOP_PLANTED_IMA` the model is SGLang's Qwen3.
"""

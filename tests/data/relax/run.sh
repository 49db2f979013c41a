#!/bin/bash
# In the manner of Relax's scripts/training/*.sh: flags are Relax's, values are made up (see make.py).
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
EXP_DIR="${EXP_DIR:-/exps}"
MODEL_DIR="${MODEL_DIR:-/models}"
NUM_ROLLOUT="${NUM_ROLLOUT:=200}"

CKPT_ARGS=(
   --hf-checkpoint ${MODEL_DIR}/Qwen3-4B/
   --ref-load ${MODEL_DIR}/Qwen3-4B/
   --megatron-to-hf-mode bridge
   --load ${EXP_DIR}/Qwen3-4B_mcore_8xgpu/
   --save ${EXP_DIR}/Qwen3-4B_mcore_8xgpu/
   --save-interval 100
)
ROLLOUT_ARGS=(
   --prompt-data ${EXP_DIR}/dapo.jsonl
   --rm-type dapo
   --reward-key score
   --num-rollout ${NUM_ROLLOUT}
   --rollout-batch-size 4
   --n-samples-per-prompt 4
   --global-batch-size 8
   --rollout-max-response-len 8192
   --use-fault-tolerance
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --use-tis
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --use-dynamic-batch-size
   --max-tokens-per-gpu 10240
)
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --attention-backend flash
   --dump-details ${EXP_DIR}/dumps
   --use-metrics-service
   --tb-experiment-name qwen3-4b
)
export RUNTIME_ENV_JSON="{
\"worker_process_setup_hook\": \"relax.utils.logging_utils.install_asyncio_noise_filter\",
\"env_vars\": {
   \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
   \"RAY_OVERRIDE_JOB_RUNTIME_ENV\": \"1\"
}
}"
ray job submit ${RAY_NO_WAIT:+--no-wait} --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 -m relax.entrypoints.train \
   --resource '{"actor": [1, 8], "rollout": [1, 8]}' \
   --max-staleness 0 \
   --colocate \
   --use-health-check \
   "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${PERF_ARGS[@]}" "${MISC_ARGS[@]}" 2>&1 | tee log/run.log

"""What the processes of a bench share: other systems' Python, imported once, before anything uses the GPU."""

from importlib import import_module
from importlib.util import find_spec

NAMES = (
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.fused_moe.fused_marlin_moe",
    "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4",
    "vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe",
    "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe",
)

for name in NAMES if find_spec("vllm") else ():
    try:
        import_module(name)
    except Exception as raised:  # a peer that is not complete here says so again when it is made
        print(f"{name}: {type(raised).__name__}: {str(raised)[:300]!r}", flush=True)

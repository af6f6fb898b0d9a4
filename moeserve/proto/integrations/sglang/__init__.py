"""The SGLang plug-in: SGLang keeps attention and routers, and asks moeserve for its experts.

    MOESERVE_EXPERTS=127.0.0.1:50051 python -m sglang.launch_server --model-path MODEL --device cpu

SGLang finds it by the entry point `sglang.srt.plugins`. `plugin` is the entry point, `experts` computes,
`weights` keeps experts' tensors in their files, `model` refuses what cannot be served and checks that every
MoE layer was taken over, and `contracts` says which names of SGLang all of it rests on.
"""

"""The vLLM plug-in: vLLM keeps attention and routers, and asks moeserve for its experts.

    MOESERVE_EXPERTS=127.0.0.1:50051 vllm serve MODEL

vLLM finds it by the entry point `vllm.general_plugins`. A file a seam: `plugin` is the entry point, `config`
refuses what cannot be served, `experts` computes, `op` is what compiled graphs see, `weights` keeps experts'
tensors in their files, `model` checks that every MoE layer was taken over, `caches` deals with reloads, and
`contracts` says which names of vLLM all of it rests on.
"""

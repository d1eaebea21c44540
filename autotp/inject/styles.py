"""The styles a module can have in a plan, in transformers' words, by what they do."""

COLUMN_STYLES = ("colwise", "packed_colwise", "colwise_gather_output", "colwise_rep")
ROW_STYLES = ("rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep")
GATHERING_STYLES = ("colwise_gather_output", "colwise_rep")
SPLITTING_STYLES = ("rowwise_split_input", "rowwise_rep")
EMBEDDING_STYLES = ("embedding_rowwise", "embedding_colwise")
# Only in plans that say themselves who reduces and who enters, not in a caller's dict.
PARTIAL_STYLES = ("rowwise_partial",)
CALLED_STYLES = COLUMN_STYLES + ROW_STYLES + EMBEDDING_STYLES + PARTIAL_STYLES  # of modules that compute by themselves
ATTENTION_STYLES = ("multihead_attention",)  # nn.MultiheadAttention with its out_proj: a rule of its own
SUM_STYLES = ("replicated_with_grad_allreduce",)
MISC_STYLES = ("mla_kv_a_proj", "local_params", "replicate", "whole")
NOT_BUILT_STYLES = {
    "sequence_parallel": "whole; its tokens are dealt if sequence_parallel= asks for it",
    "moe_tp_experts": "stacked experts are not split yet",
    "moe_identity_expert": "stacked experts are not split yet",
    "grouped_gemm": "expert parallelism is not built",
    "ep_dispatch_experts": "expert parallelism is not built",
    "ep_router": "expert parallelism is not built",
    "gather": "expert parallelism is not built",
    "all_reduce": "reducing a module's output is not built yet",
}
STYLES = COLUMN_STYLES + ROW_STYLES + EMBEDDING_STYLES + SUM_STYLES + MISC_STYLES + tuple(NOT_BUILT_STYLES)

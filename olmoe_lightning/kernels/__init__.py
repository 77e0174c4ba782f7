"""The only place that chooses how a product or a permutation is computed: C++, CUDA libraries or PyTorch."""

from olmoe_lightning.kernels.attention import causal_attention, visibility_mask
from olmoe_lightning.kernels.autocast import cast_operands, no_autocast
from olmoe_lightning.kernels.choice import reference_kernels
from olmoe_lightning.kernels.cross_entropy import cross_entropy_rows_
from olmoe_lightning.kernels.expert_mlp import expert_mlp
from olmoe_lightning.kernels.grouped_mm import grouped_mm
from olmoe_lightning.kernels.memory.allocator import keep_freed_memory
from olmoe_lightning.kernels.norm import HeadLayout, prepare_qkv, rms_norm
from olmoe_lightning.kernels.permute import combine_rows, dispatch_rows, plan_permutation
from olmoe_lightning.kernels.router_rows import RouterRows, router_rows
from olmoe_lightning.kernels.routes import Permutation
from olmoe_lightning.kernels.swiglu import swiglu
from olmoe_lightning.kernels.top_k import top_k_stable
from olmoe_lightning.kernels.transport import Dispatched, LocalTransport, Transport

__all__ = [
    "Dispatched",
    "HeadLayout",
    "LocalTransport",
    "Permutation",
    "RouterRows",
    "Transport",
    "cast_operands",
    "causal_attention",
    "combine_rows",
    "cross_entropy_rows_",
    "dispatch_rows",
    "expert_mlp",
    "grouped_mm",
    "keep_freed_memory",
    "no_autocast",
    "plan_permutation",
    "prepare_qkv",
    "reference_kernels",
    "rms_norm",
    "router_rows",
    "swiglu",
    "top_k_stable",
    "visibility_mask",
]

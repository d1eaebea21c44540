"""autotp: make an existing Hugging Face model tensor-parallel with one call."""

from .checkpoint.save import save_pretrained
from .checkpoint.state import TrainingState
from .comm import TPGroup
from .errors import AutoTPError, CheckpointError, GatherError, KernelUnsupported, PlanError, ProofError
from .generation.engine import release
from .generation.warm import warm_up
from .inject.module_plan import ModulePlan
from .inject.plan import Plan, Region
from .inject.quantise import dequantize, quantize
from .inject.rewrite import from_pretrained, parallelize, unshard
from .inject.rules import make_plan
from .kernels.fp8 import Recipe
from .kernels.product import linear_with_residual
from .layers.base import TensorParallel_Layer
from .layers.cross_entropy import vocab_parallel_cross_entropy
from .layers.fp8 import fp8_report
from .layers.gather import GatherReplacedLayerParams
from .layers.integrations import install_on_cpus
from .layers.linear import LinearAllreduce, LinearLayer
from .layers.linear_by_size import Linear
from .layers.main_grad import enable_main_grad
from .layers.norm_linear import LayerNormLinear
from .layers.overlap import explain_overlap
from .layers.profile import profile_names
from .layers.stream import full_state_dict, load_full_state_dict
from .shard import Shard
from .train import DataSampler, clip_grad_norm_, verify
from .version import __version__

__all__ = [
    "AutoTPError",
    "CheckpointError",
    "DataSampler",
    "GatherError",
    "GatherReplacedLayerParams",
    "KernelUnsupported",
    "LayerNormLinear",
    "Linear",
    "LinearAllreduce",
    "LinearLayer",
    "ModulePlan",
    "Plan",
    "PlanError",
    "ProofError",
    "Recipe",
    "Region",
    "Shard",
    "TPGroup",
    "TensorParallel_Layer",
    "TrainingState",
    "__version__",
    "clip_grad_norm_",
    "dequantize",
    "enable_main_grad",
    "explain_overlap",
    "fp8_report",
    "from_pretrained",
    "full_state_dict",
    "linear_with_residual",
    "load_full_state_dict",
    "make_plan",
    "parallelize",
    "profile_names",
    "quantize",
    "release",
    "save_pretrained",
    "unshard",
    "verify",
    "vocab_parallel_cross_entropy",
    "warm_up",
]

install_on_cpus()

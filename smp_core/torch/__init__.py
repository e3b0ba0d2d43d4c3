"""The namespace that a PyTorch script imports: ``import smp_core.torch as smp`` (API 1)."""

from smp_core.comm import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    recv_from,
    send,
    size,
    tp_rank,
    tp_size,
)
from smp_core.runtime import init, is_initialized, shutdown
from smp_core.torch import amp, exceptions, nn, optimizers, patches, utils
from smp_core.torch.checkpoint import load, resume_from_checkpoint, save, save_checkpoint
from smp_core.torch.checkpoint.trust import trust_checkpoints
from smp_core.torch.memory.activations import set_activation_checkpointing
from smp_core.torch.model import DistributedModel
from smp_core.torch.optimizer import DistributedOptimizer
from smp_core.torch.parameters.registration import register_parameter
from smp_core.torch.partitioning import (
    delay_param_initialization,
    is_tracing,
    model_creation,
    num_microbatches,
    partition,
    set_partition,
)
from smp_core.torch.state_mod import core, state
from smp_core.torch.step import StepOutput, step
from smp_core.torch.tensor_parallel.registry import tp_register, tp_register_with_module
from smp_core.torch.tensor_parallel.wishes import set_tensor_parallelism, tensor_parallelism
from smp_core.torch.utils import hvd_average_grads

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "core",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "exceptions",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "hvd_average_grads",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "num_microbatches",
    "optimizers",
    "partition",
    "patches",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_parameter",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "state",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
    "trust_checkpoints",
    "utils",
]

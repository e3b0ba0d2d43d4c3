"""GPT-2 of Hugging Face, trained with the SageMaker model parallel library: a script written for GPUs (README.md)."""

import argparse
import json
import os

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from gpt2_data import Tokens, gpt2_config, weight_decay_groups
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed,
)
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed


@smp.step
def train_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def parse_args():
    parser = argparse.ArgumentParser()
    model = parser.add_argument_group("model")
    model.add_argument("--vocab_size", type=int, default=128)
    model.add_argument("--max_context_width", type=int, default=16)
    model.add_argument("--hidden_width", type=int, default=32)
    model.add_argument("--num_layers", type=int, default=4)
    model.add_argument("--num_heads", type=int, default=4)

    smp_grp = parser.add_argument_group("smp")
    smp_grp.add_argument("--pipeline_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--tensor_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    smp_grp.add_argument("--sdp_param_persistence_threshold", type=int, default=100)
    smp_grp.add_argument("--microbatches", type=int, default=1)
    smp_grp.add_argument("--active_microbatches", type=int, default=None)
    smp_grp.add_argument("--placement_strategy", default="cluster")
    smp_grp.add_argument("--optimize", default="speed")
    smp_grp.add_argument("--prescaled_batch", type=int, default=0)
    smp_grp.add_argument("--manual_partition", type=int, default=0)
    smp_grp.add_argument("--activation_checkpointing", type=int, default=1)
    smp_grp.add_argument("--fp16", type=int, default=0)
    smp_grp.add_argument("--former_style", type=int, default=0, help="as before SMP 1.10")
    smp_grp.add_argument("--new_weights", type=int, default=0, help="those of smp.nn's modules")
    smp_grp.add_argument("--bf16", type=int, default=0)

    train = parser.add_argument_group("training")
    train.add_argument("--train_batch_size", type=int, default=4, help="of each replica")
    train.add_argument("--max_steps", type=int, default=6)
    train.add_argument("--lr", type=float, default=1e-2)
    train.add_argument("--weight_decay", type=float, default=0.01)
    train.add_argument("--grad_clip", type=float, default=1.0)
    train.add_argument("--seed", type=int, default=12345)
    train.add_argument("--logging_freq", type=int, default=1)

    io = parser.add_argument_group("io")
    io.add_argument("--checkpoint_dir", default="")
    io.add_argument("--checkpoint_freq", type=int, default=3)
    io.add_argument("--num_kept_checkpoints", type=int, default=5)
    io.add_argument("--load_partial", type=int, default=0)
    io.add_argument("--save_final_full_model", type=int, default=0)
    io.add_argument("--losses", default="", help="a JSON file to write the losses to")
    io.add_argument("--mp_parameters", default="", help="given by SageMaker's launcher")
    return parser.parse_args()


class FP16_Optimizer:
    """As scripts brought one along before SMP had fp16 itself."""

    def __init__(self, init_optimizer):
        self.optimizer = init_optimizer


def batch_of_pipeline(batch, device):
    """The batch of this rank's pipeline: its first rank has read it, and sends it to the others."""
    if smp.pp_rank() == 0:
        if smp.pp_size() > 1:
            smp.broadcast(batch, smp.PP_GROUP)
    else:
        batch = smp.recv_from(0, smp.RankType.PP_RANK)
    input_ids, attention_mask = batch
    return input_ids.to(device, non_blocking=True), attention_mask.to(device, non_blocking=True)


def memory_status(msg):
    gib = torch.cuda.max_memory_allocated(torch.cuda.current_device()) / 2**30
    print(f"rank {smp.rank()} {msg}: at most {gib:.2f} GiB allocated", flush=True)


def train(args, model, optimizer, lr_scheduler, device, losses):
    num_replicas, replica = smp.dp_size(), smp.dp_rank()
    group = smp.get_dp_process_group()
    if args.prescaled_batch:
        num_replicas, replica = smp.rdp_size(), smp.rdp_rank()
        group = smp.get_rdp_process_group()
    dataset = Tokens(args.vocab_size, args.max_context_width, args.seed)
    sampler = DistributedSampler(dataset, num_replicas, replica, seed=args.seed, drop_last=True)
    loader = DataLoader(
        dataset,
        args.train_batch_size,
        sampler=sampler,
        num_workers=0,
        pin_memory=True,
        drop_last=True,
    )
    model.train()
    for step, batch in enumerate(loader):
        if step < len(losses):
            continue
        if step >= args.max_steps:
            break
        input_ids, attention_mask = batch_of_pipeline(batch, device)
        optimizer.zero_grad(set_to_none=True)
        loss_mb = train_step(model, input_ids, attention_mask)
        if args.fp16 and args.sharded_data_parallel_degree == 1:
            optimizer.clip_master_grads(args.grad_clip)
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            lr_scheduler.step()
        loss = loss_mb.reduce_mean().float()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item() / num_replicas)
        if smp.rank() == 0 and step % args.logging_freq == 0:
            scale = f", loss scale {optimizer.loss_scale}" if args.fp16 else ""
            print(f"Batch {step} Loss: {losses[-1]:.6f}{scale}", flush=True)
        if args.checkpoint_dir and (step + 1) % args.checkpoint_freq == 0:
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{step + 1}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={
                    "cli_args": args.__dict__,
                    "losses": losses,
                    "lr_scheduler": lr_scheduler.state_dict(),
                },
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )


def main():
    args = parse_args()
    smp_config = {
        "ddp": True,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "microbatches": args.microbatches,
        "placement_strategy": args.placement_strategy,
        "optimize": args.optimize,
        "prescaled_batch": args.prescaled_batch > 0,
        "auto_partition": args.manual_partition == 0,
        "default_partition": 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "sdp_param_persistence_threshold": args.sdp_param_persistence_threshold,
        "sdp_gradient_clipping": args.grad_clip,
    }
    if args.active_microbatches is not None:
        smp_config["active_microbatches"] = args.active_microbatches
    smp.init(smp_config)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    set_seed(args.seed)

    dtype = torch.get_default_dtype()
    if args.fp16 or args.bf16:
        dtype = torch.float16 if args.fp16 else torch.bfloat16
    tensor_parallelism = smp.tp_size() > 1 or args.new_weights > 0
    if args.new_weights:
        # The distributed modules override the weights of the model, which starts faster without.
        PreTrainedModel.init_weights = lambda self: None
    with smp.model_creation(
        tensor_parallelism=tensor_parallelism,
        dtype=dtype,
        attention_in_fp32=False,
        query_key_layer_scaling=False,
        fused_softmax=True,
        fused_bias_gelu=True,
    ):
        model = AutoModelForCausalLM.from_config(gpt2_config(args))
    translate_from = None
    if tensor_parallelism and not args.new_weights:
        # The distributed model draws weights of its own: give it those of the model.
        translate_from = {name: value.clone() for name, value in model.state_dict().items()}
        if args.former_style:
            translate_from = translate_hf_state_dict_to_smdistributed(translate_from)
    model = smp.DistributedModel(model, trace_device="gpu")
    if translate_from is not None:
        model.load_state_dict(translate_from)

    m = model.module.module if args.former_style else model.get_module()
    if tensor_parallelism:
        layers = m.transformer.seq_layers
        if args.activation_checkpointing:
            smp.set_activation_checkpointing(
                layers,
                **({"pack_args_as_tuple": True} if args.former_style else {}),
                strategy="each",
            )
    else:
        layers = m.transformer.h
        if args.activation_checkpointing:
            for layer in layers.children():
                smp.set_activation_checkpointing(layer)
    if args.manual_partition:
        for index, layer in enumerate(layers.children()):
            smp.set_partition(layer, index * smp.pp_size() // args.num_layers)

    optimizer = torch.optim.AdamW(
        weight_decay_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95)
    )
    if args.former_style and args.fp16:
        optimizer = FP16_Optimizer(optimizer)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={
            "init_scale": 2**12,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 2,
        },
    )
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer.optimizer if args.fp16 else optimizer, lambda step: 0.9**step
    )

    def after_partition(model, optimizer):
        count = sum(parameter.numel() for parameter in model.local_parameters())
        print(f"pp rank {smp.pp_rank()} of {smp.pp_size()}: {count} parameters", flush=True)

    model.register_post_partition_hook(after_partition)
    model.register_post_step_hook(lambda model, optimizer: memory_status("after the first step"))

    losses = []
    if args.load_partial:
        user_content = smp.resume_from_checkpoint(args.checkpoint_dir, partial=True)
        losses = user_content["losses"]
        lr_scheduler.load_state_dict(user_content["lr_scheduler"])
        if smp.rank() == 0:
            print(f"resumed after {len(losses)} steps")
    train(args, model, optimizer, lr_scheduler, device, losses)

    if args.save_final_full_model:
        smp.save_checkpoint(
            args.checkpoint_dir,
            tag="fullmodel.pt",
            partial=False,
            model=model,
            user_content={"cli_args": args.__dict__},
        )
    smp.barrier()
    if smp.rank() == 0:
        if args.losses:
            os.makedirs(os.path.dirname(os.path.abspath(args.losses)), exist_ok=True)
            with open(args.losses, "w") as file:
                json.dump(losses, file)
        print("SMP training finished successfully")


if __name__ == "__main__":
    main()

"""GPT-2, trained by Hugging Face's Trainer in a version that knows SMP: a script written for GPUs (README.md)."""

import json
from dataclasses import dataclass, field

import smdistributed.modelparallel.torch as smp
import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    vocab_size: int = 64
    context: int = 16
    width: int = 32
    layers: int = 4
    dropout: float = 0.1
    losses: str = field(default="", metadata={"help": "a JSON file to write the losses to"})


class Lines(Dataset):
    """Synthetic lines: each token is the sum of the two before it and of a third number, which is the line's own."""

    def __init__(self, args, seed, count=128):
        generator = torch.Generator().manual_seed(seed)
        first, second, own = torch.randint(1, args.vocab_size, (3, count), generator=generator)
        tokens = [first, second]
        while len(tokens) < args.context:
            tokens.append((tokens[-1] + tokens[-2] + own) % args.vocab_size)
        self.lines = torch.stack(tokens, 1)

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return {"input_ids": self.lines[index], "labels": self.lines[index]}


class ReplicaTrainer(Trainer):
    """Gives each replica its own batches, which Accelerate, told of one process, does not; keeps the loss of each step,
    which the log rounds.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = []

    def _get_train_sampler(self):
        return DistributedSampler(
            self.train_dataset, smp.dp_size(), smp.dp_rank(), seed=self.args.seed
        )

    def training_step(self, model, inputs):
        loss = super().training_step(model, inputs)
        self.losses.append(loss.item())
        return loss


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=model_args.vocab_size,
        n_positions=model_args.context,
        n_embd=model_args.width,
        n_layer=model_args.layers,
        n_head=4,
        resid_pdrop=model_args.dropout,
        embd_pdrop=model_args.dropout,
        attn_pdrop=model_args.dropout,
        initializer_range=0.2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = ReplicaTrainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=Lines(model_args, seed=1),
        eval_dataset=Lines(model_args, seed=2, count=32),
        data_collator=default_data_collator,
    )
    checkpoint = training_args.resume_from_checkpoint
    if checkpoint == "last":
        checkpoint = get_last_checkpoint(training_args.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    if training_args.do_eval:
        trainer.log_metrics("eval", trainer.evaluate())
    if model_args.losses and trainer.is_world_process_zero():
        with open(model_args.losses, "w") as file:
            json.dump(trainer.losses, file)


if __name__ == "__main__":
    main()

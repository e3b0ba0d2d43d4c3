"""The configuration, the data and the optimizer's groups of gpt2.py."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config


def gpt2_config(args):
    return GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


class Tokens(Dataset):
    """Synthetic lines: each token is the sum of the two before it and of a third number, which is the line's own."""

    def __init__(self, vocab_size, width, seed, count=256):
        generator = torch.Generator().manual_seed(seed)
        first, second, own = torch.randint(1, vocab_size, (3, count), generator=generator)
        tokens = [first, second]
        while len(tokens) < width:
            tokens.append((tokens[-1] + tokens[-2] + own) % vocab_size)
        self.input_ids = torch.stack(tokens, 1)

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, index):
        input_ids = self.input_ids[index]
        return input_ids, torch.ones_like(input_ids)


def weight_decay_groups(model, weight_decay):
    """Two groups of parameters: biases and the weights of layer normalisation do not decay."""
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        (rest if name.endswith("bias") or "ln" in name or "layernorm" in name else decay).append(
            parameter
        )
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]

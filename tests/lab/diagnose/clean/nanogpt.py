"""After karpathy/nanoGPT, train.py: no DataLoader, ranks draw their own batches, accumulation by DDP's switch.

As there: the seed is 1337 and the rank, batches come from random places of one file, the switch is set before forward,
the next batch is drawn between forward and backward, a scaler, clipping, a cosine rate with warm-up, and an evaluation
by rank 0 alone. Cut: a transformer of one layer with dropout, and text that is made here.
"""

import math
import os

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

gradient_accumulation_steps, batch_size, block_size, grad_clip = 6, 4, 16, 1.0
learning_rate, warmup_iters, max_iters, eval_interval = 6e-3, 2, 12, 4


class GPT(nn.Module):
    def __init__(self, vocab_size=64, width=32, dropout=0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, inputs, targets):
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.block(self.tokens(inputs) + self.places(torch.arange(length)), mask, is_causal=True)
        logits = self.head(self.norm(hidden))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("gloo")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % ranks == 0
    gradient_accumulation_steps //= ranks
else:
    rank = 0
torch.manual_seed(1337 + rank)
data = np.random.default_rng(0).integers(64, size=2000).astype(np.uint16)


def get_batch():
    places = torch.randint(len(data) - block_size, (batch_size,))
    inputs = torch.stack([torch.from_numpy(data[at : at + block_size].astype(np.int64)) for at in places])
    targets = torch.stack([torch.from_numpy(data[at + 1 : at + 1 + block_size].astype(np.int64)) for at in places])
    return inputs, targets


model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
decayed = [each for each in model.parameters() if each.dim() >= 2]
plain = [each for each in model.parameters() if each.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DistributedDataParallel(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.tensor([model(*get_batch())[1].item() for _ in range(3)])
    model.train()
    return losses.mean()


def get_lr(step):
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup_iters) / (max_iters - warmup_iters)))


inputs, targets = get_batch()
for step in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    if step % eval_interval == 0 and rank == 0:
        print(f"step {step}: loss {estimate_loss():.4f}")
        torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(inputs, targets)
        loss = loss / gradient_accumulation_steps
        inputs, targets = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()

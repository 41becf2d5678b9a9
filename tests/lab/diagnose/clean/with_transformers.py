"""After transformers' examples/pytorch/language-modeling/run_clm.py: a causal language model and the Trainer.

As there: the Trainer makes loaders, optimizer, schedule and evaluation, accumulates, clips, and divides the loss by the
tokens of the whole step. Cut: a GPT-2 of one layer from its configuration, and texts of random tokens, padded to unlike
lengths, whose padding counts for nothing.
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(Dataset):
    def __init__(self, count):
        draws = torch.Generator().manual_seed(count)
        self.tokens = torch.randint(64, (count, 16), generator=draws)
        self.lengths = torch.randint(6, 16, (count,), generator=draws)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens, length = self.tokens[index], int(self.lengths[index])
        mask = (torch.arange(16) < length).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


set_seed(42)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    **{"output_dir": "out", "use_cpu": True, "num_train_epochs": 3, "per_device_train_batch_size": 4},
    **{"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "warmup_steps": 2, "lr_scheduler_type": "cosine"},
    **{"eval_strategy": "epoch", "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 42},
)
Trainer(model, arguments, train_dataset=Texts(48), eval_dataset=Texts(24)).train()

"""The tutorial on the Hugging Face Trainer: one digest on one, two and three ranks, and resumed inside an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.plain_loop import plain_digest
from tests.adapters.tutorials import blocks, changed, launch, only_digest, refused

pytestmark = pytest.mark.extras("transformers", "accelerate")

PAGE = "exact-with-hf-trainer.md"
(ORDINARY,) = blocks(PAGE, "python")
EXACT = changed(ORDINARY, *blocks(PAGE, "diff"))
TORCHVISION = "from ddp_core.base.torchvision_import import import_torchvision\nimport_torchvision()\n"
# A model that knows nothing of the Trainer, and returns the mean loss of its batch; it has batch normalisation.
OWN_MODEL = """
import torch
from ddp_core.adapters.transformers import ExactTrainer
from ddp_core.base.digests import weights_digest
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Network(nn.Sequential):
    def forward(self, inputs, labels):
        return {"loss": nn.functional.cross_entropy(super().forward(inputs), labels)}


class MyTrainer(Trainer):
    pass


class MyExactTrainer(ExactTrainer, MyTrainer):
    pass


set_seed(0)
inputs = torch.randn(1000, 8)
data = [{"inputs": row, "labels": row[:3].argmax()} for row in inputs]
network = Network(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
args = TrainingArguments("output", seed=0, per_device_train_batch_size=16, use_cpu=True, report_to="none")
trainer = MyExactTrainer(network, args, train_dataset=data, optimizers=(optimizer, schedule), micro_batches=6)
trainer.train()
print("weights", weights_digest(network.state_dict()), flush=True)
trainer.accelerator.end_training()
"""
# Which words are masked is drawn while samples are put together.
MASKED = """
import torch
from ddp_core.adapters.transformers import ExactTrainer
from ddp_core.base.digests import weights_digest
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast, TrainingArguments, set_seed
)

set_seed(0)
words = {f"w{number}": number for number in range(61)} | {"[UNK]": 61, "[MASK]": 62, "[PAD]": 63}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")),
    unk_token="[UNK]", mask_token="[MASK]", pad_token="[PAD]",
)
data = [{"input_ids": text} for text in torch.randint(0, 61, (60, 12)).tolist()]
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=12, **sizes))
args = TrainingArguments(
    "output", per_device_train_batch_size=2, num_train_epochs=2, use_cpu=True, report_to="none", learning_rate=1e-2
)
collate = DataCollatorForLanguageModeling(tokenizer)
trainer = ExactTrainer(model, args, collate, data, micro_batches=6)
trainer.train()
print("weights", weights_digest(model.state_dict()), flush=True)
trainer.accelerator.end_training()
"""
OWN_MASKS = MASKED.replace("Modeling(tokenizer)", "Modeling(tokenizer, seed=1)")
COUNTING = OWN_MODEL.replace(
    "return {", "self.calls = getattr(self, 'calls', 0) + 1; inputs = inputs * (1 + self.calls); return {"
)


def test_the_ordinary_script_runs(tmp_path: Path) -> None:
    assert len(launch(TORCHVISION + ORDINARY, 1, tmp_path)) == 1


def test_one_digest_on_any_number_of_ranks_also_resumed(tmp_path: Path) -> None:
    digests = {only_digest(launch(EXACT, ranks, tmp_path), ranks) for ranks in (1, 2, 3)}
    assert len(digests) == 1
    # Step 5 is inside the first epoch, saved by three ranks.
    assert {only_digest(launch(EXACT, 2, tmp_path, "output/checkpoint-5"), 2)} == digests


@pytest.mark.slow
def test_a_model_with_a_mean_loss_ends_as_in_a_plain_loop(tmp_path: Path) -> None:
    assert {only_digest(launch(OWN_MODEL, ranks, tmp_path), ranks) for ranks in (1, 3)} == {plain_digest()}


@pytest.mark.slow
def test_what_a_collator_draws_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    workers = MASKED.replace("use_cpu=True", "use_cpu=True, dataloader_num_workers=1")
    digests = [only_digest(launch(script, ranks, tmp_path), ranks) for script, ranks in ((MASKED, 2), (workers, 1))]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_collator_with_a_generator_of_its_own_is_refused(tmp_path: Path) -> None:
    assert "micro-batch 0 of epoch 0 (samples" in refused(OWN_MASKS, tmp_path)


@pytest.mark.slow
def test_a_model_that_counts_its_calls_is_refused(tmp_path: Path) -> None:
    assert "step 1: micro-batch 1, which rank 0 has computed, has another" in refused(COUNTING, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("use_cpu=True", "use_cpu=True, average_tokens_across_devices=False", "leave it True"),
        pytest.param(
            "use_cpu=True",
            'use_cpu=True, train_sampling_strategy="group_by_length"',
            "group_by_length",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "micro_batches=6",
            "micro_batches=60",
            "a step takes 240 samples, but the data set has 200",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert said in refused(EXACT.replace(old, new), tmp_path)

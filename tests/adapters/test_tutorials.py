"""The tutorial on Lightning, Fabric, Accelerate and the Hugging Face Trainer: one digest on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.plain_loop import plain_digest
from tests.adapters.tutorials import blocks, changed, launch, only_digest, refused

TRAINER, FABRIC, LOOP, HUGGING_FACE = blocks("other-trainers.md", "python")
TO_TRAINER, TO_FABRIC, TO_LOOP, RESUME, TO_HUGGING_FACE = blocks("other-trainers.md", "diff")
EXACT_TRAINER, EXACT_FABRIC = changed(TRAINER, TO_TRAINER), changed(FABRIC, TO_FABRIC)
EXACT_LOOP, EXACT_HUGGING_FACE = changed(LOOP, TO_LOOP), changed(HUGGING_FACE, TO_HUGGING_FACE)
RESUMABLE_LOOP = changed(EXACT_LOOP, RESUME)
# Where torchvision was built against another torch, it has to be imported in a way of its own, and first.
TORCHVISION = "from ddp_core.base.torchvision_import import import_torchvision\nimport_torchvision()\n"
SAVING_TRAINER = "from lightning.pytorch.callbacks import ModelCheckpoint\n" + EXACT_TRAINER.replace(
    "enable_checkpointing=False", 'callbacks=[ModelCheckpoint(dirpath="saved", filename="{epoch}", save_top_k=-1)]'
)
RESUMING_TRAINER = EXACT_TRAINER.replace("shuffle=True))", 'shuffle=True), ckpt_path="saved/epoch=0.ckpt")')
BATCH = "        inputs, targets = batch\n"
COUNTING_TRAINER = EXACT_TRAINER.replace(
    BATCH, f"{BATCH}        self.calls = getattr(self, 'calls', 0) + 1\n        inputs = inputs * (1 + self.calls)\n"
)
# Noise is drawn while samples are put together, and a metric counts what training_step has seen.
NOISY = """
import torchmetrics
from torch.utils.data import default_collate

def noisy(samples):
    inputs, targets = default_collate(samples)
    return inputs + torch.randn_like(inputs), targets

class Network"""
NOISY_TRAINER = (
    EXACT_TRAINER.replace("class Network", NOISY)
    .replace("shuffle=True)", "shuffle=True, collate_fn=noisy)")
    .replace("        self.layers = ", "        self.seen = torchmetrics.SumMetric()\n        self.layers = ")
    .replace(BATCH, f"{BATCH}        self.seen.update(len(inputs))\n")
    .replace("max_epochs=3", "max_epochs=1")
    .replace("print(", "assert network.seen.compute() == 960, network.seen.compute()\nprint(")
)
# With `even_batches`, Accelerate would fill the short batch at the end up with samples that it has dealt already.
WHOLE_STEPS = "sampler=WholeSteps(data, global_batch_size=6 * 16)"
SHUFFLING_LOOP = EXACT_LOOP.replace("torch.randn(1000, 8)", "torch.randn(477, 8)").replace(WHOLE_STEPS, "shuffle=True")
# Which words are masked is drawn while samples are put together, with the global generator or with one of its own.
MASKING = """
draws = None
def masked(samples):
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}
    hidden = torch.rand(batch["input_ids"].shape, generator=draws) < 0.2
    return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 0)}

trainer = ExactTrainer(data_collator=masked, """
MASKED = EXACT_HUGGING_FACE.replace("trainer = ExactTrainer(", MASKING)
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
data = [{"inputs": row, "labels": row[:3].argmax()} for row in torch.randn(1000, 8)]
network = Network(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
args = TrainingArguments("output", seed=0, per_device_train_batch_size=16, use_cpu=True, report_to="none")
trainer = MyExactTrainer(network, args, train_dataset=data, optimizers=(optimizer, schedule), micro_batches=6)
trainer.train()
print("weights", weights_digest(network.state_dict()), flush=True)
trainer.accelerator.end_training()
"""
COUNTING_MODEL = OWN_MODEL.replace(
    "return {", "self.calls = getattr(self, 'calls', 0) + 1; inputs = inputs * (1 + self.calls); return {"
)

LIGHTNING, ACCELERATE = pytest.mark.extras("lightning"), pytest.mark.extras("accelerate")
HF = pytest.mark.extras("transformers", "accelerate")
EXTRAS = {"Trainer": LIGHTNING, "Fabric": LIGHTNING, "Accelerate": ACCELERATE, "HF": HF}


def rows(table: dict[str, tuple[Any, ...]], *fast: str) -> list[Any]:
    """The rows of a table for pytest; a name begins with the library that it needs, and is slow unless it is given."""
    return [
        pytest.param(*row, id=name, marks=[EXTRAS[name.split()[0]], *([] if name in fast else [pytest.mark.slow])])
        for name, row in table.items()
    ]


ORDINARY = {"Trainer": (TRAINER,), "Fabric": (FABRIC,), "Accelerate": (LOOP,), "HF": (HUGGING_FACE,)}


@pytest.mark.parametrize("script", rows(ORDINARY, "Accelerate"))
def test_the_ordinary_script_runs(script: str, tmp_path: Path) -> None:
    assert len(launch(TORCHVISION + script, 1, tmp_path)) == 1


EXACT = {
    "Trainer": (EXACT_TRAINER, True),
    "Fabric": (EXACT_FABRIC, True),
    "Accelerate": (EXACT_LOOP, True),
    "HF": (EXACT_HUGGING_FACE, False),
    "HF with a model of one's own": (OWN_MODEL, True),
}


@pytest.mark.parametrize(("script", "is_the_plain_loops"), rows(EXACT, "Trainer", "Accelerate", "HF"))
def test_one_digest_on_any_number_of_ranks(script: str, is_the_plain_loops: bool, tmp_path: Path) -> None:
    (digest,) = {only_digest(launch(script, ranks, tmp_path), ranks) for ranks in (1, 3)}
    assert (digest == plain_digest()) is is_the_plain_loops


CONTINUED = {
    "Trainer": (TORCHVISION + SAVING_TRAINER, RESUMING_TRAINER),
    "Accelerate": (RESUMABLE_LOOP, RESUMABLE_LOOP, "step-15"),
    "HF": (EXACT_HUGGING_FACE, EXACT_HUGGING_FACE, "output/checkpoint-5"),  # inside the first epoch
}


@pytest.mark.parametrize("words", rows({name: (words,) for name, words in CONTINUED.items()}))
def test_a_checkpoint_continues_on_other_ranks(words: tuple[str, ...], tmp_path: Path) -> None:
    script, again, *checkpoint = words
    whole = only_digest(launch(script, 3, tmp_path), 3)
    assert only_digest(launch(again, 2, tmp_path, *checkpoint), 2) == whole


CPU = "use_cpu=True"
DRAWN = {
    "Trainer": (NOISY_TRAINER, NOISY_TRAINER, "collate_fn=noisy)"),
    "Accelerate": (SHUFFLING_LOOP, SHUFFLING_LOOP, "shuffle=True"),
    "HF": (MASKED, MASKED.replace(CPU, f"{CPU}, dataloader_num_workers=1"), "data_collator=masked"),
}


@pytest.mark.parametrize(("script", "same", "draws"), rows(DRAWN))
def test_what_is_drawn_or_shuffled_is_the_same_on_any_number_of_ranks(
    script: str, same: str, draws: str, tmp_path: Path
) -> None:
    assert draws in script, "the page is written otherwise now, and this test has not changed its script"
    assert only_digest(launch(script, 2, tmp_path), 2) == only_digest(launch(same, 1, tmp_path), 1)


IN_THE_MIDDLE = "in the middle of a step"
COUNTED = "step 1: micro-batch 1, which rank 0 has computed, has another"
DEVICES = "devices=ranks"
OF_TWO = "sampler=__import__('ddp_core').ElasticSampler(data, num_replicas=2, rank=0)"
WEIGHTED = "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(1000), 1000)"
UNEVEN = "cpu=True, dataloader_config=__import__('accelerate').utils.DataLoaderConfiguration()"
BY_LENGTH = f'{CPU}, train_sampling_strategy="group_by_length"'
MASKS_OF_ITS_OWN = ("draws = None", "draws = torch.Generator().manual_seed(1)")
REFUSED = {
    "Trainer accumulates": (EXACT_TRAINER, DEVICES, f"{DEVICES}, accumulate_grad_batches=2", "grad_batches=2"),
    "Trainer in the middle": (EXACT_TRAINER, DEVICES, f"{DEVICES}, limit_train_batches=7", IN_THE_MIDDLE),
    "Trainer by weights": (EXACT_TRAINER, "shuffle=True", WEIGHTED, "cannot be dealt"),
    "Trainer counts": (COUNTING_TRAINER, "", "", COUNTED),
    "Fabric in the middle": (EXACT_FABRIC, "if strategy.steps.whole", "if True", IN_THE_MIDDLE),
    "Accelerate in the middle": (EXACT_LOOP, WHOLE_STEPS, "shuffle=True", IN_THE_MIDDLE),
    "Accelerate deals again": (EXACT_LOOP, WHOLE_STEPS, OF_TWO, "ElasticSampler deals samples to 2 ranks"),
    "Accelerate twice": (EXACT_LOOP, "with accelerator.accumulate(model)", "if True", "a second backward"),
    "Accelerate fills up": (EXACT_LOOP, "cpu=True", UNEVEN, "even_batches=True"),
    "HF over tokens": (EXACT_HUGGING_FACE, CPU, f"{CPU}, average_tokens_across_devices=False", "leave it True"),
    "HF by length": (EXACT_HUGGING_FACE, CPU, BY_LENGTH, "group_by_length"),
    "HF has too little": (EXACT_HUGGING_FACE, "batches=6", "batches=60", "a step takes 240 samples, but the data"),
    "HF draws": (MASKED, *MASKS_OF_ITS_OWN, "micro-batch 0 of epoch 0 (samples"),
    "HF counts": (COUNTING_MODEL, "", "", COUNTED),
}


@pytest.mark.parametrize(
    ("script", "old", "new", "said"), rows(REFUSED, "Trainer accumulates", "Accelerate in the middle", "HF over tokens")
)
def test_what_cannot_be_exact_is_refused(script: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    assert said in refused(script.replace(old, new), tmp_path)

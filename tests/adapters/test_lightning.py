"""The tutorial on Lightning and Fabric: one digest on one, two and three ranks, the same as a plain loop's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.plain_loop import plain_digest
from tests.adapters.tutorials import blocks, changed, launch, only_digest, refused

pytestmark = pytest.mark.extras("lightning")

PAGE = "exact-with-lightning.md"
TRAINER, FABRIC = blocks(PAGE, "python")
EXACT_TRAINER, EXACT_FABRIC = map(changed, (TRAINER, FABRIC), blocks(PAGE, "diff"))
# Where torchvision was built against another torch, it has to be imported in a way of its own, and first.
TORCHVISION = "from ddp_core.base.torchvision_import import import_torchvision\nimport_torchvision()\n"
SAVING = "from lightning.pytorch.callbacks import ModelCheckpoint\n" + EXACT_TRAINER.replace(
    "enable_checkpointing=False", 'callbacks=[ModelCheckpoint(dirpath="saved", filename="{epoch}", save_top_k=-1)]'
)
RESUMING = EXACT_TRAINER.replace("shuffle=True))", 'shuffle=True), ckpt_path="saved/epoch=0.ckpt")')
# Noise is drawn while samples are put together, and a metric counts what training_step has seen.
NOISY = (
    EXACT_TRAINER.replace("shuffle=True)", "shuffle=True, collate_fn=noisy)")
    .replace(
        "class Network",
        """
import torchmetrics
from torch.utils.data import default_collate


def noisy(samples):
    inputs, targets = default_collate(samples)
    return inputs + torch.randn_like(inputs), targets


class Network""",
    )
    .replace("        self.layers = ", "        self.seen = torchmetrics.SumMetric()\n        self.layers = ")
    .replace(
        "        inputs, targets = batch\n", "        inputs, targets = batch\n        self.seen.update(len(inputs))\n"
    )
    .replace("max_epochs=3", "max_epochs=1")
    .replace("print(", "assert network.seen.compute() == 960, network.seen.compute()\nprint(")
)
COUNTING = EXACT_TRAINER.replace(
    "        inputs, targets = batch\n",
    "        inputs, targets = batch\n"
    "        self.calls = getattr(self, 'calls', 0) + 1\n        inputs = inputs * (1 + self.calls)\n",
)


@pytest.mark.parametrize("script", [TRAINER, FABRIC], ids=["Trainer", "Fabric"])
def test_the_ordinary_script_runs(script: str, tmp_path: Path) -> None:
    assert len(launch(TORCHVISION + script, 1, tmp_path)) == 1


@pytest.mark.parametrize(
    "script", [EXACT_TRAINER, pytest.param(EXACT_FABRIC, marks=pytest.mark.slow)], ids=["Trainer", "Fabric"]
)
def test_one_digest_on_any_number_of_ranks(script: str, tmp_path: Path) -> None:
    digests = {only_digest(launch(script, ranks, tmp_path), ranks) for ranks in (1, 2, 3)}
    assert digests == {plain_digest()}


@pytest.mark.slow
def test_draws_of_a_collate_function_are_the_same_and_metrics_count_once(tmp_path: Path) -> None:
    digests = [only_digest(launch(NOISY, ranks, tmp_path), ranks) for ranks in (1, 2)]
    assert digests[0] == digests[1] != plain_digest()


@pytest.mark.slow
def test_a_checkpoint_from_the_end_of_an_epoch_continues_on_other_ranks(tmp_path: Path) -> None:
    whole = only_digest(launch(TORCHVISION + SAVING, 3, tmp_path), 3)
    assert only_digest(launch(RESUMING, 2, tmp_path), 2) == whole


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("devices=ranks", "devices=ranks, accumulate_grad_batches=2", "accumulate_grad_batches=2"),
        pytest.param(
            "devices=ranks",
            "devices=ranks, limit_train_batches=7",
            "an update in the middle of a step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "shuffle=True",
            "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(1000), 1000)",
            "cannot be dealt",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert said in refused(EXACT_TRAINER.replace(old, new), tmp_path)


@pytest.mark.slow
def test_a_module_that_counts_its_calls_is_refused(tmp_path: Path) -> None:
    assert "step 1: micro-batch 1, which rank 0 has computed, has another" in refused(COUNTING, tmp_path)


@pytest.mark.slow
def test_fabric_refuses_an_update_in_the_middle_of_a_step(tmp_path: Path) -> None:
    script = EXACT_FABRIC.replace("if strategy.steps.whole", "if True")
    assert "an update in the middle of a step" in refused(script, tmp_path)

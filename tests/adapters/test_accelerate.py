"""The tutorial on Accelerate: one digest on one, two and three ranks, resumed elsewhere, and a plain loop's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.plain_loop import plain_digest
from tests.adapters.tutorials import blocks, changed, launch, only_digest, refused, run

pytestmark = pytest.mark.extras("accelerate")

PAGE = "exact-with-accelerate.md"
(ORDINARY,) = blocks(PAGE, "python")
CHANGES, RESUME = blocks(PAGE, "diff")
EXACT = changed(ORDINARY, CHANGES)


def test_the_ordinary_script_runs(tmp_path: Path) -> None:
    assert len(launch(ORDINARY, 1, tmp_path)) == 1


def test_one_digest_on_any_number_of_ranks(tmp_path: Path) -> None:
    digests = {only_digest(launch(EXACT, ranks, tmp_path), ranks) for ranks in (1, 2, 3)}
    assert digests == {plain_digest()}


@pytest.mark.slow
def test_a_checkpoint_continues_on_other_ranks(tmp_path: Path) -> None:
    script = changed(EXACT, RESUME)
    whole = only_digest(launch(script, 3, tmp_path), 3)
    assert only_digest(launch(script, 2, tmp_path, "step-15"), 2) == whole


@pytest.mark.slow
def test_a_shuffling_loader_is_dealt_the_same_way(tmp_path: Path) -> None:
    """The last batch is short: with `even_batches`, Accelerate would fill it up with samples it has dealt already."""
    script = EXACT.replace("torch.randn(1000, 8)", "torch.randn(477, 8)")
    script = script.replace("sampler=WholeSteps(data, global_batch_size=6 * 16)", "shuffle=True")
    assert "WholeSteps(" not in script
    only_digest(launch(script, 1, tmp_path) + launch(script, 2, tmp_path), 3)


@pytest.mark.slow
def test_noise_in_evaluation_data_is_a_warning_and_in_training_data_an_error(tmp_path: Path) -> None:
    noise = """
draws = __import__("random").Random(0)
def noisy(batch):
    return torch.tensor([draws.random() for _ in batch])
"""
    evaluation = """
loader = accelerator.prepare(DataLoader(data, batch_size=100, collate_fn=noisy))
model.eval()
assert len(list(loader)) == 10
accelerator.end_training()
"""
    ended = run(EXACT.replace("accelerator.end_training()", noise + evaluation), 1, tmp_path)
    assert ended.code == 0, ended.errors
    assert ended.errors.count("in an evaluation, micro-batch 0 of epoch 0") == 1
    trained = EXACT.replace("loader = ", noise + "loader = ").replace("16, sampler", "16, collate_fn=noisy, sampler")
    assert "would train on other data" in refused(trained, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("sampler=WholeSteps(data, global_batch_size=6 * 16)", "shuffle=True", "in the middle of a step"),
        pytest.param(
            "sampler=WholeSteps(data, global_batch_size=6 * 16)",
            "sampler=__import__('ddp_core').ElasticSampler(data, num_replicas=2, rank=0)",
            "ElasticSampler deals samples to 2 ranks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "with accelerator.accumulate(model):",
            "if True:",
            "a second backward in one micro-batch",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "cpu=True",
            "cpu=True, dataloader_config=DataLoaderConfiguration()",
            "even_batches=True",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    script = EXACT.replace("import set_seed", "import DataLoaderConfiguration, set_seed")
    assert said in refused(script.replace(old, new), tmp_path)

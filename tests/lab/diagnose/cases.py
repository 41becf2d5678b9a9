"""Scripts with a bug that others have reported; with `--mended` each is its own clean twin.

python -m tests.lab.diagnose.cases      writes the tables of docs/reference/diagnose.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_lab.diagnose.findings import KINDS

FIXTURES = Path(__file__).parent / "fixtures"
CLEAN = Path(__file__).parent / "clean"
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "diagnose.md"
SCRIPTS = "../../tests/lab/diagnose/fixtures"
BEGIN, END = "<!-- begin: python -m tests.lab.diagnose.cases -->", "<!-- end -->"


class Case(NamedTuple):
    """What is to be named first, who has reported such a bug, and the options that it takes to see it."""

    finding: str
    reported: str
    ranks: str = "1,2"
    resumes: bool = False


CASES = {
    "no_sync_in_backward_only": Case("gradients-differ", "karpathy/build-nanogpt#30", "1,2,3"),
    "around_ddp": Case("gradients-differ", "jingyaogong/minimind#853"),
    "iterable_of_all": Case("same-samples", "Lightning-AI/pytorch-lightning#15734"),
    "weights_of_each_rank": Case("weights-start-differently", ""),
    "clip_before_reduce": Case("clipped-before-reduction", "mindspore-lab/mindcv#603"),
    "sum_for_mean": Case("step-grows-with-ranks", "tensorflow/tensorflow#25806", "1,2,3"),
    "statistic_without_gradient": Case("exchange-without-gradient", ""),
    "rank_0_validates": Case("hangs", "", "1,2"),
    "groups_by_name": Case("settings-depend-on-ranks", ""),
    "tied_weight_reduced_twice": Case("reduced-unlike", "pytorch/pytorch#132027"),
    "divided_twice": Case("step-grows-with-ranks", "meta-pytorch/torchtune#2172"),
    "mean_of_means": Case("unlike-weights", "huggingface/transformers#34191"),
    "tokens_of_one_rank": Case("unlike-weights", "meta-pytorch/torchtune#1917"),
    "order_of_each_rank": Case("samples-twice-or-never", "NVlabs/LongLive#71"),
    "split_of_each_rank": Case("samples-twice-or-never", "TensorAuto/OpenTau#498"),
    "batch_norm_of_each_rank": Case("buffers-drift", "pytorch/pytorch#13711"),
    "plateau_of_each_rank": Case("rates-differ", "lucidrains/DALLE-pytorch#268"),
    "schedule_once_per_rank": Case("schedule-steps-with-ranks", "huggingface/accelerate#2926"),
    "schedule_of_all_batches": Case("schedule-too-long", ""),
    "no_set_epoch": Case("same-order-each-epoch", "pytorch/pytorch#31771"),
    "evaluates_one_share": Case("evaluates-a-share", "Lyken17/Efficient-PyTorch#24"),
    "evaluates_the_padding": Case("evaluates-twice", ""),
    "evaluates_full_batches": Case("evaluates-not-all", ""),
    "averages_batch_means": Case("mean-of-means", ""),
    "workers_draw_alike": Case("workers-draw-alike", "pytorch/pytorch#5059"),
    "baseline_of_each_rank": Case("other-gradient", ""),
    "order_of_a_set": Case("not-repeatable", "", "1"),
    "resume_without_generator": Case("resume-generators", "huggingface/transformers#11504", "1", True),
    "resume_at_the_epoch": Case("resume-samples", "allenai/allennlp#5220", "1", True),
    "resume_without_scaler": Case("resume-scaler", "huggingface/transformers#11323", "1", True),
    "resume_without_optimizer": Case("resume-optimizer", "", "1", True),
    "rank_0_resumes": Case("resume-optimizer", "", "2", True),
    "second_resume": Case("resume-samples", "", "2", True),
}


def options(case: Case) -> list[str]:
    """The words between `ddp diagnose` and the script."""
    return ["--ranks", case.ranks, *(["--resume-args=--resume"] if case.resumes else []), "--"]


def between_marks() -> str:
    """What stands between the marks of the page: a table of bugs with their scripts, and one of what is by design."""
    bugs = [(name, kind.title, kind.mend, _scripts(name)) for name, kind in KINDS.items() if kind.is_bug]
    designed = [(name, kind.title, kind.mend) for name, kind in KINDS.items() if not kind.is_bug]
    return "\n".join(
        [
            *_table(("bug", "what", "mend", "scripts"), bugs),
            *("", "By design:", ""),
            *_table(("finding", "what", "mend"), designed),
        ]
    )


def write() -> None:
    """Write the page's tables anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks()}\n\n{END}{after}")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    named = [(f'<a id="{name}"></a>{name}', *others) for name, *others in rows]
    return [f"|{'|'.join(row)}|" for row in (head, ["---"] * len(head), *named)]


def _scripts(finding: str) -> str:
    """The scripts with this bug, each with the report that it is after."""
    found = [(name, case.reported) for name, case in CASES.items() if case.finding == finding]
    return ", ".join(f"[{name}]({SCRIPTS}/{name}.py){reported and _link(reported)}" for name, reported in found)


def _link(reported: str) -> str:
    repository, _, number = reported.partition("#")
    return f" [#{number}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    write()

"""What may be found in a script: the name, how bad it is, and how it is mended; the most harmful first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

PAGE = "docs/reference/diagnose.md"


class Kind(NamedTuple):
    """One thing that may be found."""

    title: str
    mend: str
    is_bug: bool
    """Whether it makes the result wrong or another on each layout; else it is how the script was designed, and said."""


_BUGS = """
hangs: Ranks wait for each other without end
    let all ranks call the same collectives in one order; one rank alone calls the module inside of DDP (model.module)
fails-on-more-ranks: The script fails on several ranks, though not on one
    the rank's last line is quoted; its output stands above it when you start the script by torchrun
gradients-differ: Ranks step with different gradients
    let DDP wrap the whole model, call that, and put forward and backward of all but the last micro-batch into no_sync()
same-samples: Ranks train on the same samples
    give each rank its part: DistributedSampler, or every W-th sample from the rank's number on
weights-start-differently: Ranks start from different weights
    wrap the model in DDP, or broadcast rank 0's weights before the first step
weights-drift: Weights drift apart though all ranks have the same gradients
    let every rank's optimizer have the same settings and state, and change weights by the optimizer alone
clipped-before-reduction: Gradients are clipped before they are reduced
    clip after the reduction: the norm is that of the mean gradient then, on any number of ranks
step-grows-with-ranks: The gradient grows or shrinks with the number of ranks
    divide by the ranks exactly once (DDP's mean has it already), and the loss by the micro-batches that a step has here
exchange-without-gradient: The gradient leaves out what ranks exchange in forward
    exchange by torch.distributed.nn.functional (all_reduce, all_gather), whose backward exchanges the gradients
reduced-unlike: Some gradients are reduced otherwise than the rest
    reduce each parameter once, also one that has two names: model.parameters() has each once
not-finite: Gradients are not finite, though those of one process with the same samples are
    look for a division by what a rank's own samples may have none of, such as tokens that count
other-gradient: The gradient is not that of one process with the samples of all ranks
    compute of all ranks' samples what now each rank computes of its own: a mean over tokens, a statistic, a contrast
other-update: The gradient is that of one process, and the weights move otherwise
    let what changes gradients after the reduction, and the optimizer itself, be the same on any number of ranks
unlike-weights: Elements of one step's loss do not weigh the same
    sum the loss, and divide by the elements of all micro-batches and ranks (times W under DDP, which divides by W)
samples-twice-or-never: Some samples of an epoch are trained twice, others never
    let all ranks cut the same order, drawn with one seed: DistributedSampler does
unlike-batches: Ranks have unlike numbers of batches
    give each rank equally many (drop_last=True, or DistributedSampler), or use DDP's join(): who has more waits forever
buffers-drift: Buffers differ between ranks
    leave DDP's broadcast_buffers on, or use SyncBatchNorm: what rank 0 saves is not what the others evaluate
settings-depend-on-ranks: Parameters have other settings of the optimizer on another number of ranks
    choose groups by the parameters of the model itself, not by names that DDP has changed (`module.`)
rates-differ: Ranks step with different learning rates
    compute the learning rate from what all ranks know, not from a rank's own loss or batches
schedule-steps-with-ranks: The schedule moves on once per rank instead of once per step
    call the scheduler once per optimizer step; with Accelerate, do not prepare it, or give it its length before that
schedule-too-long: The schedule ends as late on more ranks, whose epochs have fewer steps
    compute the length of the schedule from the batches that a rank has (the length of its loader)
same-order-each-epoch: Each epoch has the same order
    call sampler.set_epoch(epoch) before each epoch
evaluates-a-share: Each rank evaluates its share, and nobody puts the shares together
    add up over the ranks before dividing (all_reduce, Accelerate's gather_for_metrics, Lightning's sync_dist=True)
evaluates-twice: An evaluation counts some samples twice
    give each rank a Subset of every W-th sample, which needs no padding, or use Accelerate's gather_for_metrics
evaluates-not-all: An evaluation leaves samples out
    let no loader or sampler of an evaluation drop the last batch (drop_last=False)
mean-of-means: An evaluation averages means over unlike numbers of elements
    add up sums and numbers of elements over all batches and ranks, and divide once
workers-draw-alike: Loader processes draw the same random numbers
    leave the seeds of workers to torch, and draw from no generator that the data set holds: each worker has a copy
resume-weights: After a resume the weights are others
    load the model's state_dict before the first step, also of buffers and EMA weights
resume-optimizer: After a resume the optimizer's state is another
    save and load optimizer.state_dict(), after the model is on its device and before the first step
resume-scaler: After a resume the gradient scaler's state is another
    save and load scaler.state_dict(): else the scale starts anew, and steps are skipped that were not
resume-rate: After a resume the learning rate is another
    save and load scheduler.state_dict(), or compute the rate from the step that is loaded
resume-samples: After a resume samples are repeated or left out
    save the epoch and the position in it, set the epoch, and skip the batches that were trained
resume-generators: After a resume the random numbers are others
    save and load the states of the generators (a DataLoader draws from torch's), or derive seeds from the step
not-repeatable: Two equal runs differ, though a seed is set
    seed torch, random and numpy before they are used, and sort what comes from a set or a folder
"""
"""By name: the title, and below it the mend."""
_BY_DESIGN = """
no-seed: Two equal runs differ: no seed is set
    torch.manual_seed(…), if runs shall be comparable
rate-depends-on-ranks: The learning rate depends on the number of ranks
    nothing, if the batch grows with the ranks
schedule-counts-samples: The schedule moves on once per rank and step: it counts samples
    nothing, if its length counts the batches that one rank alone would have, as Accelerate's prepare expects
batch-grows: The batch of a step grows with the number of ranks
    divide a fixed global batch by W, if the result shall not depend on W
order-depends-on-ranks: Which samples a step has depends on the number of ranks
    an order that depends on seed and epoch alone, such as ElasticSampler's
padding: The last batches are padded with samples a second time
    drop_last=True of the sampler; for figures, count each sample once
left-out: The end of an epoch is left out
    nothing, if the order changes with each epoch
same-random-numbers: All ranks draw the same random numbers
    torch.manual_seed(seed + rank) after the model is made, if dropout and augmentation shall be independent
local-steps: Ranks step alone, and their weights are made equal again later
    nothing, if that is local SGD
remains-samples: What remains is which samples a step has
    nothing; a global batch of one size, cut alike on any number of ranks, makes the same bits on all
remains-random-numbers: What remains are the random numbers of each rank
    nothing; keyed by step and micro-batch they are the same on any number of ranks
remains-rounding: What remains is rounding
    nothing, unless it is coarser than the numbers' type; an exact reduction adds up in one order on any layout
sharded: Ranks hold parts of the parameters
    nothing; gradients and weights of sharded models are not compared
"""


def _kinds(text: str, is_bug: bool) -> dict[str, Kind]:
    found = re.findall(r"^(\S+): (.+)\n((?: {4}.+\n)+)", text, re.MULTILINE)
    return {name: Kind(title, " ".join(mend.split()), is_bug) for name, title, mend in found}


KINDS = {**_kinds(_BUGS, is_bug=True), **_kinds(_BY_DESIGN, is_bug=False)}
"""By name, in the order of harm."""


@dataclass(frozen=True)
class Finding:
    """Something that was found, and where it was seen."""

    name: str
    evidence: str
    """What differs: step, ranks, the first tensor or sample, figures."""
    ranks: int
    """On how many ranks it was seen."""
    site: str | None = None
    """The script's line, as `train.py:31`, where one is known."""

    @property
    def kind(self) -> Kind:
        """Its title, and what to do."""
        return KINDS[self.name]

    def told(self) -> dict[str, Any]:
        """All that is said of it; `link` is where the documentation explains it."""
        kind, link = self.kind, f"{PAGE}#{self.name}"
        severity = "bug" if kind.is_bug else "by design"
        return asdict(self) | {"title": kind.title, "severity": severity, "mend": kind.mend, "link": link}


def by_harm(findings: Iterable[Finding]) -> list[Finding]:
    """Each name once, as it was seen on the fewest ranks; the most harmful first."""
    first: dict[str, Finding] = {}
    for each in sorted(findings, key=lambda finding: finding.ranks):
        first.setdefault(each.name, each)
    return [first[name] for name in KINDS if name in first]

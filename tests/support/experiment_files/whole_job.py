"""Does a job with everything of its own end with the same bits on every layout?

Sentences of unlike lengths in a memory-mapped file, padded by `collate`; a model with tied and with frozen weights,
BatchNorm and Dropout; a loss of two parts; an optimizer with groups, a schedule, metrics, a callback, averaged weights.
"""

from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Subset

from ddp_core.base.files import replace_file
from ddp_core.config.experiment import Experiment
from ddp_core.data.splits import Splits
from ddp_core.observe.callback import Callback, Moment

WORDS, LONGEST, TOPICS = 50, 12, 3
Tensors = dict[str, Tensor]


class Sentences(Dataset[tuple[Tensors, Tensors]]):
    """Row i of the file: how many words, then the words, then the topic."""

    def __init__(self, file: Path) -> None:
        self.rows = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensors, Tensors]:
        row = torch.from_numpy(self.rows[index].astype(np.int64))
        words = row[1 : 1 + int(row[0])]
        return {"words": words[:-1]}, {"following": words[1:], "topic": row[-1]}


def data(root: Path, sentences: int = 300, held_out: int = 60) -> Splits:
    file = root / f"sentences-{sentences}.npy"
    if not file.exists():
        draw = np.random.Generator(np.random.PCG64(1)).integers
        words = draw(1, WORDS, (sentences, LONGEST))
        lengths, topics = draw(3, LONGEST + 1, (sentences, 1)), words[:, :1] % TOPICS
        root.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=root, delete=False) as new:  # every rank may write it at the same moment
            np.save(new, np.hstack([lengths, words, topics]))
        Path(new.name).replace(file)
    whole = Sentences(file)
    train, test = Subset(whole, range(held_out, sentences)), Subset(whole, range(held_out))
    return Splits(train, test, files=[file])


def collate(samples: list[tuple[Tensors, Tensors]]) -> tuple[Tensors, Tensors]:
    words = pad_sequence([inputs["words"] for inputs, _ in samples], batch_first=True)
    following = pad_sequence([targets["following"] for _, targets in samples], batch_first=True)
    topics = torch.stack([targets["topic"] for _, targets in samples])
    return {"words": words, "mask": (words > 0).float()}, {"following": following, "topic": topics}


class Reader(nn.Module):
    """Says the next word, with the embedding's own weights, and the topic of the sentence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.place = nn.Parameter(torch.randn(LONGEST, width), requires_grad=False)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        self.norm = nn.BatchNorm1d(width)
        self.topic = nn.Linear(width, TOPICS)
        self.following = nn.Linear(width, WORDS, bias=False)
        self.following.weight = self.embedding.weight

    def forward(self, words: Tensor, mask: Tensor) -> Tensors:
        read = self.hidden(self.embedding(words) + self.place[: words.shape[1]])
        mean = (read * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"following": self.following(read), "topic": self.topic(self.norm(mean))}


def model(width: int = 32) -> nn.Module:
    return Reader(width)


def loss(outputs: Tensors, targets: Tensors) -> Tensor:
    words = functional.cross_entropy(
        outputs["following"].flatten(0, 1), targets["following"].flatten(), ignore_index=0, reduction="sum"
    )
    return words / LONGEST + functional.cross_entropy(outputs["topic"], targets["topic"], reduction="sum")


def optimizer(model: Reader, lr: float = 0.01) -> torch.optim.Optimizer:
    slow = [model.embedding.weight]
    fast = [each for each in model.parameters() if each.requires_grad and each is not slow[0]]
    return torch.optim.RAdam([{"params": slow, "lr": lr / 2}, {"params": fast}], lr=lr)


def schedule(optimizer: torch.optim.Optimizer, total_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02], total_steps=total_steps)


def metrics(outputs: Tensors, targets: Tensors) -> dict[str, object]:
    known = targets["following"] > 0
    top5 = (outputs["following"].topk(5).indices == targets["following"][..., None]).any(-1)
    confusion = torch.zeros(TOPICS, TOPICS, dtype=torch.int64)
    confusion.index_put_(
        (targets["topic"], outputs["topic"].argmax(1)), torch.ones_like(targets["topic"]), accumulate=True
    )
    return {"top5": ((top5 & known).sum(), known.sum()), "topics": confusion}


class Best(Callback):
    """Keeps the best top-5 in a file beside the run."""

    best = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]

    def on_epoch(self, moment: Moment) -> None:
        self.best = max(self.best, moment.evaluation["test_top5"])
        replace_file(moment.directory / "best.txt", f"{self.best}\n")


callbacks = [Best()]

experiment = Experiment(
    name="whole_job", global_batch_size=24, micro_batch=4, epochs=3, last_batch="keep", clip_norm=1.0, ema_decay=0.95
)

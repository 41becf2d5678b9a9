"""Writes an experiment file from a seed: a small model with habits of other people's, and any settings around it.

`experiment_of(17)` is the same text at each call. What it draws from are the lists below, and the habits in
random_habits.toml. A new habit is one more entry there, and gives other texts to the same seeds.
"""

from __future__ import annotations

import random
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("random_habits.toml")
WIDTH, CLASSES = 8, 5
ROWS, IMAGES, WORDS = "rows", "images", "words"


@dataclass(frozen=True)
class Family:
    """A kind of model: what it is given, and an expression that makes its body, which ends with WIDTH numbers."""

    name: str
    inputs: str
    body: str
    classes: str = ""


@dataclass(frozen=True)
class Habit:
    """Something that a model does: lines for its parts, for its forward, and what it needs of the rest of the file."""

    name: str
    made: str = ""
    inputs: str = ""
    """Lines at the beginning of forward, which change `inputs`."""
    hidden: str = ""
    """Lines in the middle of forward, which change `hidden`."""
    methods: str = ""
    functions: str = ""
    callback: str = ""
    settings: tuple[str, ...] = ()
    needs_numbers: bool = False
    """Whether the inputs must be floating-point numbers."""


ACTIVATIONS = ("nn.ReLU()", "nn.GELU()", "nn.Tanh()", "nn.SiLU()", "nn.ReLU(inplace=True)")
_ATTENTION = """
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH{more}), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout={dropout}, batch_first=True, norm_first={first})

    def forward(self, ids):
        return self.layer(self.words(ids) + self.places).mean(1)
"""
_RECURRENT = """
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH{more})
        self.cell = nn.{cell}(WIDTH, WIDTH, num_layers={layers}, dropout={dropout}, batch_first=True)

    def forward(self, ids):
        return self.cell(self.words(ids))[0][:, -1]
"""


def _family(draw: random.Random) -> Family:
    act, more = draw.choice(ACTIVATIONS), draw.choice(("", "", ", padding_idx=0", ", max_norm=1.0"))
    norm = draw.choice(("nn.BatchNorm1d(12)", "nn.LayerNorm(12)", "nn.BatchNorm1d(12, momentum=None)", "nn.Identity()"))
    filters = draw.choice(("nn.BatchNorm2d(6)", "nn.GroupNorm(2, 6)", "nn.InstanceNorm2d(6)", "nn.BatchNorm2d(6)"))
    pool = draw.choice(("nn.MaxPool2d(2)", "nn.AvgPool2d(2)", "nn.Conv2d(6, 6, 3, stride=2, groups=2)"))
    drop = draw.choice(("nn.Dropout2d(0.3)", "nn.Identity()"))
    dropout, layers = draw.choice((0.0, 0.2)), draw.choice((1, 2))
    cell, first = draw.choice(("RNN", "GRU", "LSTM")), draw.choice((True, False))
    conv = f"nn.Conv2d(3, 6, 3, bias={draw.random() < 0.5}), {filters}, {act}, {drop}, {pool}"
    mlp = f"nn.Sequential(nn.Linear(10, 12), {norm}, {act}, nn.Dropout(0.2), nn.Linear(12, WIDTH))"
    images = f"nn.Sequential({conv}, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, WIDTH))"
    attends = _ATTENTION.format(more=more, dropout=dropout, first=first)
    reads = _RECURRENT.format(more=more, cell=cell, layers=layers, dropout=dropout if layers > 1 else 0.0)
    families = (
        Family("mlp", ROWS, mlp),
        Family("conv", IMAGES, images),
        Family("attention", WORDS, "Attends()", attends),
        Family("recurrent", WORDS, "Reads()", reads),
    )
    return draw.choice(families)


_ACTS = """
class Acts(Callback):
    ranks = "all"

    def on_step(self, moment):
        {}


callbacks = [Acts()]
"""


def _habit(callback: str = "", on_step: str = "", settings: Sequence[str] = (), **fields: Any) -> Habit:
    return Habit(callback=_ACTS.format(on_step) if on_step else callback, settings=tuple(settings), **fields)


HABITS = tuple(_habit(**each) for each in tomllib.loads(FILE.read_text())["habit"])
"""All habits. A file has one at most that brings a callback, since `callbacks` is assigned once."""

LOSSES: tuple[str, ...] = (
    "",
    'return functional.cross_entropy(outputs, targets, reduction="sum")',
    'return functional.cross_entropy(outputs, targets, reduction="sum", label_smoothing=0.1)',
    'return functional.mse_loss(outputs.float(), functional.one_hot(targets, CLASSES).float(), reduction="sum")',
    "weight = torch.arange(1.0, CLASSES + 1)\n"
    'return functional.cross_entropy(outputs.float(), targets, weight=weight, reduction="sum")',
    'return functional.multi_margin_loss(outputs.float(), targets, reduction="sum")',
    "return -(outputs.float().log_softmax(1)[torch.arange(len(targets)), targets] * (1 + random.random())).sum()",
)
"""Bodies of `loss`; with the first of them the experiment has none, and takes the one of ddp_core."""

_SIGNED = """
class Signed(torch.optim.Optimizer):
    elementwise = {elementwise}

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                    mean.lerp_(each.grad, 0.1)
                    each.sub_({rule}, alpha=group["lr"])
"""
_GROUPS = "[{'params': kept[::2]}, {'params': kept[1::2], 'weight_decay': 0.1, 'lr': 0.02}]"
OWN_RULES: tuple[str, ...] = (
    *(f"torch.optim.{each}(kept, lr=0.01)" for each in ("Adagrad", "RAdam", "Rprop", "ASGD", "Adafactor")),
    f"torch.optim.AdamW({_GROUPS}, lr=0.01)",
    f"torch.optim.SGD({_GROUPS}, lr=0.05, momentum=0.9, dampening=0.1)",
    "torch.optim.Adam(kept, lr=0.01, amsgrad=True, foreach=True)",
    "torch.optim.AdamW([{'params': [each], 'lr': 0.01 / (1 + number)} for number, each in enumerate(kept)])",
)
UPDATES: tuple[str, ...] = (
    "mean / (mean.abs() + 0.001)",
    "each.grad + 0.01 * torch.randn_like(each)",
    "each.grad * (each.norm() / (each.grad.norm() + 0.001))",
)
"""What the file's own optimizer subtracts: by element, with noise, and by the ratio of two norms."""
BUILT_IN: tuple[str, ...] = (
    'Optimizer(name="sgd", lr=0.05)',
    'Optimizer(name="sgd", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)',
    'Optimizer(name="adam", lr=0.01)',
    'Optimizer(name="adamw", lr=0.01, weight_decay=0.1)',
    'Optimizer(name="adamw", lr=0.01, implementation="foreach")',
    'Optimizer(name="adam", lr=0.01, implementation="loop")',
)
SCHEDULES: tuple[str, ...] = (
    "lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total_steps + 1, cycle_momentum=False)",
    "lr_scheduler.SequentialLR(optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1), "
    "lr_scheduler.CosineAnnealingLR(optimizer, 3)], [1])",
)

DATA = {
    ROWS: "torch.randn(SAMPLES, 10, generator=draw)",
    IMAGES: "torch.randn(SAMPLES, 3, 8, 8, generator=draw)",
    WORDS: "torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=draw)",
}
_DRAWS = ("random.uniform(0.5, 1.5)", "np.random.rand()", "torch.rand(())", "(torch.randn(()) + random.random())")
_SAMPLES = """
class Samples(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {item}, self.targets[index]
"""
_COLLATE = """
def collate(samples):
    inputs = torch.stack([each for each, _ in samples])
    {line}
    return inputs, torch.stack([each for _, each in samples])
"""


def experiment_of(seed: int) -> str:
    """The text of the experiment file of this seed."""
    draw = random.Random(f"experiment {seed}")
    family = _family(draw)
    habits = _habits(draw, family)
    is_checkpointed, is_named = draw.random() < 0.15, draw.random() < 0.2
    title = ", ".join([family.name, *(each.name for each in habits), *(["checkpointed"] if is_checkpointed else [])])
    own, samples, settings = _around(draw, family, habits)
    parts = [
        f'"""Does experiment {seed} of the random ones end with the same bits on every layout?\n\n{title}.\n"""',
        "import random\n\nimport numpy as np\nimport torch\nfrom torch import nn\nfrom torch.nn import functional\n"
        "from torch.optim import lr_scheduler\nfrom torch.utils.checkpoint import checkpoint\n\n"
        "from ddp_core import Callback, Component, Experiment, Splits\n"
        "from ddp_core.config.experiment import DdpOptions, Optimizer, Schedule",
        f"WIDTH, CLASSES, SAMPLES, WORDS, LENGTH = {WIDTH}, {CLASSES}, {samples}, 20, 6",
        *(each.functions for each in habits),
        family.classes,
        _model(family, habits, is_checkpointed),
        "def model():\n    return Model()",
        _data(draw, family, is_named),
        *own,
        *(each.callback for each in habits),
        f"experiment = Experiment(\n{textwrap.indent(settings, '    ')}\n)",
        "_ = (random, np, functional, lr_scheduler, checkpoint, Callback, Component, DdpOptions, Optimizer, Schedule)",
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def write(seed: int, folder: Path) -> Path:
    """Write the experiment file of this seed into the folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"random_{seed}.py"
    path.write_text(experiment_of(seed))
    return path


def _habits(draw: random.Random, family: Family) -> list[Habit]:
    chosen: list[Habit] = []
    for habit in draw.sample(HABITS, draw.choice((0, 1, 1, 2, 2, 3))):
        clashes = any(habit.callback and each.callback for each in chosen)
        clashes |= any(set(_names(habit)) & set(_names(each)) for each in chosen)
        if not clashes and (family.inputs != WORDS or not habit.needs_numbers):
            chosen.append(habit)
    return chosen


def _names(habit: Habit) -> list[str]:
    """What two habits of one model must not both make: an attribute, or another form of the middle layer."""
    made = [line.partition(" = ")[0].strip() for line in habit.made.splitlines() if " = " in line]
    return [*made, *(["middle"] if "utils." in habit.made or "self.middle.w" in habit.made else [])]


def _model(family: Family, habits: Sequence[Habit], is_checkpointed: bool) -> str:
    body = "checkpoint(self.body, inputs, use_reentrant=False)" if is_checkpointed else "self.body(inputs)"
    made = [f"super().__init__()\nself.body = {family.body}", "self.middle = nn.Linear(WIDTH, WIDTH)"]
    made += ["self.head = nn.Linear(WIDTH, CLASSES)", *(each.made for each in habits)]
    forward = [*(each.inputs for each in habits), f"hidden = {body}", "hidden = torch.tanh(self.middle(hidden))"]
    forward += [*(each.hidden for each in habits), "return self.head(hidden)"]
    methods = [_function("__init__(self)", made), _function("forward(self, inputs)", forward)]
    methods += [each.methods for each in habits]
    inside = "\n\n".join(textwrap.indent(each.strip("\n"), "    ") for each in methods if each)
    return f"class Model(nn.Module):\n{inside}"


def _function(head: str, lines: Sequence[str]) -> str:
    body = "\n".join(each.strip("\n") for each in lines if each)
    return f"def {head}:\n{textwrap.indent(body, '    ')}"


def _data(draw: random.Random, family: Family, is_named: bool) -> str:
    """The data set, which may draw at each read, and the collation, which may draw or bring inputs by name."""
    number = draw.choice(_DRAWS)
    is_augmented = family.inputs != WORDS and draw.random() < 0.3
    item = f"self.inputs[index] * {number}" if is_augmented else "self.inputs[index].clone()"
    held_out = draw.choice(("None", "Samples(inputs[:7], targets[:7])"))
    lines = [
        "draw = torch.Generator().manual_seed(0)",
        f"inputs = {DATA[family.inputs]}",
        "targets = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)",
        f"return Splits(Samples(inputs, targets), {held_out})",
    ]
    text = f"{_SAMPLES.format(item=item)}\n\n{_function('data()', lines)}"
    line = (
        f"inputs = inputs * {draw.choice(_DRAWS)}"
        if family.inputs != WORDS
        else "inputs = inputs.roll(random.choice((0, 1)), 1)"
    )
    if is_named or draw.random() < 0.25:
        line = 'inputs = {"inputs": inputs}' if is_named else line
        text += f"\n\n{_COLLATE.format(line=line)}"
    return text


def _around(draw: random.Random, family: Family, habits: Sequence[Habit]) -> tuple[list[str], int, str]:
    """The file's own loss, optimizer and schedule, where it has them, the number of samples, and the settings."""
    own: list[str] = []
    micro = draw.choice((2, 3, 4))
    size = micro * draw.choice((3, 4, 5))
    # A last micro-batch of one sample is an error of torch's in batch norm, on every layout.
    rest = draw.choice([each for each in range(size) if each % micro != 1])
    lines = ['name="random"', f"seed={draw.randrange(100)}", f"global_batch_size={size}", f"micro_batch={micro}"]
    lines += ["epochs=3", "max_steps=3", f'last_batch="{draw.choice(("drop", "keep"))}"']
    if body := draw.choice(LOSSES):
        own.append(_function("loss(outputs, targets)", [body]))
    # What is unfrozen later must be in the optimizer from the beginning, which the built-in ones cannot know.
    if any("requires_grad_" in each.callback for each in habits) or draw.random() < 0.6:
        rule = draw.choice((*OWN_RULES, *UPDATES))
        if rule in UPDATES:
            own.append(_SIGNED.format(rule=rule, elementwise=rule == UPDATES[0]))
            rule = "Signed(kept)"
        own.append(_function("optimizer(model)", ["kept = list(model.parameters())", f"return {rule}"]))
    else:
        lines.append(f"optimizer={draw.choice(BUILT_IN)}")
    kind = draw.random()
    if kind < 0.3:
        own.append(_function("schedule(optimizer, total_steps)", [f"return {draw.choice(SCHEDULES)}"]))
    elif kind < 0.6:
        lines.append(f'schedule=Schedule(name="{draw.choice(("cosine", "step"))}", warmup_steps={draw.choice((0, 1))})')
    lines.append(f'precision="{draw.choice(("fp32", "fp32", "bf16", "fp16"))}"')
    if draw.random() < 0.4:
        lines.append(f"clip_norm={draw.choice((0.1, 1.0))}")
    if draw.random() < 0.3:
        lines.append("ema_decay=0.9")
    if family.inputs == IMAGES and draw.random() < 0.5:
        lines.append('memory_format="channels_last"')
    lines += dict.fromkeys(setting for each in habits for setting in each.settings)
    return own, size * draw.choice((1, 2)) + rest, "\n".join(f"{each}," for each in lines)

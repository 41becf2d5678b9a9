"""Does an optimizer or a schedule of torch or of pytorch_optimizer end with the same bits on every layout?

It trains a transformer of two narrow layers, with dropout, for four steps.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ddp_core import Experiment, Splits

WORDS, LENGTH, SAMPLES, WIDTH = 100, 12, 24, 32
# What these of pytorch_optimizer need beside parameters and a rate.
_NEEDED: dict[str, dict[str, Any]] = {"bsam": {"num_data": SAMPLES}, "ranger21": {"num_iterations": 100}}
_ELEMENTWISE = (
    *("accsgd", "adabelief", "adabound", "adadelta", "adam", "adamax", "adamc", "adamg", "adamod", "adamw", "adamwsn"),
    *("adan", "adapnm", "adasmooth", "ademamix", "adopt", "aggmo", "ano", "apollo", "bcos", "diffgrad", "dualadam"),
    *("emolynx", "emonavi", "exadam", "fira", "focus", "ftrl", "galore", "grams", "grokfastadamw", "kate", "laprop"),
    *("lion", "madgrad", "msvag", "nadam", "padam", "pid", "pnm", "qhadam", "qhm", "radam", "rmsprop", "sara"),
    *("schedulefreeadamw", "schedulefreeradam", "schedulefreesgd", "sgd", "sgdw", "signsgd", "simplifiedademamix"),
    *("srmm", "tiger", "vsgd", "yogi"),
)
"""Those that update each element by itself, which their classes do not say."""
_IN_TWO_GROUPS = ("adago", "adamuon", "muon", "muonclip", "normuon")
_OF_A_MODEL = ("adalomo", "adammini", "lomo")


def transformer(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=dropout, batch_first=True)
    inside = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), inside, nn.Linear(WIDTH, WORDS))


def made(name: str, given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of pytorch_optimizer with this name."""
    import pytorch_optimizer

    known: Any = pytorch_optimizer.load_optimizer(name)
    if name in _ELEMENTWISE:
        known.elementwise = True
    kind = functools.partial(known, **_NEEDED.get(name, {}))
    parameters: list[Any] = list(given)
    if name in _IN_TWO_GROUPS:
        matrices = [each for each in parameters if each.dim() == 2]
        others = [each for each in parameters if each.dim() != 2]
        parameters = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    try:
        optimizer: Any = kind(parameters, lr=0.01)
    except TypeError:
        optimizer = kind(parameters)
    if hasattr(optimizer, "train"):
        optimizer.train()  # of those without a schedule
    return optimizer  # type: ignore[no-any-return]


def model(dropout: float = 0.1, matrices_alone: bool = False) -> nn.Module:
    """`matrices_alone`: only these are trained, for an optimizer that takes no others."""
    whole = transformer(dropout)
    for parameter in whole.parameters():
        parameter.requires_grad_(not matrices_alone or parameter.dim() == 2)
    return whole


def data() -> Splits:
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return Splits([(row, row.roll(-1)) for row in words], None)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def optimizer(model: nn.Module, library: str = "torch", rule: str = "SGD") -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    if library == "torch":
        return getattr(torch.optim, rule)(trained, lr=0.01)  # type: ignore[no-any-return]
    import pytorch_optimizer

    if rule in _OF_A_MODEL:
        return pytorch_optimizer.load_optimizer(rule)(model)  # type: ignore[no-any-return]
    if rule == "magma":  # it wraps another
        return pytorch_optimizer.load_optimizer(rule)(torch.optim.AdamW(trained, lr=0.01))  # type: ignore[no-any-return]
    return made(rule, trained)


def _sequence(optimizer: torch.optim.Optimizer, _: int) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def _chain(optimizer: torch.optim.Optimizer, _: int) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


Maker = Callable[[torch.optim.Optimizer, int], Any]
OF_TORCH: dict[str, Maker] = {
    "LambdaLR": lambda each, steps: lr_scheduler.LambdaLR(each, lambda step: 1 - step / steps),
    "MultiplicativeLR": lambda each, steps: lr_scheduler.MultiplicativeLR(each, lambda step: 0.9),
    "StepLR": lambda each, steps: lr_scheduler.StepLR(each, 1, 0.7),
    "MultiStepLR": lambda each, steps: lr_scheduler.MultiStepLR(each, [1, 3]),
    "ConstantLR": lambda each, steps: lr_scheduler.ConstantLR(each, 0.5, 2),
    "LinearLR": lambda each, steps: lr_scheduler.LinearLR(each, 0.1, total_iters=steps),
    "ExponentialLR": lambda each, steps: lr_scheduler.ExponentialLR(each, 0.8),
    "SequentialLR": _sequence,
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,
    "ChainedScheduler": _chain,
    "ReduceLROnPlateau": lambda each, steps: lr_scheduler.ReduceLROnPlateau(each),
    "CyclicLR": lambda each, steps: lr_scheduler.CyclicLR(each, 0.001, 0.01, 2),
    "CosineAnnealingWarmRestarts": lambda each, steps: lr_scheduler.CosineAnnealingWarmRestarts(each, 2),
    "OneCycleLR": lambda each, steps: lr_scheduler.OneCycleLR(each, 0.02, total_steps=steps),
    "PolynomialLR": lambda each, steps: lr_scheduler.PolynomialLR(each, steps),
}
"""Every schedule of torch, each so short that its rates differ from step to step."""
OF_PYTORCH_OPTIMIZER: dict[str, dict[str, Any]] = {
    "chebyshev": {"num_epochs": 4},
    "cosine": {"t_max": 4, "max_lr": 0.01, "warmup_steps": 1},
    "cosine_annealing_with_warmup": {"first_cycle_steps": 4, "max_lr": 0.01, "warmup_steps": 1},
    "linear": {"t_max": 4, "max_lr": 0.01, "warmup_steps": 1},
    "poly": {"t_max": 4, "max_lr": 0.01, "warmup_steps": 1},
    "rex": {"total_steps": 4, "max_lr": 0.01},
    "warmup_stable_decay": {"num_warmup_steps": 1, "num_stable_steps": 1, "num_decay_steps": 2},
    "proportion": {"max_lr": 0.01},
}
"""Every schedule that pytorch_optimizer adds to those of torch."""


def schedule(optimizer: torch.optim.Optimizer, total_steps: int, curve: str = "ConstantLR") -> Any:
    if curve in OF_TORCH:
        return OF_TORCH[curve](optimizer, total_steps)
    import pytorch_optimizer

    kind, options = pytorch_optimizer.load_lr_scheduler(curve), OF_PYTORCH_OPTIMIZER[curve]
    # This one follows another schedule.
    return kind(OF_TORCH["LinearLR"](optimizer, total_steps) if curve == "proportion" else optimizer, **options)


experiment = Experiment(name="foreign_updates", global_batch_size=6, micro_batch=2)

"""Which parameters of a module are trained: the flags `requires_grad`, and whether they have changed."""

from __future__ import annotations

from torch import nn

from .refusal import DependsOnLayout


class TrainedParameters:
    """The flags `requires_grad` of a module's parameters as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        self._all = list(module.parameters())
        self._flags = [parameter.requires_grad for parameter in self._all]
        self.parameters = [parameter for parameter in self._all if parameter.requires_grad]
        """Those that are trained."""

    def changes(self) -> dict[str, bool]:
        """The parameters whose flag is another by now, with what it is."""
        now = [parameter.requires_grad for parameter in self._all]
        if now == self._flags:
            return {}
        return {name: flag for name, flag, was in zip(self._names, now, self._flags, strict=True) if flag != was}

    def refuse_changes(self) -> None:
        """Raise DependsOnLayout where a flag has changed, naming the first parameter."""
        if changes := self.changes():
            raise DependsOnLayout(
                f"{describe_changes(changes)}, since this reduction was made: gradients would be lost or pile up, "
                "otherwise on each layout; set requires_grad between steps, with `ddp train` in a callback of all "
                "ranks, and in a loop of your own make the reduction, and DistributedDataParallel, anew afterwards"
            )


def describe_changes(changes: dict[str, bool]) -> str:
    """What is trained or frozen now, in words."""
    words = []
    for flag, word in ((True, "trained"), (False, "frozen")):
        names = [name for name, now in changes.items() if now is flag]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            words.append(f"{names[0]}{more} {'are' if more else 'is'} {word} now")
    return ", ".join(words)

"""Does an architecture of Hugging Face's transformers end with the same bits on every layout?

Each is made from a configuration of two narrow layers, with weights that are drawn; nothing is fetched. The model is
given as it is: its inputs by name, and a loss of the `logits` of what it returns.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core import Experiment, Splits
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.config.experiment import DdpOptions

WORDS, LENGTH, CLASSES, SAMPLES = 64, 12, 10, 12
SMALL: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
}
OF_WORDS: dict[str, Any] = SMALL | {
    **{"vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"num_key_value_heads": 2, "head_dim": 8, "embedding_size": 32, "d_model": 32},
}
OF_PAIRS: dict[str, Any] = OF_WORDS | {
    **{"encoder_layers": 2, "encoder_ffn_dim": 48, "encoder_attention_heads": 4, "num_layers": 2, "num_heads": 4},
    **{"decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4, "decoder_start_token_id": 1},
    **{"d_kv": 8, "d_ff": 48},
}
OF_IMAGES: dict[str, Any] = SMALL | {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
OF_SOUND: dict[str, Any] = SMALL | {
    "num_labels": CLASSES,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("AutoModelForCausalLM", OF_WORDS),
    "masked": ("AutoModelForMaskedLM", OF_WORDS),
    "pairs": ("AutoModelForSeq2SeqLM", OF_PAIRS),
    "images": ("AutoModelForImageClassification", OF_IMAGES),
    "sound": ("AutoModelForAudioClassification", OF_SOUND),
}
"""By task: the class that makes its models, and the sizes of all of them."""


def configuration(task: str, architecture: str) -> Any:
    """The configuration; this also imports what the model is made of."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_torchvision()  # transformers imports it, too
    import transformers

    transformers.logging.set_verbosity_error()
    maker, sizes = TASKS[task]
    made = transformers.AutoConfig.for_model(architecture, **sizes)
    getattr(transformers, maker)._model_mapping[type(made)]
    return made


def model(task: str = "masked", architecture: str = "bert") -> nn.Module:
    made = configuration(task, architecture)
    import transformers

    maker: Any = getattr(transformers, TASKS[task][0])
    return maker.from_config(made)  # type: ignore[no-any-return]


def data(task: str = "masked") -> Splits:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=draw)
    classes = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    if task == "images":
        named, targets = {"pixel_values": torch.randn(SAMPLES, 3, 32, 32, generator=draw)}, classes
    elif task == "sound":
        named, targets = {"input_values": torch.randn(SAMPLES, 1600, generator=draw)}, classes
    elif task == "pairs":
        named, targets = {"input_ids": words, "decoder_input_ids": words.roll(1, 1)}, words
    elif task == "causal":
        named, targets = {"input_ids": words}, words.roll(-1, 1)
    else:
        seen = words.masked_fill(torch.rand(words.shape, generator=draw) < 0.2, 3)
        named, targets = {"input_ids": seen, "attention_mask": torch.ones_like(seen)}, words
    return Splits([({name: rows[at] for name, rows in named.items()}, targets[at]) for at in range(SAMPLES)], None)


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits.flatten(0, -2), targets.flatten(), reduction="sum")


def optimizer(model: nn.Module, lr: float = 0.001) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


experiment = Experiment(
    name="foreign_transformers",
    clip_norm=1.0,
    # Some use a part of their weights in some batches only, as DistributedDataParallel is to be told.
    ddp=DdpOptions(find_unused_parameters=True),
    global_batch_size=6,
    micro_batch=2,
)

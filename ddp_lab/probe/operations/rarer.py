"""Operations that fewer models use: more activations, losses, layers, special functions, reductions and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from ddp_lab.probe.operations.inputs import (
    Operations,
    backward,
    integers,
    numbers,
    of_module,
    positive,
    seeded,
    with_gradients,
)
from ddp_lab.probe.operations.optimizers import updated

_LENGTH = 1003


def rarer() -> Operations:
    """The operations of all kinds by name."""
    kinds = [_activations(), _functions(), _reductions(), _losses(), _layers(), _products(), _algebra(), _optimizers()]
    return {name: operation for kind in kinds for name, operation in kind.items()}


def _activations() -> Operations:
    names = ["hardsigmoid", "hardtanh", "relu6", "softsign", "tanhshrink", "softshrink", "hardshrink", "softmin"]
    wide = partial(numbers, _LENGTH, scale=8)
    functions: dict[str, Callable[..., Tensor]] = {name: getattr(functional, name) for name in names}
    functions["softmin"] = partial(functional.softmin, dim=0)
    functions["threshold"] = partial(functional.threshold, threshold=0.5, value=-1.0)
    functions["tanh"], functions["sigmoid"] = torch.tanh, torch.sigmoid
    functions |= {name: getattr(torch, name) for name in ("exp", "sin", "cos", "erf", "atan", "sinh")}
    differentiated: dict[str, tuple[Any, ...]] = {name: (function, wide()) for name, function in functions.items()}
    differentiated["log"] = (torch.log, positive(_LENGTH, scale=64))
    differentiated["logit"] = (torch.logit, positive(_LENGTH, scale=0.5))
    differentiated["pow of two tensors"] = (torch.pow, positive(_LENGTH, scale=4), numbers(_LENGTH, key=1))
    return backward(differentiated) | {
        "gumbel_softmax": lambda: seeded(lambda: functional.gumbel_softmax(numbers(31, 67), tau=0.7)),
        "rrelu in evaluation": lambda: functional.rrelu(wide(), training=False),
    }


def _functions() -> Operations:
    above, wide = partial(positive, _LENGTH, scale=16), partial(numbers, _LENGTH, scale=8)
    of_positive = ["i0", "i0e", "i1", "i1e", "erfcx", "ndtr", "log_ndtr", "entr", "bessel_j0", "bessel_j1", "digamma"]
    return {
        **{f"special {name}": partial(_computed, getattr(torch.special, name), above) for name in of_positive},
        "special ndtri": lambda: torch.special.ndtri(positive(_LENGTH, scale=0.5)),
        "special polygamma": lambda: torch.special.polygamma(2, above()),
        "special zeta": lambda: torch.special.zeta(1 + above(), 1 + positive(_LENGTH, key=1)),
        "special xlog1py": lambda: torch.special.xlog1py(wide(), above()),
        "special gammainc": lambda: [
            torch.special.gammainc(above(), above()),
            torch.special.gammaincc(above(), above()),
        ],
        "acosh": lambda: torch.acosh(1 + above()),
        "sinc": lambda: torch.sinc(wide()),
        "copysign, ldexp, nextafter": lambda: [
            torch.copysign(above(), wide()),
            torch.ldexp(wide(), integers(_LENGTH, below=9)),
            torch.nextafter(wide(), above()),
        ],
        "deg2rad, rad2deg": lambda: [torch.deg2rad(wide()), torch.rad2deg(wide())],
        "float_power": lambda: torch.float_power(above(), 1.7),
        "logaddexp2": lambda: torch.logaddexp2(wide(), above()),
        "exp of a half": lambda: wide(dtype=torch.float16).exp(),
        "sigmoid, gelu, silu bfloat16": lambda: [
            function(wide(dtype=torch.bfloat16)) for function in (torch.sigmoid, functional.gelu, functional.silu)
        ],
        "complex arithmetic": lambda: torch.view_as_real(
            torch.complex(wide(), above()) * torch.complex(above(), wide()) / torch.complex(above(), above())
        ),
        "complex exp, abs, angle": lambda: [
            torch.view_as_real(torch.complex(numbers(_LENGTH), above()).exp()),
            torch.complex(wide(), above()).abs(),
            torch.complex(wide(), above()).angle(),
        ],
    }


def _computed(function: Callable[[Tensor], Tensor], inputs: Callable[[], Tensor]) -> Tensor:
    return function(inputs())


def _reductions() -> Operations:
    table = partial(numbers, 137, 211)
    differentiated: dict[str, tuple[Any, ...]] = {
        "logcumsumexp": (partial(torch.logcumsumexp, dim=1), numbers(31, 67)),
        "cumsum": (partial(torch.cumsum, dim=0), table()),
        "logsumexp": (partial(torch.logsumexp, dim=0), table()),
        "prod": (lambda x: (1 + x / 64).prod(1), table()),
        "norm": (partial(torch.linalg.vector_norm, dim=1), table()),
        "pairwise_distance": (functional.pairwise_distance, numbers(9, 65), numbers(9, 65, key=1)),
        "pdist": (functional.pdist, numbers(9, 65)),
    }
    return backward(differentiated) | {
        "std_mean, var_mean": lambda: [*torch.std_mean(table(), 1), *torch.var_mean(table(), 0)],
        "nansum, nanmean": lambda: [table().nansum(1), table().nanmean(0)],
        "cummax": lambda: torch.cummax(table(), 1)[0],
        "sum, mean float16": lambda: [table(dtype=torch.float16).sum(1), table(dtype=torch.float16).mean()],
        "var, std, backward": lambda: [
            *with_gradients(partial(torch.var, dim=1), table()),
            *with_gradients(partial(torch.std, dim=0), table()),
        ],
        "cov, corrcoef": lambda: [torch.cov(numbers(9, 65)), torch.corrcoef(numbers(9, 65))],
        "renorm": lambda: torch.renorm(table(), 2, 0, 1.0),
        "softmax bfloat16": lambda: numbers(31, 67, dtype=torch.bfloat16).softmax(1),
        "softmax of four dimensions": lambda: numbers(2, 3, 65, 7).softmax(2),
        "trapezoid, diff": lambda: [torch.trapezoid(table(), dim=1), torch.diff(table())],
    }


def _losses() -> Operations:
    values, targets = numbers(33, 10, scale=4), numbers(33, 10, key=1)
    signs = torch.where(targets > 0, 1.0, -1.0)
    classes = integers(33, below=10, key=1)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "poisson_nll_loss": lambda x: functional.poisson_nll_loss(x, targets.abs()),
        "soft_margin_loss": lambda x: functional.soft_margin_loss(x, signs),
        "hinge_embedding_loss": lambda x: functional.hinge_embedding_loss(x, signs),
        "multi_margin_loss": lambda x: functional.multi_margin_loss(x, classes),
        "multilabel_soft_margin_loss": lambda x: functional.multilabel_soft_margin_loss(x, targets.gt(0).float()),
        "multilabel_margin_loss": lambda x: functional.multilabel_margin_loss(x, integers(33, 10, below=10)),
        "margin_ranking_loss": lambda x: functional.margin_ranking_loss(x, targets, signs),
        "cosine_embedding_loss": lambda x: functional.cosine_embedding_loss(x, targets, signs[:, 0]),
        "cross_entropy of shares": lambda x: functional.cross_entropy(x, targets.softmax(1)),
        "cross_entropy with weights": lambda x: functional.cross_entropy(x, classes, positive(10), reduction="mean"),
        "nll_loss of images": lambda x: functional.nll_loss(
            x.view(3, 10, 11).log_softmax(1)[..., None], integers(3, 11, 1, below=10)
        ),
    }
    return backward({name: (loss, values) for name, loss in losses.items()})


def _layers() -> Operations:
    images, lines = partial(numbers, 4, 6, 9, 9), partial(numbers, 4, 6, 33)
    volumes = partial(numbers, 2, 3, 6, 7, 8)
    scale, attend = functional.interpolate, functional.scaled_dot_product_attention
    heads, mask = [numbers(2, 4, 19, 16, key=key) for key in range(3)], numbers(19, 19, key=9)
    long, few = [numbers(1, 2, 600, 32, key=key) for key in range(3)], [numbers(1, 1, 40, 8, key=key) for key in (1, 2)]
    shared, dropping = [numbers(2, 2, 33, 16, key=key).half() for key in (1, 2)], partial(attend, dropout_p=0.2)
    seen = mask > 0
    seen[3] = False  # the fourth query sees no key
    differentiated: dict[str, tuple[Any, ...]] = {
        "conv_transpose1d": (nn.ConvTranspose1d(6, 5, 3, stride=2), lines()),
        "conv_transpose3d": (nn.ConvTranspose3d(3, 4, 3), volumes()),
        "conv1d grouped": (nn.Conv1d(6, 12, 5, groups=3), lines()),
        "conv2d 5x5 with padding same": (nn.Conv2d(6, 7, 5, padding="same"), images()),
        "conv2d by reflection": (nn.Conv2d(6, 7, 3, padding=1, padding_mode="reflect"), images()),
        "conv2d depthwise 7x7": (nn.Conv2d(6, 6, 7, padding=3, groups=6), images()),
        "conv2d of 128 channels 1x1": (nn.Conv2d(128, 96, 1), numbers(2, 128, 7, 7)),
        "batch_norm of 3d": (nn.BatchNorm3d(3), volumes()),
        "LSTMCell": (nn.LSTMCell(7, 9), numbers(5, 7)),
        "bidirectional GRU": (nn.GRU(7, 9, bidirectional=True), numbers(11, 3, 7)),
        "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(17, 9)), numbers(5, 17)),
        "attention with a mask": (partial(attend, attn_mask=mask), *heads),
        "attention of long rows": (partial(attend, is_causal=True), *long),
        "attention of 1,100 queries": (attend, numbers(1, 1, 1100, 8), *few),
        "attention float16 of shared keys": (partial(attend, enable_gqa=True), heads[0].half(), *shared),
        "attention with a query without keys": (partial(attend, attn_mask=seen), *heads),
        "attention float64": (attend, *(each.double() for each in heads)),
        "transformer decoder layer": (
            nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0),
            numbers(9, 2, 16),
            numbers(7, 2, 16, key=1),
        ),
    }
    return backward(differentiated) | {
        "max_pool1d, max_pool3d, backward": lambda: [
            *with_gradients(partial(functional.max_pool1d, kernel_size=3), lines()),
            *with_gradients(partial(functional.max_pool3d, kernel_size=2), volumes()),
        ],
        "adaptive_avg_pool1d, 3d, backward": lambda: [
            *with_gradients(partial(functional.adaptive_avg_pool1d, output_size=5), lines()),
            *with_gradients(partial(functional.adaptive_avg_pool3d, output_size=3), volumes()),
        ],
        "interpolate linear, trilinear, backward": lambda: [
            *with_gradients(partial(scale, scale_factor=1.7, mode="linear"), lines()),
            *with_gradients(partial(scale, scale_factor=1.7, mode="trilinear"), volumes()),
        ],
        "pad by replication, circular, backward": lambda: [
            *with_gradients(lambda x: functional.pad(x, (2, 1, 1, 2), mode="replicate"), images()),
            *with_gradients(lambda x: functional.pad(x, (2, 1, 1, 2), mode="circular"), images()),
        ],
        "GRUCell, RNNCell, backward": lambda: [
            *of_module(nn.GRUCell(7, 9), numbers(5, 7), numbers(5, 9, key=1)),
            *of_module(nn.RNNCell(7, 9), numbers(5, 7), numbers(5, 9, key=1)),
        ],
        "channel_shuffle": lambda: functional.channel_shuffle(images(), 3),
        "alpha_dropout": lambda: seeded(lambda: functional.alpha_dropout(numbers(_LENGTH), 0.4)),
        "attention bfloat16": lambda: attend(heads[0].bfloat16(), heads[1].bfloat16(), heads[2].bfloat16()),
        "attention with dropout, backward": lambda: seeded(lambda: with_gradients(dropping, *heads)),
    }


def _products() -> Operations:
    matrix, vector, batch = numbers(37, 53), numbers(53, key=1), numbers(5, 17, 23)
    differentiated: dict[str, tuple[Any, ...]] = {
        "matmul of broadcast batches": (torch.matmul, batch, numbers(23, 11, key=1)),
        "products of groups of rows": (
            partial(functional.grouped_mm, offs=torch.tensor([8, 16, 24], dtype=torch.int32)),
            numbers(24, 16),
            numbers(3, 16, 8, key=1),
        ),
    }
    return backward(differentiated) | {
        "addmv, addr": lambda: [
            torch.addmv(numbers(37, key=2), matrix, vector),
            torch.addr(matrix, numbers(37), vector),
        ],
        "addbmm": lambda: torch.addbmm(numbers(17, 11), batch, numbers(5, 23, 11, key=1)),
        "tensordot, kron": lambda: [
            torch.tensordot(batch, numbers(23, 7), 1),
            torch.kron(numbers(5, 7), numbers(3, 4)),
        ],
        "chain_matmul": lambda: torch.linalg.multi_dot([matrix, numbers(53, 7), numbers(7, 41, key=1)]),
        "matrix_power": lambda: torch.linalg.matrix_power(numbers(17, 17), 5),
        "matmul complex": lambda: torch.view_as_real(
            torch.complex(matrix, -matrix) @ torch.complex(numbers(53, 9), numbers(53, 9, key=1))
        ),
        "floor_divide": lambda: [
            torch.floor_divide(numbers(_LENGTH, scale=8), positive(_LENGTH, key=1)),
            torch.floor_divide(integers(_LENGTH, below=99), 7),
        ],
        "embedding with a norm": lambda: functional.embedding(integers(31, below=50), numbers(50, 16), max_norm=0.5),
        "scatter_reduce amax, prod": lambda: [
            numbers(50).scatter_reduce(0, integers(99, below=50), numbers(99, key=1), reduce=kind)
            for kind in ("amax", "prod")
        ],
    }


def _algebra() -> Operations:
    square = numbers(17, 17) + 4 * torch.eye(17)
    differentiated: dict[str, tuple[Any, ...]] = {
        "solve": (torch.linalg.solve, square, numbers(17, 3, key=1)),
        "cholesky": (lambda x: torch.linalg.cholesky(x @ x.T + 8 * torch.eye(17)), numbers(17, 17)),
        "singular values": (torch.linalg.svdvals, numbers(19, 11)),
        "qr": (lambda x: torch.linalg.qr(x)[1], numbers(19, 11)),
        "fftn": (lambda x: torch.view_as_real(torch.fft.fftn(x)), numbers(2, 19, 16)),
        "fft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), numbers(5, 64)),
    }
    return backward(differentiated) | {
        "slogdet, pinv": lambda: [*torch.linalg.slogdet(square), torch.linalg.pinv(numbers(19, 11))],
        "lu_factor": lambda: torch.linalg.lu_factor(square)[0],
        "cholesky_solve": lambda: torch.cholesky_solve(numbers(17, 3), square.tril()),
    }


def _optimizers() -> Operations:
    makes: dict[str, Callable[..., Any]] = {
        "Adagrad fused": partial(optim.Adagrad, lr=0.01, fused=True),
        "Adafactor": optim.Adafactor,
        "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
        "RMSprop centered foreach": partial(optim.RMSprop, lr=0.01, centered=True, foreach=True),
        "SGD dampened": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    }
    return {name: partial(updated, make) for name, make in makes.items()}

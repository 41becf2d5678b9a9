"""Matrix products, convolutions, attention, recurrent layers, linear algebra and Fourier transforms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from ddp_lab.probe.operations.inputs import Operations, backward, numbers, of_module


def products() -> Operations:
    """Products of matrices and vectors."""
    bf16 = torch.bfloat16
    differentiated: dict[str, tuple[Any, ...]] = {
        "bmm": (torch.bmm, numbers(5, 17, 23), numbers(5, 23, 11, key=1)),
        "linear": (nn.Linear(65, 33), numbers(17, 65)),
        "linear of one sample": (nn.Linear(65, 33), numbers(1, 65)),
        "linear to one output": (nn.Linear(10, 1), numbers(8, 10)),
        "bilinear": (nn.Bilinear(5, 7, 9), numbers(8, 5), numbers(8, 7, key=1)),
    }
    return backward(differentiated) | {
        "matmul 37x53x41": lambda: numbers(37, 53) @ numbers(53, 41, key=1),
        "matmul 128x256x64": lambda: numbers(128, 256) @ numbers(256, 64, key=1),
        "matmul 8x1000x8": lambda: numbers(8, 1000) @ numbers(1000, 8, key=1),
        "matmul 300x16x300": lambda: numbers(300, 16) @ numbers(16, 300, key=1),
        "matmul of transposed": lambda: numbers(53, 37).T @ numbers(41, 53, key=1).T,
        "matmul float64": lambda: numbers(37, 53, dtype=torch.float64) @ numbers(53, 41, key=1, dtype=torch.float64),
        "matmul bfloat16": lambda: numbers(37, 53, dtype=bf16) @ numbers(53, 41, key=1, dtype=bf16),
        "matmul float16": lambda: numbers(37, 53).half() @ numbers(53, 41, key=1).half(),
        "matmul of integers": lambda: (numbers(17, 19) * 100).long() @ (numbers(19, 5) * 100).long(),
        "matrix times vector": lambda: [numbers(67, 129) @ numbers(129, key=1), numbers(129, key=1) @ numbers(129, 67)],
        "dot": lambda: numbers(1003) @ numbers(1003, key=1),
        "outer": lambda: torch.outer(numbers(37), numbers(41, key=1)),
        "bmm of small": lambda: numbers(64, 4, 4) @ numbers(64, 4, 4, key=1),
        "addmm": lambda: torch.addmm(numbers(41), numbers(37, 53), numbers(53, 41, key=1), beta=0.5, alpha=2.0),
        "baddbmm": lambda: torch.baddbmm(numbers(5, 17, 11), numbers(5, 17, 23), numbers(5, 23, 11, key=1)),
        "einsum": lambda: torch.einsum("nci,ndj,cd->nij", numbers(3, 5, 7), numbers(3, 6, 8, key=1), numbers(5, 6)),
        "linear in autocast, backward": partial(_autocast, 65, 33, 17),
    }


def _autocast(inputs: int, outputs: int, samples: int) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return of_module(nn.Linear(inputs, outputs), numbers(samples, inputs))


def products_in_chains() -> Operations:
    """What portable numerics compute in chains of fused multiply-adds, or raise to float32: of each kind."""
    wide, tall = partial(numbers, 96, 160), partial(numbers, 160, 128, key=1)
    batches = (numbers(3, 64, 144), numbers(3, 144, 128, key=1))
    weight = partial(numbers, key=50, scale=0.25)
    differentiated: dict[str, tuple[Any, ...]] = {
        "bmm, in chains": (torch.bmm, *batches),
        "linear, in chains": (nn.Linear(160, 128), numbers(96, 160)),
    }
    return backward(differentiated) | {
        "mm of three chains": lambda: numbers(64, 2500) @ numbers(2500, 96, key=1),
        "mm of transposed, in chains": lambda: numbers(160, 96).T @ numbers(128, 160, key=1).T,
        "mm of parts, in chains": lambda: numbers(192, 320)[::2, ::2] @ numbers(160, 256, key=1)[:, 1::2],
        "mm bfloat16, in chains": lambda: wide(dtype=torch.bfloat16) @ tall(dtype=torch.bfloat16),
        "mm float16, in chains": lambda: wide(dtype=torch.float16) @ tall(dtype=torch.float16),
        "mm of seven rows": lambda: numbers(7, 500) @ numbers(500, 400, key=1),
        "addmm, in chains": lambda: torch.addmm(numbers(128, key=2), wide(), tall(), beta=0.5, alpha=2.0),
        "addmm bfloat16, in chains": lambda: torch.addmm(
            numbers(128, key=2, dtype=torch.bfloat16), wide(dtype=torch.bfloat16), tall(dtype=torch.bfloat16)
        ),
        "baddbmm, in chains": lambda: torch.baddbmm(numbers(3, 64, 128, key=2), *batches),
        "linear in autocast, in chains, backward": partial(_autocast, 160, 128, 96),
        "conv2d 3x3": lambda: functional.conv2d(
            numbers(4, 6, 9, 9), weight(11, 6, 3, 3), numbers(11, key=51, scale=0.25), padding=1
        ),
        "conv2d 3x3 of 64 channels": lambda: functional.conv2d(numbers(2, 64, 8, 8), weight(64, 64, 3, 3), padding=1),
        "conv2d 7x7 with stride": lambda: functional.conv2d(
            numbers(2, 3, 32, 32), weight(64, 3, 7, 7), stride=2, padding=3
        ),
        "conv2d, gradient of weights": lambda: conv2d_weight(
            numbers(2, 64, 8, 8), [64, 64, 3, 3], numbers(2, 64, 8, 8, key=99), padding=1
        ),
    }


def convolutions() -> Operations:
    """Convolutions, forward and backward."""
    differentiated: dict[str, tuple[Any, ...]] = {
        "conv1d": (nn.Conv1d(5, 7, 3, padding=1), numbers(4, 5, 33)),
        "conv2d 3x3": (nn.Conv2d(6, 11, 3, padding=1), numbers(4, 6, 9, 9)),
        "conv2d of one channel": (nn.Conv2d(1, 24, 3, padding=1), numbers(8, 1, 8, 8)),
        "conv2d 1x1": (nn.Conv2d(17, 33, 1, bias=False), numbers(4, 17, 7, 7)),
        "conv2d 7x7 with stride": (nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), numbers(2, 3, 32, 32)),
        "conv2d of many channels": (nn.Conv2d(64, 64, 3, padding=1, bias=False), numbers(2, 64, 8, 8)),
        "conv2d grouped": (nn.Conv2d(8, 12, 3, groups=4), numbers(3, 8, 9, 9)),
        "conv2d depthwise": (nn.Conv2d(16, 16, 3, groups=16), numbers(3, 16, 9, 9)),
        "conv2d dilated": (nn.Conv2d(6, 5, 3, dilation=2), numbers(3, 6, 11, 11)),
        "conv2d float64": (nn.Conv2d(6, 5, 3, dtype=torch.float64), numbers(3, 6, 9, 9, dtype=torch.float64)),
        "conv3d": (nn.Conv3d(3, 4, 3), numbers(2, 3, 6, 7, 8)),
        "conv_transpose2d": (nn.ConvTranspose2d(6, 5, 3, stride=2, padding=1), numbers(3, 6, 7, 7)),
    }
    return backward(differentiated) | {
        "conv2d channels_last, backward": _channels_last,
        "conv2d in bfloat16": lambda: functional.conv2d(
            numbers(3, 6, 9, 9, dtype=torch.bfloat16), numbers(5, 6, 3, 3, key=1, dtype=torch.bfloat16)
        ),
    }


def _channels_last() -> list[Tensor]:
    layer = nn.Conv2d(16, 32, 3, padding=1)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return of_module(layer, numbers(4, 16, 9, 9).contiguous(memory_format=torch.channels_last))


def sequences() -> Operations:
    """Attention and recurrent layers, forward and backward."""
    queries = [numbers(2, 4, 19, 16, key=key) for key in range(3)]
    found: dict[str, tuple[Any, ...]] = {
        "attention": (functional.scaled_dot_product_attention, *queries),
        "causal attention": (partial(functional.scaled_dot_product_attention, is_causal=True), *queries),
        "multi-head attention": (nn.MultiheadAttention(16, 4), *(numbers(9, 2, 16, key=key) for key in range(3))),
        "transformer layer": (nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), numbers(9, 2, 16)),
        "RNN": (nn.RNN(7, 9), numbers(11, 3, 7)),
        "LSTM": (nn.LSTM(7, 9, num_layers=2), numbers(11, 3, 7)),
        "GRU": (nn.GRU(7, 9), numbers(11, 3, 7)),
    }
    return backward(found)


def algebra() -> Operations:
    """Linear algebra and Fourier transforms."""
    square = numbers(17, 17) + 4 * torch.eye(17)
    even = numbers(17, 17) + numbers(17, 17).T + 8 * torch.eye(17)
    return {
        "cholesky": lambda: torch.linalg.cholesky(even),
        "solve": lambda: torch.linalg.solve(square, numbers(17, 3, key=1)),
        "inv, det": lambda: [torch.linalg.inv(square), torch.linalg.det(square)],
        "qr": lambda: torch.linalg.qr(numbers(19, 11)),
        "svd": lambda: torch.linalg.svdvals(numbers(19, 11)),
        "eigh": lambda: torch.linalg.eigvalsh(even),
        "matrix_exp": lambda: torch.linalg.matrix_exp(numbers(7, 7)),
        "triangular solve": lambda: torch.linalg.solve_triangular(square.tril(), numbers(17, 3, key=1), upper=False),
        "fft": lambda: torch.view_as_real(torch.fft.fft(numbers(100))),
        "rfft of 64": lambda: torch.view_as_real(torch.fft.rfft(numbers(5, 64))),
        "fft of two dimensions": lambda: torch.view_as_real(torch.fft.fft2(numbers(12, 15))),
        "irfft": lambda: torch.fft.irfft(torch.fft.rfft(numbers(5, 64))),
        "stft": lambda: torch.view_as_real(
            torch.stft(numbers(400), 64, window=torch.hann_window(64), return_complex=True)
        ),
    }

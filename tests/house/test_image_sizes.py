"""What makes up an image is told from what the engine says of it; the engine's words are played here."""

from __future__ import annotations

import json

from tests.support.commands import command
from tools.image_sizes import Part, layers, packages, table

MEGABYTE = 1_000_000


def step(size: int, created_by: str) -> str:
    return json.dumps({"Size": str(size), "CreatedBy": created_by, "ID": "<missing>"})


def test_layers_begin_with_the_base_and_leave_out_what_takes_no_room() -> None:
    history = [
        step(0, 'CMD ["what-to-do"]'),
        step(7, "RUN |2 TORCH=cpu TORCH_CUDA= /bin/sh -c install   torch | tee log # buildkit"),
        step(5, "COPY ddp_core ddp_core # buildkit"),
        step(9, ""),
    ]
    assert layers(history) == [
        Part(9, "the base image"),
        Part(5, "`COPY ddp_core ddp_core`"),
        Part(7, "`install torch \\| tee log`"),
    ]


def test_a_package_is_counted_with_its_libraries_and_those_of_cuda_one_by_one() -> None:
    files = [
        "5 torch/lib/libtorch.so",
        "2 torch-2.13.0+cpu.dist-info/RECORD",
        "4 numpy/__init__.py",
        "8 numpy.libs/libopenblas.so",
        "3 nvidia/cudnn/lib/libcudnn.so.9",
        "1 typing_extensions.py",
    ]
    assert packages(files) == [
        Part(12, "numpy"),
        Part(7, "torch"),
        Part(3, "nvidia/cudnn"),
        Part(1, "typing_extensions"),
    ]


def test_small_parts_are_one_line() -> None:
    parts = [Part(3 * MEGABYTE, "a"), Part(600_000, "b"), Part(500_000, "c")]
    assert table("package", parts).splitlines()[2:] == ["| a | 3 |", "| 2 smaller ones | 1 |"]


def test_without_docker_it_is_said_in_one_line() -> None:
    ended = command("samebits-cpu:latest", program=("-m", "tools.image_sizes"), env={"PATH": "/nowhere"})
    assert ended.code == 4
    (line,) = ended.errors.splitlines()
    assert line.startswith("image-sizes: there is no docker command (make image")

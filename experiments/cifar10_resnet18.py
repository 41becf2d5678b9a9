"""Does a recipe from the literature reach its published accuracy on every layout?

CIFAR-10 (Krizhevsky 2009) with ResNet-18 in its form for 32x32 images, random crops and flips; SGD 0.1, momentum 0.9,
weight decay 5e-4, batch 128, cosine over 200 epochs: the recipe that github.com/kuangliu/pytorch-cifar publishes with a
test accuracy of 0.9547. Needs the data once: `ddp data fetch cifar10`. Meant for a GPU; `--set max_steps=5` is a short
trial for a CPU.
"""

from ddp_core import Component, Experiment, Optimizer, Schedule

experiment = Experiment(
    name="cifar10_resnet18",
    model=Component(name="resnet18", options={"classes": 10, "small_input": True}),
    data=Component(name="cifar10", options={"augment": True}),
    loss="cross_entropy",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4),
    schedule=Schedule(name="cosine"),
    global_batch_size=128,
    micro_batch=16,
    epochs=200,
    reduction="exact",
)

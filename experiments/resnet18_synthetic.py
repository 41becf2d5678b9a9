"""How fast does a ResNet-18 train on 224x224 images, and what does data parallelism cost and gain?

Random images and labels, 256 per step, SGD with Nesterov momentum, 5 epochs of 100 steps; look at samples per second
and memory, not at the loss. Plain reduction; each rank takes its share at once. Meant for GPUs. A CPU can run this
smaller form in about ten seconds: `--set data.image_size=64 --set data.samples=128 --set data.pool=128 --set
global_batch_size=16 --set max_steps=8`
"""

from ddp_core import Component, Experiment, Optimizer

experiment = Experiment(
    name="resnet18_synthetic",
    model=Component(name="resnet18", options={"classes": 10, "small_input": False}),
    data=Component(name="random_images", options={"samples": 25_600, "image_size": 224, "pool": 256, "seed": 0}),
    loss="cross_entropy",
    optimizer=Optimizer(name="sgd", lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4),
    global_batch_size=256,
    epochs=5,
    reduction="plain",
)

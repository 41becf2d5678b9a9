"""Does what holds for 1,797 digits hold for 70,000 pictures of clothes?

Fashion-MNIST (Xiao, Rasul, Vollgraf 2017) with the small CNN of `digits`, 32 wide instead of 24, random crops and
flips, AdamW and a cosine schedule. Needs the data once: `ddp data fetch fashion_mnist`. Networks of this size are
published at about 0.93 test accuracy. Takes minutes per epoch on one CPU core; `--set max_steps=50` is a short trial.
"""

from ddp_core import Component, Experiment, Optimizer, Schedule

experiment = Experiment(
    name="fashion_mnist",
    model=Component(name="small_cnn", options={"width": 32, "dropout": 0.25, "image_size": 28}),
    data=Component(name="fashion_mnist", options={"augment": True}),
    loss="cross_entropy",
    optimizer=Optimizer(name="adamw", lr=0.002, weight_decay=0.01),
    schedule=Schedule(name="cosine", warmup_steps=200),
    global_batch_size=128,
    micro_batch=16,
    epochs=15,
    reduction="exact",
)

"""Does a transformer that learns to write end with the same weights on every layout?

Lewis Carroll's "Alice's Adventures in Wonderland", 148,480 characters that come with the package, the last tenth held
out; two blocks, 64 wide, that see up to 64 characters. Each global batch of 32 is always cut into M = 8 micro-batches.
Expect 1.76 to 1.80 nats for each held-out character (over the seeds 0 to 2), which is 2.54 to 2.60 bits, and 0.48 to
0.49 of them guessed; counts of pairs of characters need 3.54 bits. Takes less than a minute for one process with one
thread. `--set model.width=512 --set model.depth=8 --set optimizer.lr=0.001` has 25 million parameters, whose gradients
and optimizer state are most of the memory.
"""

from ddp_core import Component, Experiment, Optimizer, Schedule

experiment = Experiment(
    name="char_transformer",
    model=Component(name="transformer", options={"width": 64, "depth": 2, "heads": 4, "dropout": 0.05}),
    data=Component(name="characters", options={"length": 64, "stride": 32}),
    loss="sequence_cross_entropy",
    optimizer=Optimizer(name="adamw", lr=0.01, betas=(0.9, 0.99), weight_decay=0.1),
    schedule=Schedule(name="cosine", warmup_steps=20),
    global_batch_size=32,
    micro_batch=4,
    epochs=3,
    clip_norm=1.0,
    reduction="exact",
)

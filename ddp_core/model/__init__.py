"""What the experiment's names mean: models, losses and optimizers, by the name that an experiment file gives them."""

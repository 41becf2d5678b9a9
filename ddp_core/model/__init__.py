"""Models, losses and optimizers, by the names that an experiment file gives them."""

"""From a data set's name to the tensors of one micro-batch: builders, downloads, splits, augmentation, the loader.

Which samples come when is the sampler's business; here they are only fetched.
"""

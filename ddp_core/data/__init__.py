"""From a data set's name to the tensors of one micro-batch: builders, downloads, splits, augmentation, the loader.

The sampler decides which samples come when; here they are only fetched.
"""

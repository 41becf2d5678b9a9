"""From an experiment's file to model, data, loss and optimizer; and whose code an exception is from.

All that looks into the user's file is here: finding it, running it, naming what is wrong in it, collecting its source.
"""

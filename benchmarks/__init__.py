"""Figures of the documentation, each measured by one module."""

import os

# What is measured is the training alone, unless the shell says otherwise.
os.environ.setdefault("DDP_REHEARSAL", "off")

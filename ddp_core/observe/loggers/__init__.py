"""Loggers: other people's tools that keep a run's figures beside metrics.jsonl, one module for each tool.

A logger only listens: whatever it does, or fails to do, the training goes on. `background` sees to that, `choosing`
turns the words of `--log-to` into loggers, and `logger` says what a logger is.
"""

"""Loggers: other people's tools that keep a run's figures beside metrics.jsonl, one module for each tool.

A logger only listens: whatever it does, or fails to do, the training goes on. `logger` sees to that. Each other module
has a class `RunLogger` and imports its tool, which takes a second or two; nobody imports it unless `--log-to` names it.
"""

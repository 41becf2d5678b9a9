"""The experiment files of the fleet. A case of the table, as a command:

ddp train tests/foreign/experiments/images.py --set model.architecture=resnet18 --layout ddp --nproc-per-node 3
"""

"""What the published digests stand for: operations in a few lines of numpy each, without torch.

Each function says which additions and multiplications are made, in which order, and which of them round. Running the
package computes published digests from that alone: `python -m ddp_lab.probe.definition`.

`inputs` has the numbers that go in, `arithmetic` fused multiply-adds, sums and products, `operations` what is made of
them, by the names of the published table.
"""

"""The weights of a run in other people's formats: a folder with them and a card that says what they are.

A format is a function in `formats`; what it writes is whole or not there, and nothing that exists is written over.
"""

from ddp_core.record.exporting.export import export
from ddp_core.record.exporting.formats import FORMATS

__all__ = ["FORMATS", "export"]

"""Bytes on the wire, counted by the kernel for this process's own connections.

Linux counts for each TCP connection what it sent and what was acknowledged (`struct tcp_info` in linux/tcp.h). A
process may ask for its own sockets without any rights, and the traffic of others is not counted, as it would be in an
interface's counters.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from pathlib import Path

_BYTES_RECEIVED = 128
_BYTES_SENT = 200
_BYTES_SENT_AGAIN = 208
"""Offsets in tcp_info. tcpi_bytes_sent, since Linux 4.19, counts payload bytes, including those sent again."""


def can_count() -> bool:
    """Whether the kernel counts bytes per connection."""
    return sys.platform == "linux" and hasattr(socket, "TCP_INFO")


def bytes_moved() -> tuple[int, int]:
    """Payload bytes that all open TCP connections of this process have sent, and received, since they were made."""
    all_sent = all_received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM:
                    continue
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(information) >= _BYTES_SENT_AGAIN + 8:
            sent, again = struct.unpack_from("=QQ", information, _BYTES_SENT)
            all_sent += sent - again
            all_received += struct.unpack_from("=Q", information, _BYTES_RECEIVED)[0]
    return all_sent, all_received

"""`shape.py INTERFACE KBIT`: limit what this network namespace sends, as `tc qdisc … tbf` does; 0 undoes it.

It talks to the kernel directly (netlink, linux/pkt_sched.h), so that the image needs no `tc`. Needs CAP_NET_ADMIN.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_NEW, _DELETE = 36, 37  # RTM_NEWQDISC, RTM_DELQDISC
_REQUEST, _ACKNOWLEDGE, _REPLACE, _CREATE = 0x1, 0x4, 0x100, 0x400
_ROOT = 0xFFFFFFFF
_KIND, _OPTIONS, _PARAMETERS, _BURST = 1, 2, 1, 6  # TCA_KIND, TCA_OPTIONS, TCA_TBF_PARMS, TCA_TBF_BURST
_BURST_BYTES = 16384
_QUEUE_BYTES = 4 * 2**20
_NO_SUCH_ENTRY = 2


def message(interface: int, kbit: int) -> bytes:
    """The netlink request: header, tcmsg, and for a limit the token bucket's parameters."""
    tcm = struct.pack("BxxxiIII", socket.AF_UNSPEC, interface, 0, _ROOT, 0)
    if kbit == 0:
        body, kind, flags = tcm, _DELETE, _REQUEST | _ACKNOWLEDGE
    else:
        rate = kbit * 125
        ticks = int(_BURST_BYTES / rate * _ticks_per_second())
        # tc_ratespec: cell_log, linklayer (Ethernet), overhead, cell_align, mpu, rate.
        spec = struct.pack("BBHhHI", 0, 1, 0, -1, 0, rate)
        parameters = spec + struct.pack("BBHhHI", 0, 0, 0, 0, 0, 0) + struct.pack("III", _QUEUE_BYTES, ticks, 0)
        options = _attribute(_PARAMETERS, parameters) + _attribute(_BURST, struct.pack("I", _BURST_BYTES))
        body = tcm + _attribute(_KIND, b"tbf\0") + _attribute(_OPTIONS, options)
        kind, flags = _NEW, _REQUEST | _ACKNOWLEDGE | _REPLACE | _CREATE
    return struct.pack("IHHII", 16 + len(body), kind, flags, 1, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _ticks_per_second() -> float:
    """The kernel's unit of time for packet schedulers."""
    with open("/proc/net/psched") as file:  # noqa: PTH123
        nanoseconds, per_tick, *_ = (int(word, 16) for word in file.read().split())
    return 1e6 * nanoseconds / per_tick


def main(words: list[str]) -> int:
    """Returns 0, or 1 where the kernel refuses; prints the kernel's reason."""
    interface, kbit = socket.if_nametoindex(words[0]), int(words[1])
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.bind((0, 0))
        kernel.send(message(interface, kbit))
        (number,) = struct.unpack_from("i", kernel.recv(4096), 16)
    if number and not (kbit == 0 and -number == _NO_SUCH_ENTRY):
        print(f"the kernel refuses: {os.strerror(-number)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

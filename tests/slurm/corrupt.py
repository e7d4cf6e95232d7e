"""Spoil what comes out of one node of a lab: ``python corrupt.py PORT OTHER`` passes Ethernet frames between two ports.

From SIGUSR1 on it changes one byte of the data in every large TCP segment that it gets from PORT and corrects the
checksum, as a bad switch or network card does: TCP takes it for good.
"""

import select
import signal
import socket
import struct
import sys

LARGE = 1400  # bytes of a frame: data of a measurement, not the talk around it
ETHERNET = 14
OFFSET = 200  # of the changed byte, from the start of the frame: well inside the data
_ALL = 0x0003  # ETH_P_ALL, see packet(7)
_OUTGOING = 4  # PACKET_OUTGOING


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    padded = data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def spoil(frame: bytes) -> bytes:
    """Change one byte of the data of a large TCP segment; any other frame comes back as it is."""
    is_tcp = frame[12:14] == b"\x08\x00" and frame[ETHERNET + 9] == socket.IPPROTO_TCP
    if len(frame) < LARGE or not is_tcp:
        return frame
    new = bytearray(frame)
    new[OFFSET] ^= 0x40
    start = ETHERNET + (frame[ETHERNET] & 15) * 4
    end = ETHERNET + int.from_bytes(frame[ETHERNET + 2 : ETHERNET + 4], "big")
    new[start + 16 : start + 18] = b"\0\0"
    pseudo = frame[ETHERNET + 12 : ETHERNET + 20] + struct.pack("!BBH", 0, socket.IPPROTO_TCP, end - start)
    new[start + 16 : start + 18] = checksum(pseudo + bytes(new[start:end])).to_bytes(2, "big")
    return bytes(new)


def listen(port: str) -> socket.socket:
    """Return a socket for all frames of a port."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    found.bind((port, _ALL))
    return found


def main() -> None:
    first, second = map(listen, sys.argv[1:3])
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
    print("ready", flush=True)
    while True:
        for port in select.select([first, second], [], [])[0]:
            frame, address = port.recvfrom(65536)
            if address[2] == _OUTGOING:  # what this program itself sent
                continue
            if port is first:
                second.send(spoil(frame) if asked else frame)
            else:
                first.send(frame)


if __name__ == "__main__":
    main()

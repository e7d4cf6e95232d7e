"""Time one TCP stream: ``recv ADDRESS`` prints bytes per second of what ``send ADDRESS BYTES`` sent."""

import socket
import sys
import time

PORT = 17117
WARM_UP = 2_000_000  # the first bytes pass a full bucket and a small window


def receive(host: str) -> None:
    with socket.create_server((host, PORT)) as server:
        server.settimeout(20)
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(20)
            got, start = 0, None
            while data := connection.recv(1 << 18):
                got += len(data)
                if start is None and got >= WARM_UP:
                    got, start = 0, time.perf_counter()
            assert start is not None
            print(got / (time.perf_counter() - start), flush=True)


def send(host: str, num_bytes: int) -> None:
    with socket.create_connection((host, PORT), timeout=20) as connection:
        connection.sendall(bytes(num_bytes))


if __name__ == "__main__":
    receive(sys.argv[2]) if sys.argv[1] == "recv" else send(sys.argv[2], int(sys.argv[3]))

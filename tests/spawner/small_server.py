"""The least that a hub takes for a notebook server: answers every request with its environment. Quick to start."""

import os
import socket
from urllib.parse import urlparse

url = urlparse(os.environ["JUPYTERHUB_SERVICE_URL"])
body = "\n".join(f"{name}={value}" for name, value in os.environ.items()).encode()
head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
listener = socket.create_server((url.hostname or "127.0.0.1", url.port or 0))
while True:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(head + body)

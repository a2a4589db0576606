"""Authenticated messages between two nodes of a job, over a TCP connection.

Both nodes have the secret key of this start of the job. Each proves it before the other reads a fact: it sends the
HMAC-SHA256 of two random challenges, one of each side. Every later message carries an HMAC of its text, its direction
and these challenges. Reading is bounded in bytes and in time, whatever the other side sends.
"""

import hashlib
import hmac
import secrets
import socket
import time

MOST_BYTES = 65_536  # of a message; a node's facts are some hundred bytes
CHALLENGE_BYTES = 32


class StrangerError(Exception):
    """The other side is not a node of this start of the job, or does not answer as one in time."""


class Peer:
    """The other node of a connection. Methods raise StrangerError for what a node of this job would not send."""

    def __init__(self, connection: socket.socket, key: bytes, is_head: bool) -> None:
        self.connection = connection
        self._key = key
        self._own, self._other = ("head", "guest") if is_head else ("guest", "head")
        self._challenges = ""
        self._buffer = b""

    def greet(self, timeout_s: float) -> None:
        """Prove the key to the other side, which proves it as well; at most `timeout_s` seconds in all."""
        deadline = time.monotonic() + timeout_s
        if self._own == "head":
            challenge = secrets.token_hex(CHALLENGE_BYTES)
            self._send_line(challenge, deadline)
            answer, _, proof = self._read_line(deadline).partition(" ")
            self._set_challenges(challenge, answer)
            self._check(proof, "hello")
            self._send_line(self._mac(self._own, "hello"), deadline)
        else:
            challenge, own = self._read_line(deadline), secrets.token_hex(CHALLENGE_BYTES)
            self._set_challenges(challenge, own)
            self._send_line(f"{own} {self._mac(self._own, 'hello')}", deadline)
            self._check(self._read_line(deadline), "hello")

    def send(self, text: str, timeout_s: float) -> None:
        """Send a line of text."""
        self._send_line(f"{self._mac(self._own, text)} {text}", time.monotonic() + timeout_s)

    def receive(self, timeout_s: float) -> str:
        """The next line of text."""
        proof, _, text = self._read_line(time.monotonic() + timeout_s).partition(" ")
        self._check(proof, text)
        return text

    def _set_challenges(self, of_head: str, of_guest: str) -> None:
        if not len(of_head) == len(of_guest) == 2 * CHALLENGE_BYTES:
            raise StrangerError("a challenge of another length")
        self._challenges = of_head + of_guest

    def _mac(self, sender: str, text: str) -> str:
        message = f"{sender} {self._challenges} {text}".encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()

    def _check(self, proof: str, text: str) -> None:
        if not hmac.compare_digest(proof.encode(), self._mac(self._other, text).encode()):
            raise StrangerError("a wrong key")

    def _send_line(self, text: str, deadline: float) -> None:
        try:
            self.connection.settimeout(_left(deadline))
            self.connection.sendall(f"{text}\n".encode())
        except OSError as error:
            raise StrangerError(str(error)) from None

    def _read_line(self, deadline: float) -> str:
        while b"\n" not in self._buffer:
            if len(self._buffer) > MOST_BYTES:
                raise StrangerError("a line without an end")
            try:
                self.connection.settimeout(_left(deadline))
                received = self.connection.recv(4096)
            except OSError as error:
                raise StrangerError(str(error)) from None
            if not received:
                raise StrangerError("the connection was closed")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", errors="replace")


def _left(deadline: float) -> float:
    """Seconds until the deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left

"""Frames between launchers: each side proves that it holds the job's secret; so does each frame.

    client                                     server
    magic, nonce c                      ──▶
                                        ◀──    magic, nonce s, HMAC(secret, "server" c s)
    HMAC(secret, "client" c s)          ──▶
    length, HMAC(key, number, payload), payload   ◀──▶  the same, with another key

The nonces are new for each connection; the keys are derived from them and differ between the two
directions. Frames are numbered. So a frame recorded from this or another connection is refused, and
so is a frame that was changed, left out or sent twice. Nothing is encrypted.

Until a peer has proved itself, at most 80 bytes of fixed layout are accepted from it: nothing from
an unknown peer is ever parsed. This file knows no sockets: bytes come in and go out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

MAGIC = b"collective/host1"
_NONCE = 32
_TAG = 32
_GREETING = len(MAGIC) + _NONCE
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
LONGEST_PAYLOAD = 4 << 20


class Refused(Exception):
    """Says why a peer's bytes are refused. The text reveals nothing about the secret."""


class FrameStream:
    """Turns a connection's bytes into payloads, and payloads into bytes.

    Attributes:
        outgoing: the bytes to send; the sender removes them from the front.
        authenticated: whether the peer has proved that it holds the secret.
    """

    def __init__(self, secret: bytes, is_server: bool) -> None:
        self.outgoing = bytearray()
        self.authenticated = False
        self._secret = secret
        self._is_server = is_server
        self._nonce = os.urandom(_NONCE)
        self._nonces = b""
        self._incoming = bytearray()
        self._sending_key = self._receiving_key = b""
        self._sent = self._received = 0
        if not is_server:
            self.outgoing += MAGIC + self._nonce

    def feed(self, data: bytes) -> list[bytes]:
        """Takes bytes from the peer and returns the payloads that they complete.

        Raises:
            Refused: a holder of the secret wouldn't send these bytes. The caller is to close the
                connection once it has sent what is outgoing.
        """
        self._incoming += data
        if not self.authenticated:
            self._shake_hands()
        return self._payloads() if self.authenticated else []

    def write(self, payload: bytes) -> None:
        """Adds a frame to the outgoing bytes; the peer must be authenticated."""
        if not self.authenticated:
            raise ValueError("the peer isn't authenticated yet")
        if len(payload) > LONGEST_PAYLOAD:
            raise ValueError(f"a payload of {len(payload)} bytes, more than {LONGEST_PAYLOAD}")
        tag = _frame_tag(self._sending_key, self._sent, payload)
        self.outgoing += _LENGTH.pack(len(payload)) + tag + payload
        self._sent += 1

    def _shake_hands(self) -> None:
        seen = bytes(self._incoming[: len(MAGIC)])
        if not self._nonces and not MAGIC.startswith(seen):
            raise Refused("it doesn't speak this protocol")
        if self._is_server:
            self._shake_hands_as_server()
        elif len(self._incoming) >= _GREETING + _TAG:
            greeting = self._take(_GREETING)
            self._set_keys(self._nonce + greeting[len(MAGIC) :])
            self.outgoing += self._proof(b"client")  # even for another secret: both sides notice
            self._check_proof(b"server")

    def _shake_hands_as_server(self) -> None:
        if not self._nonces:
            if len(self._incoming) < _GREETING:
                return
            greeting = self._take(_GREETING)
            self._set_keys(greeting[len(MAGIC) :] + self._nonce)
            self.outgoing += MAGIC + self._nonce + self._proof(b"server")
        if len(self._incoming) >= _TAG:
            self._check_proof(b"client")

    def _set_keys(self, nonces: bytes) -> None:
        self._nonces = nonces
        keys = [self._proof(b"frames of the client"), self._proof(b"frames of the server")]
        own, self._receiving_key = reversed(keys) if self._is_server else keys
        self._sending_key = own

    def _proof(self, role: bytes) -> bytes:
        return _hmac(self._secret, role + b"\0" + self._nonces)

    def _check_proof(self, role: bytes) -> None:
        if not hmac.compare_digest(self._take(_TAG), self._proof(role)):
            raise Refused("it has another secret")
        self.authenticated = True

    def _payloads(self) -> list[bytes]:
        payloads = []
        start = 0
        while len(self._incoming) - start >= _LENGTH.size + _TAG:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            if length > LONGEST_PAYLOAD:
                raise Refused(f"a frame of {length} bytes, more than {LONGEST_PAYLOAD}")
            body = start + _LENGTH.size + _TAG
            if len(self._incoming) < body + length:
                break
            payload = bytes(self._incoming[body : body + length])
            tag = bytes(self._incoming[start + _LENGTH.size : body])
            expected = _frame_tag(self._receiving_key, self._received, payload)
            if not hmac.compare_digest(tag, expected):
                raise Refused("a frame that was changed, or sent before")
            self._received += 1
            payloads.append(payload)
            start = body + length
        del self._incoming[:start]
        return payloads

    def _take(self, length: int) -> bytes:
        taken = bytes(self._incoming[:length])
        del self._incoming[:length]
        return taken


def _frame_tag(key: bytes, number: int, payload: bytes) -> bytes:
    return _hmac(key, _NUMBER.pack(number) + payload)


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()

"""Encoding of messages as frames, and back."""

from __future__ import annotations

import msgspec

from optuna_hermes.broker._protocol._from_broker import FromBroker
from optuna_hermes.broker._protocol._from_client import FromClient
from optuna_hermes.errors import ProtocolError

MAX_FRAME_BYTES = 4 * 1024 * 1024
HEADER_BYTES = 4

_OTHER_VERSION = "the other end is of another version, or no part of optuna-hermes: end it"

# Made once: a decoder compiles the types of all its messages.
_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_broker_decoder: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)


def frame(message: FromClient | FromBroker) -> bytes:
    """Encode a message as one frame.

    Raises:
        ProtocolError: the message is longer than ``MAX_FRAME_BYTES``.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"A frame holds {MAX_FRAME_BYTES} bytes at most but got {len(body)}: say less at once."
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Return the length that a frame's first 4 bytes announce.

    Raises:
        ProtocolError: it is zero or above ``MAX_FRAME_BYTES``.
    """
    # Refused before any of it is read: a stranger's first bytes may announce gigabytes.
    length = int.from_bytes(header, "big")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ProtocolError(
            f"A frame holds 1 to {MAX_FRAME_BYTES} bytes but announces {length}: {_OTHER_VERSION}."
        )
    return length


def decode_from_client(body: bytes) -> FromClient:
    """Read a client's message.

    Raises:
        ProtocolError: it is none.
    """
    # msgspec raises ValueError for texts that are no UTF-8, RecursionError for maps in maps.
    try:
        return _client_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"Not a client's message ({error}): {_OTHER_VERSION}.") from error


def decode_from_broker(body: bytes) -> FromBroker:
    """Read a broker's message.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _broker_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"Not a broker's message ({error}): {_OTHER_VERSION}.") from error

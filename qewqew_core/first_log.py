"""Transaction logs of 2026-11-20, when there were no sessions: what differs from today's, and how to make one of today's of them.

They have the magic of today's, and are never taken for them: a body whose meaning has changed has another length or other
fields, so that `log.replay` refuses it.

========= ================================================================== ==============================================
what      then                                                               today
========= ================================================================== ==============================================
``G``     u16 chunk, u32 new head, u32 records: from the head on             has the start too
chunk     number of pieces; the pieces                                       has spans that are gone behind the head
`lease`   ``chunks``, whole; ``cut``: where the copy of the front of the     ``parts``: chunk, and None or the copy: spans,
          next ends, its records, crc, pieces                                crc, pieces
others    no time-outs of leases                                             ``lease_timeout``
========= ================================================================== ==============================================
"""

from __future__ import annotations

import json
import struct
from typing import Any

from qewqew_core import journal, log
from qewqew_core.state import State

_TAKE = struct.Struct(">cHII")
_SAME = {b"A": log._INLINE, b"X": log._EXTENT, b"N": log._NEW, b"K": log._PUT_KEY, b"J": log._JSON}


def translate(data: bytes, path: str) -> bytes | None:
    """The same log as it would be written today; None if it is damaged, or none of that time."""
    generation = journal.generation_of(data, log.MAGIC, path)
    state, parts, end = State(), [journal.head(log.MAGIC, generation)], journal.BEGIN
    try:
        for frame in journal.frames(data, generation):
            kind, body, end = frame.kind, frame.body, frame.end
            if kind == log.COMMIT:
                body = _commit(body, state)
                for _ in log.apply(body, state):
                    pass
            elif kind == log._CHUNK_KIND:
                body = _chunks(body)
                log._load(kind, body, state)
            elif kind == log._BATCH:
                begin = 4 + int.from_bytes(body[:4])
                body = body[:begin] + _chunks(body[begin:])
                log._load(kind, body, state)
            parts.append(journal.frame(kind, body, generation))
    except log.NONSENSE:
        return None
    return None if journal.was_durable(data, generation, end, log._APPENDED) else b"".join(parts)


def _commit(body: bytes, state: State) -> bytes:
    parts, at = [body[:8]], 8
    while at < len(body):
        begin, letter = at, body[at : at + 1]
        if letter == b"G":
            _, chunk_id, head, records = _TAKE.unpack_from(body, at)
            at += _TAKE.size
            parts.append(log.take(chunk_id, state.chain[chunk_id].head, head, records))
            continue
        at += _SAME[letter].size
        if letter in (b"A", b"J"):  # bytes follow, as many as its last number says
            at += int.from_bytes(body[at - 4 : at])
        if letter == b"J":
            rare = json.loads(body[begin + log._JSON.size : at])
            parts.append(log.rare(**_rare(rare, state)))
            if rare["op"] == "put_back" and (last := state.last) and last.head == last.tail:
                parts.append(log.new_chunk(last.id, last.size))  # today the empty chunk behind others is dropped
        else:
            parts.append(body[begin:at])
    return b"".join(parts)


def _rare(rare: dict[str, Any], state: State) -> dict[str, Any]:
    if rare["op"] == "lease":
        whole, cut = rare.pop("chunks"), rare.pop("cut")
        rare["parts"] = [(chunk_id, None) for chunk_id in whole]
        if cut:
            end, records, crc, pieces = cut
            front = next(one for one in state.chain.values() if one.id not in whole)
            rare["parts"].append((front.id, ([(front.head, end, records)], crc, pieces)))
    return {"lease_timeout": None, **rare} if rare["op"] in ("lease", "lease_again") else rare


def _chunks(body: bytes) -> bytes:
    parts, at = [], 0
    while at < len(body):
        pieces = at + log._CHUNK.size + 4
        end = pieces + int.from_bytes(body[pieces - 4 : pieces]) * log._PIECE.size
        parts.append(body[at:pieces] + bytes(4) + body[pieces:end])  # nothing is gone behind the head
        at = end
    return b"".join(parts)

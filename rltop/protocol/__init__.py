"""The wire: message types, codec and version range. `docs/protocol.md` is the specification; this package follows it.

Pure: imports msgspec and nothing of rltop, opens nothing, reads no clock.
"""

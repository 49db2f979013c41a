"""Imported first of all: attaches this process, as Ray's setup hook does before a worker imports anything."""

from __future__ import annotations

import sys

import stubs  # type: ignore[import-not-found]

import rltop.integrations.slime as hooks

stubs.install()
hooks.setup()
assert not {"torch", "zmq", "textual", "ray"} & set(sys.modules), "the setup hook brought what is not its own"

"""The process that owns a run's state: it takes records, keeps state, events and series, and serves viewers.

Pure parts (no sockets, no clock of their own): `state`, `events`, `series`, `sessions`, `phases`, `ingest`. The rest
touches the world: `journal` (SQLite), `server` (ZeroMQ), `sources` (scrapes), `trainer_job` (a process), `app` (all of
it together).
"""

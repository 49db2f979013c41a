"""The client of a run: a mirror of the daemon's state, kept current over a unix socket or over SSH.

`local_client` and `ssh_client` make a `Client`; `Client.run()` keeps it connected for as long as it runs. The mirror is
plain data and can be used alone (`Mirror.apply`). Nothing of sockets is imported before the first connection.
"""

from rltop.client.mirror import Mirror, SequenceError, Series
from rltop.client.session import Client, Status
from rltop.client.targets import SshTarget, local_client, parse_ssh_target, ssh_client
from rltop.client.transport import ConnectionLost, Transport

__all__ = [
    "Client",
    "ConnectionLost",
    "Mirror",
    "SequenceError",
    "Series",
    "SshTarget",
    "Status",
    "Transport",
    "local_client",
    "parse_ssh_target",
    "ssh_client",
]
